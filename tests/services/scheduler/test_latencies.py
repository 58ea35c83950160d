"""Latencies of requests that ended lately, in all and by class."""

from services.scheduler.core.plan import Ended, EndReason
from services.scheduler.latencies import LatencyWindow

S = 1_000_000


def end(arrived: int, first: int | None, ended: int, tokens: int = 11, name: str = "a") -> Ended:
    return Ended(
        handle=1,
        request_id="r",
        reason=EndReason.LENGTH,
        prompt_tokens=5,
        completion_tokens=tokens,
        cached_tokens=0,
        class_name=name,
        arrived=arrived,
        first_token=first,
        ended=ended,
    )


def window(*ends: Ended) -> LatencyWindow:
    made = LatencyWindow()
    for one in ends:
        made.ended(one)
    return made


def test_nothing_ended() -> None:
    assert window().summary(S) is None
    assert window().summary(S, "a") is None


def test_percentiles_are_over_requests() -> None:
    ends = [end(0, 1000 * number, 1000 * number + 10 * 50 * number) for number in range(1, 101)]
    summary = window(*ends).summary(S)
    assert summary is not None
    assert (summary.requests, summary.tpot_requests) == (100, 100)
    assert (summary.ttft_us_p50, summary.ttft_us_p95) == (50_500, 95_050)
    assert (summary.tpot_us_p50, summary.tpot_us_p95) == (2_525, 4_752)


def test_one_token_has_no_time_between_tokens() -> None:
    summary = window(end(0, 70, 70, tokens=1)).summary(S)
    assert summary is not None
    assert (summary.requests, summary.ttft_us_p50) == (1, 70)
    assert (summary.tpot_requests, summary.tpot_us_p50, summary.tpot_us_p95) == (0, 0, 0)


def test_a_request_without_a_first_token_here_does_not_count() -> None:
    assert window(end(0, None, 900)).summary(S) is None


def test_each_class_has_its_own() -> None:
    made = window(end(0, 10, 100, name="a"), end(0, 30, 100, name="b"), end(0, 50, 100, name="b"))
    every, first, second = made.summary(S), made.summary(S, "a"), made.summary(S, "b")
    assert every is not None
    assert first is not None
    assert second is not None
    assert (every.requests, every.ttft_us_p50) == (3, 30)
    assert (first.requests, first.ttft_us_p50) == (1, 10)
    assert (second.requests, second.ttft_us_p50) == (2, 40)
    assert made.summary(S, "c") is None


def test_what_ended_half_a_minute_ago_does_not_count() -> None:
    made = window(end(0, 10, S), end(0, 30, 2 * S))
    both, later = made.summary(31 * S), made.summary(31 * S + 1)
    assert both is not None
    assert later is not None
    assert (both.requests, later.requests, later.ttft_us_p50) == (2, 1, 30)
    assert made.summary(60 * S) is None


def test_the_window_is_bounded() -> None:
    summary = window(*(end(0, number, 5000) for number in range(3000))).summary(S)
    assert summary is not None
    assert summary.requests == 1024
    assert summary.ttft_us_p50 == 2487
