import math
import re
from array import array
from dataclasses import replace

import pytest
from google.rpc import error_details_pb2

from services.chassis.errors import InvalidArgument, NotFound
from services.tokenizer.domain import (
    ChatMessage,
    Limits,
    RawOptions,
    RawSampling,
    RawTokenIds,
    Sampling,
    SamplingDefaults,
    Scheduling,
)
from services.tokenizer.text_bound import TextBound
from services.tokenizer.validation import (
    MAX_MESSAGES,
    Validator,
    check_messages,
    check_not_empty,
    check_text,
)

LIMITS = Limits(
    model="tiny",
    vocab_size=100,
    max_model_len=64,
    kv_capacity_tokens=1000,
    eos_token_ids=frozenset({2}),
    num_workers=1,
)
FILE = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=50)


def validator(defaults: SamplingDefaults = FILE) -> Validator:
    return Validator(model="tiny", vocab_size=90, defaults=defaults)


def refused(field: str, description: str, raw: RawOptions) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validator().options(raw, LIMITS)
    assert caught.value.field == field
    assert re.search(description, caught.value.description)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf])
def test_a_bad_temperature_is_refused(value: float) -> None:
    raw = RawOptions(sampling=RawSampling(temperature=value))
    refused("sampling.temperature", "must be finite and >= 0, got", raw)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, math.nan])
def test_a_bad_top_p_is_refused(value: float) -> None:
    refused(
        "sampling.top_p", r"must be in \(0, 1\], got", RawOptions(sampling=RawSampling(top_p=value))
    )


@pytest.mark.parametrize("value", [0.0, 1e-8, 0.01, 5.0, 1e9])
def test_good_temperatures_pass_as_they_are(value: float) -> None:
    assert validator().sampling(RawSampling(temperature=value)).temperature == value


def test_an_explicit_zero_is_a_value() -> None:
    raw = RawSampling(temperature=0.0, top_k=0, seed=0)
    assert validator().sampling(raw) == Sampling(temperature=0.0, top_p=0.9, top_k=0, seed=0)


def test_absent_fields_take_the_defaults() -> None:
    sampling = validator().sampling(RawSampling(seed=1))
    assert sampling == Sampling(temperature=0.6, top_p=0.9, top_k=50, seed=1)
    plain = validator(SamplingDefaults()).sampling(RawSampling(seed=1))
    assert plain == Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=1)


