"""Reads the key-value part of a GGUF file: header and metadata, no tensors.

Source: the GGUF specification, versions 2 and 3, little-endian. Every length is checked against the
file before it is believed, so a cut or hostile file gives an error and no large allocation.
Standard library only.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct(f"<{letter}")
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_LONGEST_KEY = 65_535
_DEEPEST_ARRAY = 4


class DamagedFile(ValueError):
    """It is no GGUF file, or a part of it is missing or makes no sense."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file.

    Returns:
        Value by key: int, float, bool, str, or a list of one of them.

    Raises:
        DamagedFile: the file cannot be understood.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise DamagedFile("it does not begin with the GGUF magic")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()


class _Reader:
    """A position in the bytes of one file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)

    def metadata(self) -> dict[str, Any]:
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise DamagedFile(f"its GGUF version is {version}, known are 2 and 3")
        self._scalar(_U64)  # number of tensors
        values: dict[str, Any] = {}
        for _ in range(self._scalar(_U64)):
            key = self._string(_LONGEST_KEY)
            values[key] = self._value(self._scalar(_U32), depth=0)
        return values

    def _value(self, code: int, *, depth: int) -> Any:
        if code in _SCALARS:
            return self._scalar(_SCALARS[code])
        if code == _STRING:
            return self._string(self._size)
        if code == _ARRAY and depth < _DEEPEST_ARRAY:
            return self._array(depth)
        raise DamagedFile(f"it has a value of unknown type {code}")

    def _array(self, depth: int) -> list[Any]:
        code, count = self._scalar(_U32), self._scalar(_U64)
        if code not in _SCALARS:
            self._need(count)  # each element takes at least one byte
            return [self._value(code, depth=depth + 1) for _ in range(count)]
        element = _SCALARS[code]
        self._need(count * element.size)
        start, self._at = self._at, self._at + count * element.size
        return [value for (value,) in element.iter_unpack(self._data[start : self._at])]

    def _string(self, longest: int) -> str:
        length = self._scalar(_U64)
        if length > longest:
            raise DamagedFile(f"it has a string of {length} bytes at byte {self._at}")
        self._need(length)
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedFile(f"it has a string that is not UTF-8 at byte {start}") from error

    def _scalar(self, kind: struct.Struct) -> Any:
        self._need(kind.size)
        (value,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return value

    def _need(self, count: int) -> None:
        if count > self._size - self._at:
            raise DamagedFile(f"it ends too early, at byte {self._size}")
