"""Sampling parameters are checked when they are written down."""

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from quire import SamplingParams, Scheduling
from quire.errors import InvalidRequest, NotSupported, QuireError


def test_nothing_given_leaves_everything_to_the_model() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "seed": None,
        "max_tokens": None,
        "ignore_eos": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e6},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"top_k": 0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"max_tokens": 1},
        {"stop": ["x" * 256] * 16},
        {"stop_token_ids": [0] * 127 + [2**32 - 1]},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ],
)
def test_limits_are_inside(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    ((name, value),) = values.items()
    assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"temperature": -0.1},
            "temperature: must be finite and from 0 to 3.4028235e+38, got -0.1",
        ),
        (
            {"temperature": float("nan")},
            "temperature: must be finite and from 0 to 3.4028235e+38, got nan",
        ),
        (
            {"temperature": float("inf")},
            "temperature: must be finite and from 0 to 3.4028235e+38, got inf",
        ),
        (
            {"temperature": 1e39},
            "temperature: must be finite and from 0 to 3.4028235e+38, got 1e+39",
        ),
        ({"temperature": "1"}, "temperature: must be a number, got '1'"),
        ({"temperature": True}, "temperature: must be a number, got True"),
        ({"top_p": 0}, "top_p: must be in (0, 1], got 0"),
        ({"top_p": 1.01}, "top_p: must be in (0, 1], got 1.01"),
        ({"top_k": -1}, "top_k: must be from 0 to 4294967295 (0 keeps all tokens), got -1"),
        ({"top_k": 1.5}, "top_k: must be a whole number, got 1.5"),
        ({"seed": -1}, "seed: must be from 0 to 2**64 - 1, got -1"),
        ({"seed": 2**64}, "seed: must be from 0 to 2**64 - 1, got 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens: must be from 1 to 4294967295, got 0"),
        ({"max_tokens": False}, "max_tokens: must be a whole number, got False"),
        ({"ignore_eos": "no"}, "ignore_eos: must be true or false, got 'no'"),
        ({"stop": [""]}, "stop: must be 1 to 256 characters each, got 0"),
        ({"stop": "x" * 257}, "stop: must be 1 to 256 characters each, got 257"),
        ({"stop": ["x"] * 17}, "stop: must be at most 16 strings, got 17"),
        ({"stop": [1]}, "stop: must be strings, got 1"),
        ({"stop": 1}, "stop: must be strings, got 1"),
        ({"stop_token_ids": 2}, "stop_token_ids: must be whole numbers, got 2"),
        ({"stop_token_ids": "2"}, "stop_token_ids: must be whole numbers, got '2'"),
        ({"stop_token_ids": [True]}, "stop_token_ids: must be whole numbers, got True"),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids: must be whole numbers, got 2.0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: must be from 0 to 2**32 - 1 each, got -1"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids: must be at most 128 ids, got 129"),
        (
            {"include_stop_str_in_output": 1},
            "include_stop_str_in_output: must be true or false, got 1",
        ),
        ({"skip_special_tokens": None}, "skip_special_tokens: must be true or false, got None"),
    ],
)
def test_what_is_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message
    assert caught.value.field == next(iter(values))


def test_all_that_is_wrong_is_named_at_once() -> None:
    values = {"temperature": -1, "seed": True, "stop": [""], "stop_token_ids": ["a"]}
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert caught.value.field == "temperature"
    assert [field for field, _ in caught.value.violations] == list(values)
    assert str(caught.value) == (
        "temperature: must be finite and from 0 to 3.4028235e+38, got -1; "
        "seed: must be a whole number, got True; "
        "stop: must be 1 to 256 characters each, got 0; "
        "stop_token_ids: must be whole numbers, got 'a'"
    )
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({"top_p": 2, "top_q": 1, "top_r": 1})
    assert [field for field, _ in caught.value.violations] == ["top_q", "top_r", "top_p"]


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_keywords_from_outside() -> None:
    assert SamplingParams.from_mapping({"top_k": 3, "stop": ["a"]}) == SamplingParams(
        top_k=3, stop=("a",)
    )


@pytest.mark.parametrize("name", ["n", "min_p", "logprobs", "presence_penalty", "logit_bias"])
def test_keywords_of_later_versions_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotSupported, match=rf"^{name} \(.+\) is not available in this version$"):
        SamplingParams.from_mapping({"seed": 1, name: 2})
    with pytest.raises(NotSupported, match=rf"^{name} \(.+\) is not available in this version$"):
        SamplingParams(**{"seed": 1, name: 2})


def test_unknown_keywords_are_refused_by_name() -> None:
    for make in (SamplingParams.from_mapping, lambda values: SamplingParams(**values)):
        with pytest.raises(InvalidRequest) as caught:
            make({"max_token": 3, "zzz": 1})
        violations = dict(caught.value.violations)
        assert violations["max_token"] == "is no sampling parameter; did you mean max_tokens?"
        assert violations["zzz"].startswith("is no sampling parameter; known: ignore_eos, include_")
    with pytest.raises(InvalidRequest, match=r"^sampling_params: must be keywords"):
        SamplingParams(0.5)  # type: ignore[misc]  # that is the test


