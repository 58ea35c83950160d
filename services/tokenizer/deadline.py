"""When an answer is no longer wanted, and what happens then.

A deadline travels as time that is left, since the clocks of two machines do not agree; here it is
an instant of the event loop's clock. Owns the one error for a deadline that has passed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.chassis.errors import DeadlineExceeded

_NEVER_S = 1e9
"""A call whose deadline is that far away has none; some versions of gRPC say so."""


def end_of(arrived: float, left_s: float | None, deadline_ms: int | None) -> float | None:
    """The earlier of the deadlines of a call and of its request, in loop time; None for never.

    Args:
        arrived: loop time at which both were counted from.
        left_s: what the call had left then, seconds; None where it has no deadline.
        deadline_ms: what the request asks for.
    """
    ends = []
    if left_s is not None and left_s < _NEVER_S:
        ends.append(arrived + left_s)
    if deadline_ms is not None:
        ends.append(arrived + deadline_ms / 1000)
    return min(ends, default=None)


def left_ms(ends_at: float | None, now: float) -> int | None:
    """Whole milliseconds until `ends_at`, at least the one that can be sent; None for never."""
    return None if ends_at is None else max(1, int((ends_at - now) * 1000))


def passed() -> DeadlineExceeded:
    """The error of a request whose deadline has passed."""
    return DeadlineExceeded("the deadline has passed", reason="DEADLINE")


@contextlib.asynccontextmanager
async def within(ends_at: float | None) -> AsyncIterator[None]:
    """Cuts the block at `ends_at`.

    Raises:
        DeadlineExceeded: the block was cut.
    """
    limit = asyncio.timeout_at(ends_at)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise passed() from None
