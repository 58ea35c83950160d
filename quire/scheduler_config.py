"""The configuration of a scheduler as text: `NAME=VALUE`, named and measured as its flags are.

One table for those who read and write it by hand (`quire admin`) and for the scheduler's log of
changes. Knows which names there are and of what kind their values are; which values are in range
is for the scheduler to say.

Names: `max-num-seqs`, `scheduling-policy` (or `policy`), `class.NAME.share`, `tenant.NAME.weight`,
`other-tenants.weight` and so on; `tenant.NAME=none` takes away what a tenant has of its own.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequest
from quire.v1 import admin_pb2

NONE = "none"
"""The text of a bound or a target that is not there."""

_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_LARGEST = 2**32 - 1
_POLICY = "SCHEDULING_POLICY_"
_EVICTION = "EVICTION_POLICY_"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A field, and how its values are read and written.

    Attributes:
        field: its name in the message.
        read: text to the value of the field; raises ValueError with what it must be.
        write: the other way.
        can_be_none: absent, it means that there is none; 0 takes it away.
    """

    field: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    can_be_none: bool = False


def _whole(field: str, *, can_be_none: bool = False) -> _Kind:
    def read(text: str) -> int:
        if not _DECIMAL.fullmatch(text) or "." in text or int(text) > _LARGEST:
            raise ValueError(f"must be a whole number from 0 to {_LARGEST}")
        return int(text)

    return _Kind(field, read, str, can_be_none)


def _thousandths(field: str) -> _Kind:
    def read(text: str) -> int:
        if not _DECIMAL.fullmatch(text) or float(text) * 1000 > _LARGEST:
            raise ValueError(f"must be a number from 0 to {_LARGEST // 1000}")
        return round(float(text) * 1000)

    return _Kind(field, read, lambda value: f"{value / 1000:.15g}")


def _choice(field: str, prefix: str, numbers: Mapping[str, int]) -> _Kind:
    named = {
        name.removeprefix(prefix).lower().replace("_", "-"): number
        for name, number in numbers.items()
        if number
    }
    texts = {number: text for text, number in named.items()}

    def read(text: str) -> int:
        if text not in named:
            raise ValueError(f"must be one of {', '.join(named)}")
        return named[text]

    return _Kind(field, read, lambda number: texts.get(number, str(number)))


def _text(field: str) -> _Kind:
    return _Kind(field, str)


def _switch(field: str) -> _Kind:
    return _Kind(field, lambda text: text == "true", lambda value: str(value).lower())


_SETTINGS: Mapping[str, _Kind] = MappingProxyType(
    {
        "max-num-seqs": _whole("max_num_seqs", can_be_none=True),
        "max-num-batched-tokens": _whole("max_num_batched_tokens", can_be_none=True),
        "prefill-chunk-size": _whole("prefill_chunk_size"),
        "tpot-target": _whole("tpot_target_ms", can_be_none=True),
        "scheduling-policy": _choice("policy", _POLICY, dict(admin_pb2.SchedulingPolicy.items())),
        "default-class": _text("default_class"),
        "ageing": _thousandths("ageing_ms"),
        "max-queued-requests": _whole("max_queued_requests", can_be_none=True),
        "max-queued-tokens": _whole("max_queued_tokens", can_be_none=True),
        "max-pinned-share": _whole("max_pinned_share"),
        "stall-timeout": _thousandths("stall_timeout_ms"),
    }
)
"""What can change while the scheduler runs, beside classes and tenants."""

_FIXED: Mapping[str, _Kind] = MappingProxyType(
    {
        "enable-prefix-caching": _switch("enable_prefix_caching"),
        "eviction-policy": _choice("eviction", _EVICTION, dict(admin_pb2.EvictionPolicy.items())),
        "time-wheel-slots": _whole("time_wheel_slots"),
        "partial-block-reuse": _switch("partial_block_reuse"),
        "worker-grace": _thousandths("worker_grace_ms"),
    }
)
"""What is told, and cannot change."""

FIXED_FLAGS = (
    *_FIXED,
    "check-block-tables",
    "drain-timeout",
    "listen",
    "log-level",
    "prefix-caching-hash-algo",
    "priority-class",
)
"""Flags of the scheduler that only count when it starts, without their dashes."""

_OF_A_CLASS: Mapping[str, _Kind] = MappingProxyType(
    {
        "share": _whole("share"),
        "floor": _whole("floor"),
        "ttft-target": _whole("ttft_target_ms", can_be_none=True),
    }
)

