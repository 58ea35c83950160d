"""The committed stubs are what the protos say, byte for byte."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def test_the_committed_stubs_are_fresh(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # the plugin is found beside the interpreter
    generator.generate(tmp_path)
    made = {path.name: path.read_bytes() for path in (tmp_path / "quire/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "quire/v1").glob("*_pb2*")}
    stale = sorted(
        name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name)
    )
    assert stale == [], "run `make protos`"


def test_a_broken_proto_is_an_error(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "protos" / "quire" / "v1" / "broken.proto"
    broken.parent.mkdir(parents=True)
    broken.write_text('syntax = "proto3"; message {')
    monkeypatch.setattr(generator, "PROTOS", tmp_path / "protos")
    with pytest.raises(RuntimeError, match="protoc ended with exit code 1"):
        generator.generate(tmp_path)
