"""How numbers, curves and bars are drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.top.marks import ASCII, UNICODE, count, curve, duration, parts, percent, shortened


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, UNICODE.none),
        (0, "0"),
        (0.01, "<0.1"),
        (0.3, "0.3"),
        (3, "3"),
        (9.96, "10"),
        (12.4, "12"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (1234, "1.2k"),
        (56_000, "56k"),
        (999_600, "1.0M"),
        (7_800_000, "7.8M"),
        (2.5e12, "2.5T"),
    ],
)
def test_a_count_is_short(value: float | None, shown: str) -> None:
    assert count(value, UNICODE) == shown


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (None, "-"),
        (0, "0us"),
        (640, "640us"),
        (999.6, "1.0ms"),
        (1500, "1.5ms"),
        (120_000, "120ms"),
        (999_600, "1.0s"),
        (3_200_000, "3.2s"),
        (45e6, "45s"),
        (59.97e6, "1m00"),
        (725e6, "12m05"),
        (11_040e6, "3h04"),
        (183_600e6, "2d03h"),
        (86_400e6 * 100, "100d"),
    ],
)
def test_a_duration_is_short(us: float | None, shown: str) -> None:
    assert duration(us, ASCII) == shown


@given(st.floats(0, 1e14))
def test_what_is_shown_always_fits(value: float) -> None:
    assert len(count(value, UNICODE)) <= 4
    assert len(duration(value, UNICODE)) <= 5


def test_a_share() -> None:
    assert (percent(0.453, UNICODE), percent(None, UNICODE)) == ("45%", UNICODE.none)


def test_a_curve_ends_with_the_latest_value() -> None:
    assert curve([0, 1, 2, 4], 6, ASCII) == "  _-=#"
    assert curve([0, 1, 2, 4], 2, ASCII) == "=#"
    assert curve([1, None, 8], 3, UNICODE) == "▂ █"


def test_a_curve_of_nothing_is_flat_or_empty() -> None:
    assert curve([0, 0], 3, UNICODE) == " ▁▁"
    assert curve([], 3, UNICODE) == "   "
    assert curve([1.0], 0, UNICODE) == ""


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), st.integers(0, 60))
def test_a_bar_has_its_width_and_hides_nothing(amounts: list[int], width: int) -> None:
    cells = parts(amounts, width)
    if not sum(amounts):
        assert not any(cells)
        return
    assert sum(cells) == width
    assert min(cells) >= 0
    if width >= len(amounts):
        assert [bool(size) for size in cells] == [bool(amount) for amount in amounts]


def test_a_bar_is_in_proportion() -> None:
    assert parts([500, 0, 250, 250], 8) == [4, 0, 2, 2]
    assert parts([1, 999], 10) == [1, 9]


def test_what_is_shortened_says_so() -> None:
    assert shortened("worker-0", 8, UNICODE) == "worker-0"
    assert shortened("worker-0", 6, UNICODE) == "worke…"
    assert shortened("worker-0", 6, ASCII, keep_end=True) == "~ker-0"
    assert shortened("模型模型", 5, UNICODE) == "模型…"
    assert shortened("worker", 1, UNICODE) == "…"
    assert shortened("worker", 0, UNICODE) == ""
