import pytest

from services.tokenizer.packing import compact_ids, pack_ids, unpack_ids


def test_ids_are_little_endian_and_four_bytes_each() -> None:
    assert pack_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert unpack_ids(b"\x01\0\0\0\x04\x03\x02\x01") == [1, 0x01020304]


@pytest.mark.parametrize("ids", [[], [0], [2**32 - 1], list(range(1000))])
def test_what_is_packed_unpacks(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_compact_ids_are_the_same_ids() -> None:
    compact = compact_ids([7, 2**32 - 1])
    assert list(compact) == [7, 2**32 - 1]
    assert list(compact[-1:]) == [2**32 - 1]


def test_half_an_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack_ids(b"12345")


def test_what_is_no_uint32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**32])


def test_a_big_endian_machine_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tokenizer.packing._SWAPPED", True)
    assert unpack_ids(b"\0\0\0\x01") == [1]
    assert pack_ids([1]) == b"\0\0\0\x01"
