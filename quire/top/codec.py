"""From `GetLoadsResponse` to a `Sample`. The only file of `quire top` that reads protobuf."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from quire.top.sample import (
    Latencies,
    PriorityClass,
    Sample,
    Stall,
    Tenant,
    Timings,
    Worker,
)
from quire.v1 import info_pb2

_Part = TypeVar("_Part")

_HIDDEN = "\N{REPLACEMENT CHARACTER}"


def sample_of(message: info_pb2.GetLoadsResponse) -> Sample:
    """What a scheduler said."""
    return _read(
        Sample,
        message,
        workers=tuple(
            _read(Worker, one, timings=_read_optional(Timings, one, "timings"))
            for one in message.workers
        ),
        classes=tuple(
            _read(PriorityClass, one, latencies=_read_optional(Latencies, one, "latencies"))
            for one in message.classes
        ),
        tenants=tuple(_read(Tenant, one) for one in message.tenants),
        counters=_counters(message.counters),
        latencies=_read_optional(Latencies, message, "latencies"),
        stall=_read_optional(Stall, message, "stall"),
    )


def _counters(message: info_pb2.SchedulerCounters) -> Mapping[str, int]:
    names = (field.name for field in message.DESCRIPTOR.fields)
    return {name: getattr(message, name) for name in names}


def _read_optional(kind: type[_Part], message: Any, field: str) -> _Part | None:
    return _read(kind, getattr(message, field)) if message.HasField(field) else None


def _read(kind: type[_Part], message: Any, **made: object) -> _Part:
    """A dataclass of the fields of the same names, but for those in `made`."""
    of_kind: Any = kind
    names = [field.name for field in fields(of_kind) if field.name not in made]
    values = {name: getattr(message, name) for name in names}
    safe = {n: shown(value) if isinstance(value, str) else value for n, value in values.items()}
    return kind(**safe, **made)


def shown(text: str) -> str:
    """Text with nothing in it that tells a terminal to do things: names come from callers."""
    return "".join(letter if letter.isprintable() else _HIDDEN for letter in text)
