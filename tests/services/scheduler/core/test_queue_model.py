import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.queue_model import QueueModel

SECOND = 1_000_000


def draining(tokens: int, every_us: int, seconds: int, start: int = 0) -> tuple[QueueModel, int]:
    """A queue that never empties, and the time of its last admission."""
    model = QueueModel()
    now = start
    while now <= start + seconds * SECOND:
        model.admitted(tokens, now)
        now += every_us
    return model, now - every_us


def test_nothing_is_known_before_something_waited() -> None:
    model = QueueModel()
    assert model.wait_us(100) is None
    assert model.retry_after_us(100, 0) == SECOND
    model.admitted(500, 10)
    assert model.wait_us(100) is None, "how long it waited is not known"


def test_the_wait_is_the_tokens_ahead_at_the_rate_of_admission() -> None:
    model, _ = draining(200, 100_000, 20)
    assert model.wait_us(2000) == pytest.approx(SECOND, rel=0.001)
    assert model.wait_us(0) == 0
    assert model.retry_after_us(10_000, 0) == pytest.approx(5 * SECOND, rel=0.001)


def test_time_without_waiting_is_no_slowness() -> None:
    model, now = draining(200, 100_000, 20)
    model.idle(now)
    later = now + 3600 * SECOND
    model.idle(later)
    assert model.wait_us(2000) == pytest.approx(SECOND, rel=0.001)
    model.admitted(200, later + SECOND)
    model.admitted(200, later + SECOND + 100_000)
    assert model.wait_us(2000) == pytest.approx(SECOND, rel=0.001)


def test_a_burst_into_an_idle_server_is_no_rate() -> None:
    model = QueueModel()
    for start in range(0, 50 * SECOND, SECOND):
        for _ in range(20):
            model.admitted(1000, start)
        model.idle(start)
    assert model.wait_us(1000) is None
    model.admitted(1000, 60 * SECOND)
    model.admitted(1000, 61 * SECOND)
    assert model.wait_us(1000) == SECOND


def test_several_admissions_at_once_count_together() -> None:
    model = QueueModel()
    for now in range(0, 20 * SECOND, SECOND):
        for _ in range(8):
            model.admitted(250, now)
    assert model.wait_us(2000) == pytest.approx(SECOND, rel=0.1)


def test_a_lasting_change_is_followed_within_some_time_constants() -> None:
    model, now = draining(200, 100_000, 60)
    for tick in range(1, 301):
        model.admitted(20, now + 100_000 * tick)
    assert model.wait_us(2000) == pytest.approx(10 * SECOND, rel=0.4)
    for tick in range(301, 601):
        model.admitted(20, now + 100_000 * tick)
    assert model.wait_us(2000) == pytest.approx(10 * SECOND, rel=0.03)


def test_one_long_wait_counts() -> None:
    model, now = draining(200, 100_000, 20)
    model.admitted(200, now + 30 * SECOND)
    wait = model.wait_us(2000)
    assert wait is not None
    assert wait > 5 * SECOND


@pytest.mark.parametrize(("tokens", "retry_us"), [(0, 100_000), (10**12, 60 * SECOND)])
def test_nobody_is_told_to_return_at_once_or_never(tokens: int, retry_us: int) -> None:
    model, _ = draining(200, 100_000, 5)
    assert model.retry_after_us(tokens, 0) == retry_us


events = st.lists(
    st.tuples(st.sampled_from(["admitted", "idle"]), st.integers(0, 10**6), st.integers(0, 10**9))
)


@given(events, st.lists(st.integers(0, 10**9), min_size=1))
def test_estimates_are_never_negative_and_grow_with_the_queue(
    seen: list[tuple[str, int, int]], queued: list[int]
) -> None:
    model = QueueModel()
    now = 0
    for kind, tokens, pause in seen:
        now += pause
        if kind == "idle":
            model.idle(now)
        else:
            model.admitted(tokens, now)
    waits = [model.wait_us(tokens) for tokens in sorted(queued)]
    if waits[0] is None:
        assert waits == [None] * len(queued)
    else:
        known = [wait for wait in waits if wait is not None]
        assert known == sorted(known)
        assert len(known) == len(queued)
        assert known[0] >= 0
    assert all(100_000 <= model.retry_after_us(tokens, 0) <= 60 * SECOND for tokens in queued)
