"""Frozen dataclasses as JSON by the names of their fields, and back: configurations, worker specs.

New fields need no code here. A file of a later version that has fields of its own is refused.
"""

import dataclasses
import enum
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: Any) -> str:
    """A dataclass of dataclasses, tuples, enumerations, bytes, strings, numbers and None."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)


def from_json(kind: type[T], text: str) -> T:
    """The value that `to_json` was given.

    Raises:
        ValueError: the text is not of that kind; names the field.
    """
    value: T = _read(kind, json.loads(text), kind.__name__)
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in _fields(type(value))}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else value


def _read(kind: Any, data: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (kind,) = (one for one in arguments if one is not type(None))
        return _read(kind, data, path)
    if origin is tuple:
        _expect(isinstance(data, list), path, data)
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(data)
        _expect(len(arguments) == len(data), path, data)
        return tuple(
            _read(one, item, f"{path}[{place}]")
            for place, (one, item) in enumerate(zip(arguments, data, strict=True))
        )
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, path)
    if issubclass(kind, enum.Enum):
        return kind(data)
    if kind is bytes:
        _expect(isinstance(data, str), path, data)
        return bytes.fromhex(data)
    _expect(type(data) is kind or (kind is float and type(data) is int), path, data)
    return data


def _read_dataclass(kind: Any, data: Any, path: str) -> Any:
    _expect(isinstance(data, dict), path, data)
    fields = {field.name: field for field in _fields(kind)}
    if unknown := sorted(data.keys() - fields.keys()):
        raise ValueError(f"{path}: this version knows no field {unknown[0]!r}")
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: _read(hints[name], data[name], f"{path}.{name}")
            for name in fields
            if name in data
        }
    )


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _expect(holds: bool, path: str, data: Any) -> None:
    if not holds:
        raise ValueError(f"{path}: {data!r} is not a value for it")