def test_they_are_copied_like_any_value() -> None:
    params = SamplingParams(top_k=3, stop="a", seed=1)
    assert copy.copy(params) == copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=2) == SamplingParams(top_k=3, stop="a", seed=2)
    with pytest.raises(NotSupported, match="min_p"):
        dataclasses.replace(params, min_p=2)  # type: ignore[call-arg]  # that is the test
    assert list(inspect.signature(SamplingParams).parameters) == list(dataclasses.asdict(params))


def test_they_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]  # that is the test


def test_a_wrong_value_is_a_value_error_too() -> None:
    assert issubclass(InvalidRequest, ValueError)
    assert issubclass(InvalidRequest, QuireError)


MOST = 2**32 - 1


def test_no_scheduling_asks_for_nothing() -> None:
    assert dataclasses.asdict(Scheduling()) == {
        "priority_class": "",
        "tenant": "",
        "deadline_s": None,
        "ttft_target_ms": None,
        "tpot_target_ms": None,
        "shed_late": False,
        "session_id": "",
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"priority_class": "é" * 64},
        {"tenant": "x" * 128},
        {"deadline_s": 0.001},
        {"deadline_s": 4294967.295},
        {"deadline_s": 2},
        {"ttft_target_ms": 1},
        {"tpot_target_ms": MOST},
        {"shed_late": True},
        {"session_id": "s" * 128},
        {"cache_salt": ""},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_limits_of_scheduling_are_inside(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    assert getattr(Scheduling(**values), name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority_class": "x" * 129}, "priority_class: must be at most 128 bytes, got 129"),
        ({"priority_class": 1}, "priority_class: must be text, got 1"),
        ({"tenant": "é" * 65}, "tenant: must be at most 128 bytes, got 130"),
        ({"tenant": None}, "tenant: must be text, got None"),
        ({"session_id": "a\udc80"}, "session_id: is not valid Unicode at character 1"),
        ({"cache_salt": b"x"}, "cache_salt: must be text, got b'x'"),
        ({"deadline_s": 0}, "deadline_s: must be from 0.001 to 4294967.295, got 0"),
        ({"deadline_s": 5e6}, "deadline_s: must be from 0.001 to 4294967.295, got 5000000.0"),
        (
            {"deadline_s": float("inf")},
            "deadline_s: must be from 0.001 to 4294967.295, got inf",
        ),
        ({"deadline_s": "1"}, "deadline_s: must be a number, got '1'"),
        ({"ttft_target_ms": 0}, "ttft_target_ms: must be from 1 to 4294967295, got 0"),
        ({"ttft_target_ms": 1.5}, "ttft_target_ms: must be a whole number, got 1.5"),
        ({"tpot_target_ms": 2**32}, "tpot_target_ms: must be from 1 to 4294967295, got 4294967296"),
        ({"shed_late": 1}, "shed_late: must be true or false, got 1"),
        (
            {"skip_reading_prefix_cache": None},
            "skip_reading_prefix_cache: must be true or false, got None",
        ),
    ],
)
def test_scheduling_that_is_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Scheduling(**values)
    assert str(caught.value) == message


def test_all_that_is_wrong_with_scheduling_is_named_at_once() -> None:
    values = {"tenant": 1, "deadline_s": -1, "tpot_target_ms": 0, "shed_late": "no"}
    with pytest.raises(InvalidRequest) as caught:
        Scheduling(**values)
    assert [field for field, _ in caught.value.violations] == list(values)


def test_names_in_the_wrong_place_are_told_where_they_belong() -> None:
    with pytest.raises(InvalidRequest, match=r"^tenant: belongs into Scheduling$"):
        SamplingParams(tenant="x")  # type: ignore[call-arg]  # that is the test
    with pytest.raises(InvalidRequest, match=r"^seed: belongs into SamplingParams$"):
        Scheduling(seed=1)  # type: ignore[call-arg]  # that is the test
    with pytest.raises(InvalidRequest, match=r"^tenent: .*; did you mean tenant\?$"):
        Scheduling(tenent="x")  # type: ignore[call-arg]  # that is the test
    for kind in (SamplingParams, Scheduling):
        with pytest.raises(InvalidRequest, match=r"^priority: is a class here: Scheduling\("):
            kind(priority=1)
    with pytest.raises(InvalidRequest, match=r"^scheduling: must be keywords"):
        Scheduling("batch")  # type: ignore[misc]  # that is the test


def test_scheduling_is_copied_like_any_value() -> None:
    one = Scheduling(tenant="a", deadline_s=1)
    assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, tenant="b") == Scheduling(tenant="b", deadline_s=1)
    assert list(inspect.signature(Scheduling).parameters) == list(dataclasses.asdict(one))