_OF_A_TENANT: Mapping[str, _Kind] = MappingProxyType(
    {
        "weight": _thousandths("weight"),
        "max-queued-requests": _whole("max_queued_requests", can_be_none=True),
        "max-queued-tokens": _whole("max_queued_tokens", can_be_none=True),
        "max-live-requests": _whole("max_live_requests", can_be_none=True),
    }
)

_SHORT = MappingProxyType({"policy": "scheduling-policy"})


def config_lines(config: admin_pb2.SchedulerConfig) -> dict[str, str]:
    """A complete configuration by name, in the order in which one reads it."""
    lines = dict(_lines("", _SETTINGS, config))
    for one in config.classes:
        lines |= _lines(f"class.{one.name}.", _OF_A_CLASS, one)
    for tenant in config.tenants:
        lines |= _lines(f"tenant.{tenant.name}.", _OF_A_TENANT, tenant)
    lines |= _lines("other-tenants.", _OF_A_TENANT, config.other_tenants)
    return lines | dict(_lines("", _FIXED, config))


def _lines(prefix: str, kinds: Mapping[str, _Kind], message: Any) -> Iterator[tuple[str, str]]:
    for name, kind in kinds.items():
        if message.HasField(kind.field):
            yield f"{prefix}{name}", kind.write(getattr(message, kind.field))
        elif kind.can_be_none:
            yield f"{prefix}{name}", NONE


def difference(
    old: admin_pb2.SchedulerConfig, new: admin_pb2.SchedulerConfig
) -> list[tuple[str, str, str]]:
    """What differs between two complete configurations: name, value in `old`, value in `new`."""
    before, after = config_lines(old), config_lines(new)
    return [
        (name, before.get(name, NONE), after.get(name, NONE))
        for name in {**before, **after}
        if before.get(name, NONE) != after.get(name, NONE)
    ]


def parse_change(assignments: Sequence[str]) -> admin_pb2.SchedulerConfig:
    """The change that `NAME=VALUE` texts ask for.

    Raises:
        InvalidRequest: they cannot be read; names each.
    """
    change = admin_pb2.SchedulerConfig()
    wrong: list[tuple[str, str]] = []
    seen: set[str] = set()
    for assignment in assignments:
        name, equals, value = assignment.rpartition("=")
        name = _SHORT.get(name, name)
        try:
            if not equals:
                raise ValueError("must be NAME=VALUE")
            if name in seen:
                raise ValueError("is given twice")
            seen.add(name)
            _assign(change, name, value)
        except ValueError as error:
            wrong.append((name or assignment, str(error)))
    if wrong:
        raise InvalidRequest(*wrong[0], *wrong[1:])
    return change


def _assign(change: admin_pb2.SchedulerConfig, name: str, value: str) -> None:
    if name in _SETTINGS:
        _set(change, _SETTINGS[name], value)
        return
    group, _, rest = name.partition(".")
    owner, _, key = rest.rpartition(".")
    if group == "class":
        _set(_entry(change.classes, owner), _known(_OF_A_CLASS, key), value)
    elif group == "tenant" and value == NONE and key not in _OF_A_TENANT:
        _entry(change.tenants, rest).remove = True
    elif group == "tenant":
        _set(_entry(change.tenants, owner), _known(_OF_A_TENANT, key), value)
    elif group == "other-tenants":
        _set(change.other_tenants, _known(_OF_A_TENANT, rest), value)
    elif name.removeprefix("--") in FIXED_FLAGS:
        raise ValueError("cannot change while the scheduler runs; start it again with the flag")
    else:
        known = [*_SETTINGS, "class.NAME.share", "tenant.NAME.weight", "other-tenants.weight"]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"is no setting{f'; did you mean {near[0]}?' if near else ''}")


def _known(kinds: Mapping[str, _Kind], key: str) -> _Kind:
    if key not in kinds:
        raise ValueError(f"must end with one of {', '.join(f'.{one}' for one in kinds)}")
    return kinds[key]


def _set(message: Any, kind: _Kind, value: str) -> None:
    if not value:
        raise ValueError("needs a value")
    if kind.can_be_none and value == NONE:
        setattr(message, kind.field, 0)
    else:
        try:
            setattr(message, kind.field, kind.read(value))
        except ValueError as error:
            raise ValueError(f"{error}, got {value!r}") from None


def _entry(entries: Any, name: str) -> Any:
    """The entry of that name; a new one where there is none."""
    found = next((one for one in entries if one.name == name), None)
    return entries.add(name=name) if found is None else found
