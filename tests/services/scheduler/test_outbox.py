"""What waits for one caller."""

import asyncio

import numpy as np

from services.chassis.errors import Unavailable
from services.scheduler.outbox import MAX_BYTES, Outbox


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


async def test_deltas_merge_until_they_are_taken() -> None:
    outbox = Outbox()
    outbox.put_tokens(u32(1, 2), u32(10, 20))
    outbox.put_tokens(u32(1), u32(11))
    outbox.put_credit()
    delivery = await outbox.take()
    assert delivery.streams.tolist() == [1, 2, 1]
    assert delivery.token_ids.tolist() == [10, 20, 11]
    assert delivery.credits == 1
    assert not delivery.closing
    outbox.close()
    delivery = await outbox.take()
    assert delivery.closing
    assert not delivery.streams.size


async def overflows(outbox: Outbox) -> bool:
    """Whether it has overflowed, after the loop has gone round once."""
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(outbox.overflowed())
        await asyncio.sleep(0)
        waiting.cancel()
    return not waiting.cancelled()


async def test_a_caller_that_does_not_read_overflows() -> None:
    outbox = Outbox()
    many = np.zeros(MAX_BYTES // 8 // 4 - 64, np.uint32)
    for _ in range(4):
        outbox.put_tokens(many, many)
        assert not await overflows(outbox)
    outbox.put_tokens(many, many)
    assert await overflows(outbox)


async def test_rows_that_come_one_by_one_count_with_what_they_hold_in_memory() -> None:
    outbox = Outbox()
    one = u32(1)
    for _ in range(MAX_BYTES // 264):
        outbox.put_tokens(one, one)
    assert not await overflows(outbox)
    outbox.put_tokens(one, one)
    assert await overflows(outbox)


async def test_ends_count_too() -> None:
    outbox = Outbox()
    for stream in range(MAX_BYTES // 256 + 1):
        assert not await overflows(outbox)
        outbox.put_end(stream, Unavailable("gone"))
    assert await overflows(outbox)
