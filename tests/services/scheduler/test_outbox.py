"""What waits for one caller."""

import numpy as np

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


async def test_a_caller_that_does_not_read_overflows() -> None:
    outbox = Outbox()
    many = np.zeros(MAX_BYTES // 12 // 4, np.uint32)
    for _ in range(4):
        assert not outbox.overflowed
        outbox.put_tokens(many, many)
    outbox.put_tokens(many, many)
    assert outbox.overflowed
