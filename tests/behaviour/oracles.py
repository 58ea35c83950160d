"""What must hold after whatever has happened: nothing is left, and the next request is right."""

import asyncio
import time

import numpy as np

from services.tokenizer.session import LinkCounts
from tests.behaviour.doors import Ask, Way, send
from tests.behaviour.stack import Stack

QUIET_WITHIN_S = 1.0
"""From the end of the last request, however it ended."""

_NOTHING = LinkCounts(live=0, unsent=0, on_session=0)


async def check(stack: Stack) -> None:
    """Quiet, conserved, and still right: assert after every test."""
    await quiet(stack)
    await conserved(stack)
    if stack.canary is not None:
        prompt, output = stack.canary
        # A prompt of ids is no chat, so the canary needs the doors that take ids.
        for way in (Way.GENERATE_STREAM, Way.TOKENS):
            ask = Ask(prompt=prompt, max_tokens=len(output), ignore_eos=True)
            answer = await send(stack, way, ask)
            assert answer.token_ids == output, "the canary sings another song"
        await quiet(stack)
        await conserved(stack)


async def quiet(stack: Stack) -> None:
    """Within a second nothing of any request is left in any of the three services.

    The worker hears of its last rows with the next step; until then the scheduler knows of them.
    """
    end = time.monotonic() + QUIET_WITHIN_S
    while (left := leftovers(stack)) and time.monotonic() < end:
        await asyncio.sleep(0.005)
    assert not left, f"left behind: {', '.join(left)}"
    stack.core.check_invariants()
    for state in stack.core._workers.values():
        assert not state.pool.num_blocks - state.pool.num_free - state.pool.num_evictable
    if stack.core._workers:
        in_use = np.flatnonzero(stack.workers[0].rows._in_use).tolist()
        assert in_use == sorted(stack.worker_state.released), "the worker holds a stray row"


def freed(stack: Stack) -> list[str]:
    """What tokenizer and scheduler still hold of requests, in words; [] for nothing."""
    core, link = stack.core, stack.link
    loads = core.loads()
    held = {
        "running": loads.running,
        "waiting": loads.waiting,
        "requests by handle": len(core._by_handle),
        "requests by id": len(core._by_id),
        "live handles": sum(len(handles) for handles in stack.loop._live.values()),
        "callers": len(stack.loop._live) - 1,  # the tokenizer's session stays
        "outboxes": len(stack.loop._outboxes) - 1,
        "blocks": sum(w.blocks_total - w.blocks_free - w.blocks_evictable for w in loads.workers),
        "calls at the text door": stack.servicer.live_calls,
        "streams of the tokenizer": 0 if link.counts == _NOTHING else link.counts.live or 1,
    }
    return [f"{count} {name}" for name, count in held.items() if count]


def leftovers(stack: Stack) -> list[str]:
    """What `freed` says, and steps that are under way."""
    left = freed(stack)
    for state in stack.core._workers.values():
        held = {
            "open steps": len(state.open),
            "orphans": len(state.orphans),
            "pending hashes": len(state.pending),
        }
        left += [f"{count} {name}" for name, count in held.items() if count]
    return left


async def conserved(stack: Stack) -> None:
    """Every accepted request has ended once, and the door tells what is inside."""
    told = await stack.loads()
    core = stack.core.loads()
    assert told.accepted == told.ended == core.accepted == core.ended
    assert (told.running, told.waiting) == (core.running, core.waiting) == (0, 0)
    assert core.counters.generation_tokens >= 0
    for worker in told.workers:
        assert worker.blocks_free + worker.blocks_evictable == worker.blocks_total
        assert worker.steps_in_flight == 0
