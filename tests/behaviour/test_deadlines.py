"""Deadlines and the other scheduling options, at every door."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from tests.behaviour import oracles
from tests.behaviour.doors import ALL_WAYS, Ask, Refused, Way, send
from tests.behaviour.stack import STARVED_LIMITS, Stack, eventually

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)

SEATS = STARVED_LIMITS.max_num_seqs
LONG = "x" * 129


async def refusal(stack: Stack, way: Way, ask: Ask) -> Refused:
    with pytest.raises(Refused) as caught:
        await send(stack, way, ask)
    return caught.value


async def ended(stack: Stack, before: Any) -> None:
    """One more request has ended in the scheduler, and none runs or waits there."""
    await eventually(
        lambda: (
            stack.core.loads().ended == before.ended + 1
            and stack.core.loads().running == before.running
            and stack.core.loads().waiting == before.waiting
        ),
        oracles.QUIET_WITHIN_S,
    )


@all_ways
async def test_b067_a_deadline_of_the_request_ends_it_while_it_runs(
    starved: Stack, way: Way
) -> None:
    """The worker hangs, as one does that has a minute of work before it."""
    assert starved.script is not None
    starved.script.hold(after_steps=8)
    before, began = starved.core.loads(), time.monotonic()
    ask = Ask(prompt="deadline", max_tokens=30, scheduling=(("deadline_ms", 400),))
    refused = await refusal(starved, way, ask)
    assert (refused.code, refused.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    assert time.monotonic() - began >= 0.39
    await ended(starved, before)
    starved.script.go_on()


@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way is not Way.SESSION])
async def test_b067_a_deadline_of_the_call_ends_it_in_the_scheduler(
    starved: Stack, way: Way
) -> None:
    assert starved.script is not None
    starved.script.hold(after_steps=8)
    before = starved.core.loads()
    ask = Ask(prompt="deadline", max_tokens=30, deadline_s=0.4)
    refused = await refusal(starved, way, ask)
    assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await ended(starved, before)
    starved.script.go_on()


@all_ways
async def test_b067_a_deadline_ends_a_request_that_waits(starved: Stack, way: Way) -> None:
    assert starved.script is not None
    starved.script.hold(after_steps=4)
    async with asyncio.TaskGroup() as tasks:
        for number in range(SEATS):
            ask = Ask(prompt=(50 + number,), max_tokens=10)
            tasks.create_task(send(starved, Way.TOKENS, ask))
        await eventually(lambda: starved.core.loads().running == SEATS)
        before = starved.core.loads()
        late = Ask(prompt="late", max_tokens=3, scheduling=(("deadline_ms", 200),))
        refused = await refusal(starved, way, late)
        assert (refused.code, refused.parts) == (grpc.StatusCode.DEADLINE_EXCEEDED, 0)
        await ended(starved, before)
        starved.script.go_on()


@all_ways
async def test_a_deadline_that_is_met_changes_nothing(starved: Stack, way: Way) -> None:
    ask = Ask(prompt="in time", max_tokens=5, ignore_eos=True)
    plain = await send(starved, way, ask)
    urgent = Ask(
        prompt="in time",
        max_tokens=5,
        ignore_eos=True,
        scheduling=(
            ("priority_class", "interactive"),
            ("tenant", "é" * 64),
            ("deadline_ms", 2**32 - 1),
            ("ttft_target_ms", 1),
            ("tpot_target_ms", 2**32 - 1),
            ("session_id", "s" * 128),
            ("cache_salt", ""),
            ("skip_reading_prefix_cache", True),
        ),
    )
    assert (await send(starved, way, urgent)).outcome == plain.outcome


WRONG = {
    "priority_class": LONG,
    "tenant": LONG,
    "deadline_ms": 0,
    "ttft_target_ms": 0,
    "tpot_target_ms": 0,
    "session_id": LONG,
    "cache_salt": LONG,
}


@all_ways
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_option_is_named(starved: Stack, way: Way, name: str) -> None:
    ask = Ask(prompt="wrong", max_tokens=3, scheduling=((name, WRONG[name]),))
    refused = await refusal(starved, way, ask)
    assert (refused.code, refused.parts) == (grpc.StatusCode.INVALID_ARGUMENT, 0)
    assert refused.field.removeprefix("request.") == f"scheduling.{name}"
    limit = "must be at most 128 bytes, got 129" if WRONG[name] else "must be >= 1, got 0"
    assert limit in refused.message


@all_ways
async def test_all_wrong_options_are_named_at_once(starved: Stack, way: Way) -> None:
    ask = Ask(prompt="wrong", max_tokens=0, scheduling=tuple(WRONG.items()))
    refused = await refusal(starved, way, ask)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    named = {field.removeprefix("request.") for field in refused.fields}
    assert named == {"stopping.max_tokens", *(f"scheduling.{name}" for name in WRONG)}


@all_ways
async def test_a_class_that_is_not_there_is_named(starved: Stack, way: Way) -> None:
    ask = Ask(prompt="wrong", max_tokens=3, scheduling=(("priority_class", "urgent"),))
    refused = await refusal(starved, way, ask)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_CLASS")
    assert refused.field.endswith("scheduling.priority_class")
