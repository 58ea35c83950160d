"""Requests whose caller goes away, or whose owner ends them: nothing of them stays."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.behaviour import oracles
from tests.behaviour.doors import ALL_WAYS, Ask, Session, Way, send, session, token_request
from tests.behaviour.stack import STARVED_LIMITS, Stack, eventually

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)

SEATS = STARVED_LIMITS.max_num_seqs
LENGTH, ABORT = 2, 3


async def leave_when(stack: Stack, way: Way, ask: Ask, reached: Callable[[], bool]) -> None:
    """Sends `ask` and goes away once `reached`; all of it must be freed, be the worker busy or not.

    The worker hangs in its step meanwhile: what is freed is freed by the caller's leaving alone.
    """
    assert stack.script is not None
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(send(stack, way, ask))
        await eventually(reached)
        before = stack.core.loads()
        leaving.cancel()
        await eventually(
            lambda: stack.core.loads().ended == before.ended + 1, oracles.QUIET_WITHIN_S
        )
        assert leaving.cancelled() or not leaving.done()


def only_row(stack: Stack) -> tuple[int, int, int] | None:
    """Tokens computed, known and of the prompt, of the one running request."""
    rows = stack.worker_state.rows
    if rows.order.size != 1:
        return None
    slot = int(rows.order[0])
    return int(rows.computed[slot]), int(rows.known[slot]), rows.request(slot).prompt_len


async def take_all_seats(stack: Stack, accepted_before: int, expected: int) -> None:
    """Waits for so many new requests, then lets steps through until all seats are taken."""
    assert stack.script is not None
    await eventually(lambda: stack.core.loads().accepted == accepted_before + expected)
    # Two steps are out with a request each; four answers admit the others, and end none.
    stack.script.hold(after_steps=4)
    await eventually(lambda: stack.core.loads().running == SEATS)


@all_ways
async def test_b022_caller_leaves_while_waiting_for_a_seat(starved: Stack, way: Way) -> None:
    assert starved.script is not None
    starved.script.hold()
    accepted = starved.core.loads().accepted
    async with asyncio.TaskGroup() as tasks:
        asks = [Ask(prompt=(50 + number,), max_tokens=10) for number in range(SEATS)]
        holders = [tasks.create_task(send(starved, Way.TOKENS, ask)) for ask in asks]
        await take_all_seats(starved, accepted, SEATS)
        late = Ask(prompt="late", max_tokens=3)
        await leave_when(starved, way, late, lambda: starved.core.loads().waiting == 1)
        assert starved.core.loads().waiting == 0
        starved.script.go_on()
    assert [holder.result().reason for holder in holders] == ["length"] * SEATS


@all_ways
async def test_b022_caller_leaves_during_a_prefill_in_chunks(starved: Stack, way: Way) -> None:
    assert starved.script is not None
    starved.script.hold()
    size = 44 - (len(starved.chat_ids("")) if way.is_chat else 0)

    def inside_the_prompt() -> bool:
        row = only_row(starved)
        return row is not None and 0 < row[0] < row[2]

    await leave_when(starved, way, Ask(prompt="p" * size, max_tokens=3), inside_the_prompt)
    assert oracles.freed(starved) == []
    starved.script.go_on()


@all_ways
async def test_b022_caller_leaves_during_decoding(starved: Stack, way: Way) -> None:
    assert starved.script is not None
    starved.script.hold(after_steps=8)

    def some_tokens_came() -> bool:
        row = only_row(starved)
        return row is not None and row[1] > row[2]

    await leave_when(starved, way, Ask(prompt="decode", max_tokens=30), some_tokens_came)
    assert oracles.freed(starved) == []
    starved.script.go_on()


async def test_b023_abort_of_a_waiting_request(starved: Stack) -> None:
    assert starved.script is not None
    starved.script.hold()
    accepted = starved.core.loads().accepted
    async with session(starved) as line:
        for stream in range(1, SEATS + 2):
            ask = Ask(prompt=(60 + stream,), max_tokens=10)
            await line.submit(stream, token_request(starved, ask, f"r{stream}"))
        await take_all_seats(starved, accepted, SEATS + 1)
        assert starved.core.loads().waiting == 1
        await line.abort(SEATS + 1)
        await line.abort(SEATS + 1)
        assert await ends(line, 1) == [(SEATS + 1, ABORT)]
        starved.script.go_on()
        assert await ends(line, SEATS) == [(stream, LENGTH) for stream in range(1, SEATS + 1)]


async def test_b023_aborts_of_ended_and_unknown_requests_are_nothing(
    starved: Stack,
) -> None:
    accepted = starved.core.loads().accepted
    async with session(starved) as line:
        await line.abort(77)
        await line.finish(78, 3)
        await line.submit(1, token_request(starved, Ask(prompt=(60,), max_tokens=2), "r1"))
        assert await ends(line, 1) == [(1, LENGTH)]
        await line.abort(1)
        await line.finish(1, 1)
        await line.submit(2, token_request(starved, Ask(prompt=(61,), max_tokens=2), "r1"))
        assert await ends(line, 1) == [(2, LENGTH)]
    assert starved.core.loads().accepted == accepted + 2


async def test_b023_five_hundred_aborts_at_any_moment(starved: Stack) -> None:
    source = random.Random(23)
    ended: dict[int, int] = {}
    accepted = starved.core.loads().accepted
    async with session(starved) as line, asyncio.TaskGroup() as tasks:

        async def read() -> None:
            while len(ended) < 500:
                for stream, _, end in await line.batch():
                    if end is not None:
                        assert stream not in ended, "a request ended twice"
                        ended[stream] = end.reason

        tasks.create_task(read())
        for stream in range(1, 501):
            prompt = tuple(source.randrange(10, 14) for _ in range(source.randint(1, 30)))
            ask = Ask(prompt=prompt, max_tokens=source.randint(1, 20))
            await line.submit(stream, token_request(starved, ask, f"r{stream}"))
            # At most 24 live: some wait, some prefill, some decode, some have just ended.
            for _ in range(source.randint(0, 3)):
                await asyncio.sleep(0)
            await line.abort(source.randint(max(1, stream - 12), stream))
            if stream > 24:
                await line.abort(stream - 24)
                await eventually(lambda oldest=stream - 24: oldest in ended)
        for stream in range(477, 501):
            await line.abort(stream)
    assert sorted(ended) == list(range(1, 501))
    assert {ABORT, LENGTH} == set(ended.values())
    assert starved.core.loads().accepted == accepted + 500


@all_ways
async def test_b023_callers_leave_at_any_moment(starved: Stack, way: Way) -> None:
    source = random.Random(way.value)
    asks = [
        Ask(prompt="x" * source.randint(1, 20), max_tokens=source.randint(1, 12)) for _ in range(40)
    ]

    async def one(ask: Ask) -> None:
        try:
            async with asyncio.timeout(source.random() * 0.1):
                await send(starved, way, ask)
        except TimeoutError:
            return

    for start in range(0, len(asks), 10):
        await asyncio.gather(*(one(ask) for ask in asks[start : start + 10]))


async def ends(line: Session, count: int) -> list[tuple[int, int]]:
    """Stream id and reason of the next so many requests to end, sorted."""
    ended: list[tuple[int, int]] = []
    while len(ended) < count:
        ended += [(stream, end.reason) for stream, _, end in await line.batch() if end is not None]
    return sorted(ended)
