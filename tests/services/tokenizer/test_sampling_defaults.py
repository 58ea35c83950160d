import json
from pathlib import Path
from typing import Any

import pytest

from services.chassis.process import StartupError
from services.tokenizer.domain import SamplingDefaults
from services.tokenizer.sampling_defaults import load_sampling_defaults


def load(folder: Path, config: dict[str, Any]) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return load_sampling_defaults(folder)


def test_without_a_file_the_contract_decides(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(temperature=1, top_p=1, top_k=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6}, SamplingDefaults(temperature=0.6)),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": True},
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=50),
        ),
        ({"temperature": None, "top_p": None, "top_k": None}, SamplingDefaults()),
        ({"temperature": 0, "top_k": 0}, SamplingDefaults(temperature=0)),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 3},
            SamplingDefaults(temperature=0, top_k=3),
        ),
        ({"eos_token_id": [2, 7]}, SamplingDefaults()),
    ],
)
def test_keys_in_the_file_count(
    tmp_path: Path, config: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert load(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": -1}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": "warm"}, "temperature must be a number, got 'warm'"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number >= 0, got 2.5"),
        ({"top_k": -1}, "top_k must be a whole number >= 0, got -1"),
        ({"top_k": True}, "top_k must be a number, got True"),
    ],
)
def test_a_bad_value_is_named_with_its_file(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json: {message}"):
        load(tmp_path, config)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"generation_config\.json: is not JSON"):
        load_sampling_defaults(tmp_path)


def test_what_is_not_built_yet_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, {"repetition_penalty": 1.0, "min_p": 0.0})
    assert caplog.text == ""
    load(tmp_path, {"repetition_penalty": 1.1, "min_p": 0.0, "no_repeat_ngram_size": 3})
    assert "not available in this version: repetition_penalty, no_repeat_ngram_size" in caplog.text
