import asyncio

import pytest

from services.chassis.errors import DeadlineExceeded
from services.tokenizer.deadline import end_of, left_ms, within


@pytest.mark.parametrize(
    ("left_s", "deadline_ms", "ends_at"),
    [
        (None, None, None),
        (2.0, None, 102.0),
        (None, 1500, 101.5),
        (2.0, 1500, 101.5),
        (1.0, 1500, 101.0),
        # No deadline, as some versions of gRPC say it.
        (9.2e18, None, None),
        (9.2e18, 1500, 101.5),
        (None, 2**32 - 1, 100 + 4294967.295),
    ],
)
def test_the_earlier_deadline_counts(
    left_s: float | None, deadline_ms: int | None, ends_at: float | None
) -> None:
    assert end_of(100.0, left_s, deadline_ms) == ends_at


@pytest.mark.parametrize(
    ("ends_at", "left"), [(None, None), (101.5, 1500), (100.0019, 1), (100.0, 1), (99.0, 1)]
)
def test_time_left_is_at_least_what_can_be_sent(ends_at: float | None, left: int | None) -> None:
    assert left_ms(ends_at, 100.0) == left


async def test_a_block_is_cut_at_its_deadline() -> None:
    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded, match="the deadline has passed") as caught:
        async with within(now + 0.01):
            await asyncio.Event().wait()
    assert caught.value.reason == "DEADLINE"
    with pytest.raises(DeadlineExceeded):
        async with within(now - 1.0):
            await asyncio.Event().wait()


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    async with within(None):
        await asyncio.sleep(0)
    async with within(asyncio.get_running_loop().time() + 60):
        await asyncio.sleep(0)


async def test_a_timeout_of_the_block_itself_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="own"):
        async with within(asyncio.get_running_loop().time() + 60):
            raise TimeoutError("own")
