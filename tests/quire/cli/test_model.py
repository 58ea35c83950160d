"""`quire model`, as a person uses it."""

import json
import os
from pathlib import Path

import pytest

from tests.quire.cli.fake_hub import hub
from tests.quire.cli.running_quire import Result, quire
from tests.quire.tiny_gguf import write_gguf

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": bytes(300_000),
    "README.md": b"not needed",
    "onnx/model.onnx": b"not needed",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


async def pull(home: Path, *arguments: str, **changes: str) -> Result:
    return await quire("model", "pull", *arguments, QUIRE_HOME=str(home), **changes)


async def test_a_file_and_the_list(home: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    place = home / "models" / "tiny"
    first = await pull(home, str(gguf))
    assert (first.code, first.out) == (0, f"tiny is in {place}\n")
    assert "making tokenizer.json from tiny.gguf" in first.err
    second = await pull(home, str(gguf))
    assert (second.code, second.out) == (0, f"tiny is already there: {place}\n")
    listed = await quire("model", "list", "--json", QUIRE_HOME=str(home))
    (model,) = json.loads(listed.out)
    assert (model["name"], model["weights"], model["path"]) == ("tiny", "gguf", str(place))
    assert model["bytes"] > gguf.stat().st_size


async def test_a_hub_repository(home: Path) -> None:
    with hub("owner/tiny", FILES) as endpoint:
        online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        result = await pull(home, "owner/tiny", HF_HOME=str(home / "hf"), **online)
        assert (result.code, result.err.count("Traceback")) == (0, 0), result.err
        place = home / "models" / "owner--tiny"
        assert result.out == f"owner/tiny is in {place}\n"
        wanted = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        assert sorted(os.listdir(place)) == wanted
        for name in wanted:
            assert place.joinpath(name).read_bytes() == FILES[name]
        missing = await pull(home, "owner/other", HF_HOME=str(home / "hf"), **online)
    assert missing.code == 1
    assert missing.err == (
        "quire: owner/other could not be fetched from the hub: "
        "there is no such repository, or it is private (then set HF_TOKEN)\n"
    )


async def test_a_hub_that_is_away_is_given_up_soon(home: Path) -> None:
    result = await pull(home, "owner/tiny", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert (result.code, result.out) == (1, "")
    assert result.err == "quire: owner/tiny: the hub cannot be reached (Connection refused)\n"


async def test_an_empty_list_says_what_to_do(home: Path) -> None:
    result = await quire("model", "list", QUIRE_HOME=str(home))
    assert result.code == 0
    assert result.out.endswith("get one with: quire model pull smollm2-135m-instruct\n")
