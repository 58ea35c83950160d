"""Priority classes and tenants as flags: `NAME:KEY=VALUE:KEY=VALUE`.

Each function raises ValueError with what is wrong with its text; the caller knows the flag.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.scheduler.core.config import PriorityClass, TenantPolicy
from services.scheduler.policy_rules import (
    MOST_CLASSES,
    MOST_TENANTS,
    Problem,
    class_problems,
    name_problem,
    tenant_name_problem,
    tenant_problems,
)

_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")

_CLASS_KEYS = ("share", "floor", "ttft-target")
_TENANT_KEYS = ("weight", "max-queued-requests", "max-queued-tokens", "max-live-requests")


def read_classes(entries: Sequence[str]) -> tuple[PriorityClass, ...]:
    """Priority classes, the most important first; a floor left out is the share."""
    if len(entries) > MOST_CLASSES:
        raise ValueError(f"must be at most {MOST_CLASSES}, got {len(entries)}")
    classes = tuple(_class(entry) for entry in entries)
    _check_unique(entries, [one.name for one in classes])
    return classes


def _class(entry: str) -> PriorityClass:
    name, *pairs = entry.split(":")
    if problem := name_problem(name):
        raise ValueError(f"{entry!r}: the name {problem}")
    values = _values(entry, pairs, _CLASS_KEYS)
    if "share" not in values:
        raise ValueError(f"{entry!r}: needs share=1..1000")
    share = _whole(entry, "share", values)
    target_ms = _whole(entry, "ttft-target", values) if "ttft-target" in values else None
    one = PriorityClass(
        name=name,
        share=share,
        floor=_whole(entry, "floor", values) if "floor" in values else share,
        ttft_target_us=None if target_ms is None else target_ms * 1000,
    )
    _refuse(entry, class_problems(one))
    return one


def read_tenants(
    entries: Sequence[str], others: TenantPolicy
) -> tuple[tuple[str, TenantPolicy], ...]:
    """Tenants with a policy of their own; what one leaves out is that of `others`."""
    if len(entries) > MOST_TENANTS:
        raise ValueError(f"must be at most {MOST_TENANTS}, got {len(entries)}")
    tenants = tuple(_tenant(entry, others) for entry in entries)
    _check_unique(entries, [name for name, _ in tenants])
    return tenants


def _tenant(entry: str, others: TenantPolicy) -> tuple[str, TenantPolicy]:
    name, *pairs = entry.split(":")
    if problem := tenant_name_problem(name):
        raise ValueError(f"{entry!r}: the name {problem}")
    return name, _policy(entry, pairs, others)


def read_tenant_policy(pairs: Sequence[str]) -> TenantPolicy:
    """The policy of the tenants that have none of their own."""
    return _policy(",".join(pairs), pairs, TenantPolicy())


def _policy(entry: str, pairs: Sequence[str], base: TenantPolicy) -> TenantPolicy:
    values = _values(entry, pairs, _TENANT_KEYS)
    changes = {
        key.replace("-", "_"): _whole(entry, key, values) for key in values if key != "weight"
    }
    if "weight" in values:
        if not _DECIMAL.fullmatch(values["weight"]):
            raise ValueError(f"{entry!r}: weight must be a number, got {values['weight']!r}")
        changes["weight"] = round(float(values["weight"]) * 1000)
    policy = replace(base, **changes)
    _refuse(entry, tenant_problems(policy))
    return policy


def _values(entry: str, pairs: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in keys:
            raise ValueError(f"{entry!r}: {pair!r} must be KEY=VALUE with one of {', '.join(keys)}")
        if key in values:
            raise ValueError(f"{entry!r}: {key} is given twice")
        values[key] = value
    return values


def _whole(entry: str, key: str, values: Mapping[str, str]) -> int:
    text = values[key]
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ValueError(f"{entry!r}: {key} must be a whole number, got {text!r}")
    return int(text)


def _refuse(entry: str, problems: Iterable[Problem]) -> None:
    for key, text in problems:
        raise ValueError(f"{entry!r}: {key.replace('_', '-')} {text}")


def _check_unique(entries: Sequence[str], names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{entries[index]!r}: {name!r} is given twice")
