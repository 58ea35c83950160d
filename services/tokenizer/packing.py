"""Token ids as the wire carries them: little-endian uint32, back to back."""

import sys
from array import array
from collections.abc import Sequence

_SWAPPED = sys.byteorder == "big"


def compact_ids(ids: Sequence[int]) -> Sequence[int]:
    """The same ids in four bytes each, for those that are kept while a request lives."""
    return array("I", ids)


def pack_ids(ids: Sequence[int]) -> bytes:
    """`ids` packed.

    Raises:
        OverflowError: an id is not a uint32.
    """
    column = array("I", ids)
    if _SWAPPED:
        column.byteswap()
    return column.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The ids in `packed`.

    Raises:
        ValueError: its length is not a multiple of four.
    """
    column = array("I")
    column.frombytes(packed)
    if _SWAPPED:
        column.byteswap()
    return column.tolist()
