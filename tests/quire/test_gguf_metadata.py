"""Metadata of GGUF files, read against the reference writer and against damage."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from quire.gguf_metadata import DamagedFile, read_metadata


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, value in VALUES.items():
        writer.add_key_value(kind.name.lower(), value, kind)
    writer.add_array("texts", ["", "é", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("truths", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


VALUES: dict[GGUFValueType, Any] = {
    GGUFValueType.UINT8: 255,
    GGUFValueType.INT8: -128,
    GGUFValueType.UINT16: 65_535,
    GGUFValueType.INT16: -32_768,
    GGUFValueType.UINT32: 2**32 - 1,
    GGUFValueType.INT32: -(2**31),
    GGUFValueType.FLOAT32: 0.5,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "naïve\n",
    GGUFValueType.UINT64: 2**64 - 1,
    GGUFValueType.INT64: -(2**63),
    GGUFValueType.FLOAT64: 1e300,
}


def test_every_type_of_value(small: Path) -> None:
    metadata = read_metadata(small)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {
        **{kind.name.lower(): value for kind, value in VALUES.items()},
        "texts": ["", "é", "日本"],
        "numbers": [1, -2, 3],
        "truths": [True, False],
    }


def test_a_file_cut_anywhere_is_damaged(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    whole = read_metadata(small)
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        try:
            # The end of the file is padding.
            assert read_metadata(cut) == whole
        except DamagedFile:
            continue
        assert length > len(data) - 64


@given(st.data())
def test_a_file_with_wrong_bytes_never_does_anything_else(small: Path, data: st.DataObject) -> None:
    good = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = small.with_name("bad.gguf")
    bad.write_bytes(good)
    with contextlib.suppress(DamagedFile):
        read_metadata(bad)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with the GGUF magic"),
        (b"PK\x03\x04", "does not begin with the GGUF magic"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "its GGUF version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends too early"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
            "has a string of 9223372036854775808 bytes",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**40), "ends too early"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"k", 8, 1, b"\xff"), "not UTF-8"),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=message):
        read_metadata(path)
