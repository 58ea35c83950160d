"""Histograms and figures."""

import numpy as np
import pytest

from services.scheduler.core.plan import Ended, EndReason, Events
from services.scheduler.simulate.metrics import Figures, Histogram


def tokens(*handles: int, ended: tuple[Ended, ...] = ()) -> Events:
    return Events(
        handles=np.array(handles, np.int64),
        token_ids=np.full(len(handles), 7, np.uint32),
        ended=ended,
    )


def end(handle: int, count: int, reason: EndReason = EndReason.LENGTH) -> Ended:
    return Ended(
        handle=handle,
        request_id="",
        reason=reason,
        prompt_tokens=10,
        completion_tokens=count,
        cached_tokens=0,
    )


def test_a_histogram_is_exact_to_half_a_per_cent() -> None:
    values = np.random.default_rng(0).lognormal(10, 2, 5000).astype(np.int64) + 1
    histogram = Histogram()
    histogram.add_many(values)
    spread = histogram.spread()
    assert spread.mean == pytest.approx(values.mean() / 1000)
    assert spread.max == values.max() / 1000
    for share, got in ((50, spread.p50), (90, spread.p90), (99, spread.p99)):
        wanted = np.percentile(values, share, method="inverted_cdf") / 1000
        assert got == pytest.approx(wanted, rel=0.006)


def test_a_histogram_of_nothing_says_nothing() -> None:
    assert Histogram().spread().p50 is None


def test_merged_histograms_count_all() -> None:
    one, other = Histogram(), Histogram()
    one.add(1000, 3)
    other.add(5_000_000)
    one.merge(other)
    assert one.count == 4
    assert one.spread().max == 5000.0
    assert one.spread().mean == pytest.approx((3 * 1000 + 5_000_000) / 4000)


def test_ttft_tpot_itl_and_e2e() -> None:
    figures = Figures()
    handle = figures.arrive(100, "gold")
    figures.take(tokens(handle), 1100)
    figures.take(tokens(handle), 1600)
    ended = figures.take(tokens(handle, ended=(end(handle, 3),)), 2700)
    assert ended == 1
    assert figures.all.ttft.spread().mean == 1.0
    assert figures.all.tpot.spread().mean == 0.8
    assert figures.all.e2e.spread().mean == 2.6
    assert figures.itl.count == 2
    assert figures.itl.spread().mean == 0.8
    assert figures.groups["gold"].completed == 1
    assert figures.ends == {"length": 1}
    assert figures.live == 0


def test_handles_are_used_again_and_grow_with_need() -> None:
    figures = Figures()
    handles = [figures.arrive(0, "") for _ in range(3000)]
    assert len(set(handles)) == 3000
    for handle in handles:
        figures.take(tokens(ended=(end(handle, 0, EndReason.ABORT),)), 5)
    assert figures.live == 0
    assert figures.most_live == 3000
    assert figures.arrive(6, "") in handles


def test_a_used_handle_is_not_the_request_that_had_it() -> None:
    figures = Figures()
    handle = figures.arrive(1, "")
    assert figures.is_live(handle, 1)
    figures.take(tokens(ended=(end(handle, 0),)), 2)
    assert not figures.is_live(handle, 1)
    assert figures.arrive(3, "") == handle
    assert not figures.is_live(handle, 1)


def test_groups_are_bounded() -> None:
    figures = Figures()
    for number in range(100):
        figures.arrive(0, f"tenant {number}")
    assert len(figures.groups) == 65
    assert "others" in figures.groups