def test_an_absent_seed_is_minted_anew_each_time() -> None:
    seeds = {validator().sampling(RawSampling()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_max_tokens_is_at_least_one() -> None:
    refused("stopping.max_tokens", "must be >= 1, got 0", RawOptions(max_tokens=0))
    assert validator().options(RawOptions(max_tokens=1), LIMITS).max_tokens == 1


@pytest.mark.parametrize(
    ("stops", "field", "description"),
    [
        (["a"] * 17, "stop_strings", "at most 16 strings, got 17"),
        (["a", ""], r"stop_strings[1]", "1 to 256 characters, got 0"),
        (["é" * 257], r"stop_strings[0]", "1 to 256 characters, got 257"),
    ],
)
def test_bad_stop_strings_are_refused(stops: list[str], field: str, description: str) -> None:
    refused(field, description, RawOptions(stop_strings=stops))


def test_stop_strings_at_the_limits_pass() -> None:
    stops = ["é" * 256] * 16
    assert validator().options(RawOptions(stop_strings=stops), LIMITS).stop_strings == tuple(stops)


def test_a_long_request_id_is_refused_by_its_bytes() -> None:
    refused("request_id", "at most 128 bytes, got 130", RawOptions(request_id="é" * 65))
    kept = validator().options(RawOptions(request_id="é" * 64), LIMITS)
    assert kept.request_id == "é" * 64


def test_an_absent_request_id_is_minted() -> None:
    ids = {validator().options(RawOptions(), LIMITS).request_id for _ in range(5)}
    assert len(ids) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="'huge' is not served here; 'tiny' is"):
        validator().options(RawOptions(model="huge"), LIMITS)
    assert validator().options(RawOptions(model="tiny"), LIMITS).model == "tiny"


@pytest.mark.parametrize(
    ("raw", "field", "description"),
    [
        (RawTokenIds(packed=b"\0" * 4, ids=[1]), "x", "packed and ids are both filled"),
        (RawTokenIds(packed=b"\0" * 7), "x.packed", "4 bytes per id, got 7 bytes"),
        (RawTokenIds(ids=[1, 100, 3]), "x.ids[1]", "below the vocabulary size 100, got 100"),
        (
            RawTokenIds(packed=array("I", [1, 2, 2**32 - 1]).tobytes()),
            "x.packed[2]",
            "below the vocabulary size 100, got 4294967295",
        ),
    ],
)
def test_bad_token_ids_are_refused(raw: RawTokenIds, field: str, description: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validator().token_ids(raw, "x", LIMITS)
    assert (caught.value.field, description in caught.value.description) == (field, True)


def test_both_forms_of_token_ids_are_read() -> None:
    packed = RawTokenIds(packed=array("I", [1, 99]).tobytes())
    assert list(validator().token_ids(packed, "x", LIMITS)) == [1, 99]
    assert list(validator().token_ids(RawTokenIds(ids=[1, 99]), "x", LIMITS)) == [1, 99]
    assert list(validator().token_ids(RawTokenIds(), "x", LIMITS)) == []


def test_without_a_worker_the_tokenizer_bounds_the_ids() -> None:
    with pytest.raises(InvalidArgument, match="below the vocabulary size 90, got 90"):
        validator().token_ids(RawTokenIds(ids=[90]), "x", None)


def check_prompt(size: int, **options: object) -> None:
    resumed = options.pop("resumed", 0)
    raw = RawOptions(resumed=RawTokenIds(ids=[1] * resumed), **options)
    valid = validator().options(raw, LIMITS)
    validator().prompt([1] * size, "prompt", valid, LIMITS)


@pytest.mark.parametrize(
    ("size", "options"),
    [(63, {}), (60, {"max_tokens": 4}), (60, {"resumed": 4}), (1, {"max_tokens": 63})],
)
def test_what_fits_the_context_passes(size: int, options: dict[str, int]) -> None:
    check_prompt(size, **options)


@pytest.mark.parametrize(
    ("size", "options", "field", "got"),
    [
        (64, {}, "prompt", 64),
        (1000, {}, "prompt", 1000),
        (60, {"max_tokens": 10}, "stopping.max_tokens", 70),
        (60, {"resumed": 5}, "resume.token_ids", 65),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    size: int, options: dict[str, int], field: str, got: int
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_prompt(size, **options)
    error = caught.value
    assert (error.field, error.reason) == (field, "CONTEXT_LENGTH")
    assert error.metadata == {"limit": "64", "got": str(got)}
    assert "64" in error.description
    assert str(got) in error.description
    info = error_details_pb2.ErrorInfo()
    assert error.details()[1].Unpack(info)
    assert info.reason == "CONTEXT_LENGTH"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: must hold at least one token"):
        check_prompt(0)


def test_an_id_of_the_tokenizer_that_the_model_lacks_is_refused() -> None:
    small = replace(LIMITS, vocab_size=80)
    valid = validator().options(RawOptions(), small)
    with pytest.raises(InvalidArgument, match="gives it id 85, and the model has 80 ids"):
        validator().prompt([1, 85], "prompt", valid, small)


def test_more_resumed_tokens_than_max_tokens_are_refused() -> None:
    raw = RawOptions(max_tokens=2, resumed=RawTokenIds(ids=[1, 1, 1]))
    refused("resume.token_ids", "at most stopping.max_tokens = 2 ids, got 3", raw)


def test_without_limits_only_emptiness_is_checked() -> None:
    valid = validator().options(RawOptions(max_tokens=10**6), None)
    validator().prompt([1] * 10_000, "prompt", valid, None)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([ChatMessage(role="", content="x")], "messages[0].role"),
        (
            [ChatMessage(role="user", content=""), ChatMessage(role="r" * 65, content="")],
            "messages[1].role",
        ),
    ],
)
def test_bad_messages_are_refused(messages: list[ChatMessage], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_messages(messages)
    assert caught.value.field == field


def test_an_empty_list_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"^texts: must hold at least one entry"):
        check_not_empty([], "texts")


def test_a_conversation_has_a_largest_number_of_messages():
    turn = ChatMessage(role="user", content="a")
    check_messages([turn] * MAX_MESSAGES)
    with pytest.raises(InvalidArgument, match=f"at most {MAX_MESSAGES} messages, got"):
        check_messages([turn] * (MAX_MESSAGES + 1))


@pytest.mark.parametrize(
    ("ids", "field", "description"),
    [
        ([1] * 129, "stopping.stop_token_ids", "must hold at most 128 ids, got 129"),
        ([99, 100], "stopping.stop_token_ids[1]", "below the vocabulary size 100, got 100"),
    ],
)
def test_bad_stop_tokens_are_refused(ids: list[int], field: str, description: str) -> None:
    refused(field, description, RawOptions(stop_token_ids=ids))


def test_stop_tokens_at_the_limits_pass() -> None:
    valid = validator().options(RawOptions(stop_token_ids=[99, 0] * 64), LIMITS)
    assert valid.stop_token_ids == {0, 99}
    with pytest.raises(InvalidArgument, match="below the vocabulary size 90, got 99"):
        validator().options(RawOptions(stop_token_ids=[99]), None)


def test_all_that_is_wrong_is_named_at_once() -> None:
    raw = RawOptions(
        request_id="x" * 129,
        sampling=RawSampling(temperature=-1, top_p=0),
        max_tokens=0,
        stop_token_ids=[100, 1, 101],
        stop_strings=["", "a", "b" * 257],
        resumed=RawTokenIds(ids=[100]),
    )
    with pytest.raises(InvalidArgument) as caught:
        validator().options(raw, LIMITS)
    assert [field for field, _ in caught.value.violations] == [
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "stopping.max_tokens",
        "stopping.stop_token_ids[0]",
        "stopping.stop_token_ids[2]",
        "stop_strings[0]",
        "stop_strings[2]",
        "resume.token_ids.ids[0]",
    ]
    turn = ChatMessage(role="", content="")
    with pytest.raises(InvalidArgument, match=r"^messages\[0\]\.role: .*; messages\[1\]\.role: "):
        check_messages([turn, turn])


class Unreadable(list[int]):
    """Ids of which only the number may be asked for."""

    def __iter__(self):
        raise AssertionError("the ids were read")

    __getitem__ = __iter__


@pytest.mark.parametrize("raw", [RawTokenIds(packed=bytes(4 * 64)), RawTokenIds(ids=[0] * 64)])
def test_more_ids_than_the_context_holds_are_refused_by_their_number(raw: RawTokenIds) -> None:
    unread = replace(raw, ids=Unreadable(raw.ids))
    with pytest.raises(InvalidArgument, match=r"^prompt: has 64 tokens") as caught:
        validator().prompt_ids(unread, "token_ids", LIMITS)
    assert (caught.value.reason, caught.value.metadata["limit"]) == ("CONTEXT_LENGTH", "64")
    with pytest.raises(InvalidArgument, match=r"^resume\.token_ids: has 64 tokens"):
        validator().options(RawOptions(resumed=unread), LIMITS)
    assert len(validator().prompt_ids(raw, "token_ids", None)) == 64


def test_a_text_is_refused_that_cannot_fit_whatever_its_tokens_are() -> None:
    def check(size: int, per_token: int | None = 10, limits: Limits | None = LIMITS) -> None:
        bound = None if per_token is None else TextBound(characters_per_token=per_token)
        check_text("x" * size, "prompt", bound=bound, limits=limits)

    check(630)
    check(10**6, None)
    check(10**6, 10, None)
    with pytest.raises(InvalidArgument) as caught:
        check(631)
    assert str(caught.value) == (
        "prompt: has 631 characters, which are at least 64 tokens; the context is 64 tokens"
    )
    assert caught.value.reason == "CONTEXT_LENGTH"
    assert caught.value.metadata == {"limit": "64", "got": "64"}


def test_scheduling_passes_as_it_is_at_its_limits() -> None:
    name = "é" * 64
    most = 2**32 - 1
    given = Scheduling(
        priority_class=name,
        tenant=name,
        deadline_ms=1,
        ttft_target_ms=1,
        tpot_target_ms=most,
        shed_late=True,
        session_id=name,
        cache_salt=name,
        skip_reading_prefix_cache=True,
    )
    assert validator().options(RawOptions(scheduling=given), LIMITS).scheduling == given
    assert validator().options(RawOptions(), LIMITS).scheduling == Scheduling()


def test_all_wrong_scheduling_fields_are_named_at_once_with_the_others() -> None:
    long = "é" * 65
    wrong = Scheduling(
        priority_class=long,
        tenant=long,
        deadline_ms=0,
        ttft_target_ms=0,
        tpot_target_ms=0,
        session_id=long,
        cache_salt=long,
    )
    with pytest.raises(InvalidArgument) as caught:
        validator().options(RawOptions(scheduling=wrong, max_tokens=0), LIMITS)
    too_long, too_short = "must be at most 128 bytes, got 130", "must be >= 1, got 0"
    assert caught.value.violations == (
        ("stopping.max_tokens", too_short),
        *(
            (f"scheduling.{name}", too_long)
            for name in ("priority_class", "tenant", "session_id", "cache_salt")
        ),
        *(
            (f"scheduling.{name}", too_short)
            for name in ("deadline_ms", "ttft_target_ms", "tpot_target_ms")
        ),
    )
