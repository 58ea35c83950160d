"""Rates and curves follow from how samples change."""

import pytest

from quire.top.history import MOST_SAMPLES, History, Seen
from tests.quire.top.samples import latencies, sample, worker


def after(*samples, now: float = 0.0) -> Seen:
    history = History("a:1")
    for one in samples:
        history.answered(one)
    return history.seen(now)


def test_nothing_is_known_before_the_first_answer() -> None:
    history = History("a:1")
    history.failed("cannot reach a:1", 10.0)
    history.failed("cannot reach a:1", 11.0)
    seen = history.seen(12.5)
    assert (seen.sample, seen.problem, seen.silent_s) == (None, "cannot reach a:1", 2.5)


def test_one_sample_gives_no_rates() -> None:
    seen = after(sample(60))
    assert (dict(seen.per_s), dict(seen.workers), seen.curves["prompt"]) == ({}, {}, (None,))
    assert seen.hit_share is None


def test_rates_are_by_the_clock_of_the_scheduler() -> None:
    seen = after(
        sample(60, counters={"generation_tokens": 100}, ended=5),
        sample(64, counters={"generation_tokens": 500}, ended=7),
        now=1e9,
    )
    assert seen.per_s["generation_tokens"] == 100
    assert seen.per_s["ended"] == 0.5
    assert seen.curves["generation"] == (None, 100)


def test_rates_are_over_two_seconds_and_curves_over_each_interval() -> None:
    tokens = [0, 0, 0, 0, 30, 40]
    samples = [
        sample(60 + number, counters={"prompt_tokens": value})
        for number, value in enumerate(tokens)
    ]
    seen = after(*samples)
    assert seen.per_s["prompt_tokens"] == 20
    assert seen.curves["prompt"] == (None, 0, 0, 0, 30, 10)


def test_a_scheduler_that_was_started_again_begins_anew() -> None:
    seen = after(sample(60, ended=90), sample(61, ended=95), sample(1, ended=2), sample(2, ended=6))
    assert seen.per_s["ended"] == 4
    assert seen.sample is not None
    assert seen.sample.uptime_us == 2_000_000


def test_it_is_back_once_it_answers() -> None:
    history = History("a:1")
    history.answered(sample(60))
    history.failed("gone", 5.0)
    assert (history.seen(6.0).problem, history.seen(6.0).silent_s) == ("gone", 1.0)
    history.answered(sample(61))
    assert (history.seen(7.0).problem, history.seen(7.0).silent_s) == ("", 0.0)
    assert history.seen(7.0).curves["prompt"] == (None, None, 0)


def test_the_share_of_hits_is_of_late() -> None:
    seen = after(
        sample(60, counters={"prefix_query_tokens": 1000, "prefix_hit_tokens": 0}),
        sample(62, counters={"prefix_query_tokens": 1100, "prefix_hit_tokens": 40}),
    )
    assert seen.hit_share == pytest.approx(0.4)


def test_a_worker_by_its_steps() -> None:
    before = worker(steps=12, steps_in_flight=2, computed_tokens=1000, execute_us=5_000_000)
    later = worker(steps=21, steps_in_flight=1, computed_tokens=1800, execute_us=6_000_000)
    rates = after(sample(60, workers=(before,)), sample(62, workers=(later,))).workers["w0"]
    assert (rates.busy, rates.tokens_per_step, rates.steps_per_s) == (0.5, 80, 5)


def test_a_worker_without_an_answered_step_has_no_mean() -> None:
    rates = after(sample(60), sample(62)).workers["w0"]
    assert (rates.busy, rates.tokens_per_step, rates.steps_per_s) == (0, None, 0)


def test_another_attachment_of_a_worker_counts_from_zero() -> None:
    first, second = worker(steps=50), worker(epoch=2, steps=3)
    seen = after(sample(60, workers=(first,)), sample(62, workers=(second,)))
    assert dict(seen.workers) == {}


def test_latencies_have_gaps_where_nothing_ended() -> None:
    some = latencies(requests=2, ttft_us_p50=70, tpot_requests=0)
    seen = after(sample(60), sample(61, latencies=some))
    assert seen.curves["ttft"] == (None, 70)
    assert seen.curves["tpot"] == (None, None)


def test_the_past_is_bounded() -> None:
    seen = after(*(sample(60 + second) for second in range(MOST_SAMPLES + 50)))
    assert len(seen.curves["ttft"]) == MOST_SAMPLES
