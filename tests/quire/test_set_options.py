"""Settings of a set as keywords."""

from typing import Any

import pytest

from quire.errors import InvalidRequest, NotSupported, UnknownSetting
from quire.set_options import LATER, PASSED, SHARED, all_flags, flags_of, in_keywords, keyword


def test_each_setting_goes_to_the_process_that_understands_it() -> None:
    settings = {
        "dtype": "float32",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "prefill_chunk_size": 64,
        "scheduling_policy": "fcfs",
        "priority_class": "a:share=2,b:share=1",
        "tpot_target": 50,
        "max_num_seqs": None,
    }
    assert flags_of(settings) == {
        "worker": ("--dtype=float32", "--max-model-len=512", "--gpu-memory-utilization=0.5"),
        "scheduler": (
            "--prefill-chunk-size=64",
            "--scheduling-policy=fcfs",
            "--priority-class=a:share=2,b:share=1",
            "--tpot-target=50",
            "--enable-prefix-caching=false",
        ),
        "tokenizer": (),
    }


def test_every_passed_flag_is_a_keyword() -> None:
    found = flags_of({keyword(flag): "x" for flag, *_ in all_flags()})
    shared = [f"{flag}=x" for flag, *_ in SHARED]
    for process, flags in PASSED.items():
        assert list(found[process]) == [*(f"{flag}=x" for flag, *_ in flags), *shared]


@pytest.mark.parametrize(
    "neutral",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        {"quantization": None, "trust_remote_code": False},
        {"speculative_model": None, "num_speculative_tokens": 0},
    ],
)
def test_settings_of_later_versions_may_ask_for_nothing(neutral: Any) -> None:
    assert flags_of(neutral) == {"worker": (), "scheduler": (), "tokenizer": ()}


def test_what_all_understand_goes_to_all() -> None:
    found = flags_of({"enable_metrics": True, "metrics_port": 9000})
    assert set(found.values()) == {("--enable-metrics=true", "--metrics-port=9000")}


@pytest.mark.parametrize("name", [keyword(flag) for flag in LATER])
def test_settings_of_later_versions_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotSupported, match=rf"^{name}='x' \(.+\) is not available in this version"):
        flags_of({name: "x"})


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(NotSupported, match="tensor_parallel_size=True"):
        flags_of({"tensor_parallel_size": True})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_length", "; did you mean max_model_len?"),
        ("tokenizer", "; did you mean tokenizers?"),
        ("zzz", ""),
    ],
)
def test_an_unknown_setting_is_named(name: str, hint: str) -> None:
    with pytest.raises(UnknownSetting) as caught:
        flags_of({name: 1})
    assert caught.value.message == f"{name} is not known{hint}"
    assert isinstance(caught.value, TypeError)


def test_a_value_of_a_wrong_kind_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"dtype: must be text, a number, .* got list"):
        flags_of({"dtype": ["float32"]})


def test_a_message_about_flags_in_keywords() -> None:
    message = "--max-model-len=9 is over 8; see --block-size, --workers and --unknown-thing"
    assert in_keywords(message) == (
        "max_model_len=9 is over 8; see block_size, workers and --unknown-thing"
    )
