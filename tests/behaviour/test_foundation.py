"""The foundation itself: a bad network, a bad worker, and oracles that do notice."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.chassis.channel import CHANNEL_OPTIONS
from tests.assets.chaos import frozen, kill
from tests.behaviour import oracles
from tests.behaviour.doors import ALL_WAYS, TEXT_WAYS, Ask, Refused, Way, send
from tests.behaviour.pieces import Pieces
from tests.behaviour.sets import FILLER, scripted_stack
from tests.behaviour.stack import STARVED_LIMITS, Stack, eventually, running_worker
from tests.fakes.proxy import Proxy

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)


async def test_a_frozen_process_goes_on_and_a_killed_one_is_gone() -> None:
    sleeping = "import time; time.sleep(60)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", sleeping)
    with frozen(process.pid):
        await eventually(lambda: state_of(process.pid) == "T")
    await eventually(lambda: state_of(process.pid) != "T")
    kill(process.pid)
    assert await process.wait() == -9
    kill(process.pid)


def state_of(pid: int) -> str:
    """One letter of procfs: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_proxy_pauses_drips_and_cuts(
    scripted: Stack, pieces: Pieces, tmp_path: Path
) -> None:
    assert scripted.script is not None
    output = pieces("hello", "!")
    ask = Ask(prompt=scripted.prompt_for(output), max_tokens=2)
    endless = Ask(prompt="endless", max_tokens=400)
    proxied = Proxy.between(listen=f"unix://{tmp_path}/p.sock", target=scripted.text_target)
    async with (
        proxied as proxy,
        grpc.aio.insecure_channel(proxy.address, options=CHANNEL_OPTIONS) as channel,
    ):
        behind = replace(scripted, text_channel=channel)
        assert (await send(behind, Way.CHAT_STREAM, ask)).text == "hello!"
        proxy.pause()
        async with asyncio.TaskGroup() as tasks:
            paused = tasks.create_task(send(behind, Way.CHAT_STREAM, ask))
            await asyncio.sleep(0.05)
            assert not paused.done()
            proxy.go_on()
        assert paused.result().text == "hello!"
        proxy.drip_s = 0.0
        assert (await send(behind, Way.CHAT_STREAM, ask)).text == "hello!"
        proxy.drip_s = None
        scripted.script.hold(after_steps=20)
        first_token = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(_refusal(behind, endless, first_token))
            await first_token.wait()
            proxy.cut()
        assert call.result().code is grpc.StatusCode.UNAVAILABLE
        assert call.result().parts > 0
        scripted.script.go_on()
        await oracles.quiet(scripted)
        assert (await send(behind, Way.CHAT_STREAM, ask)).text == "hello!"
        assert proxy.accepted == 2


async def _refusal(stack: Stack, ask: Ask, first_token: asyncio.Event) -> Refused:
    with pytest.raises(Refused) as caught:
        await send(stack, Way.GENERATE_STREAM, ask, first_token=first_token)
    return caught.value


@all_ways
async def test_a_request_that_fails_on_the_worker_fails_alone(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    assert scripted.script is not None
    output = pieces("alpha", " beta", " gam", "ma", " delta")
    good = Ask(prompt=scripted.prompt_for(output), max_tokens=5)
    bad = Ask(prompt="bad", max_tokens=9)
    for prompt in (scripted.prompt_ids("bad"), scripted.chat_ids("bad")):
        scripted.script.fail(prompt, 3)
    refused, answer = await asyncio.gather(
        send(scripted, way, bad), send(scripted, way, good), return_exceptions=True
    )
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED")
    assert not isinstance(answer, BaseException)
    assert answer.token_ids == output


async def test_a_step_that_fails_costs_no_request(byte_folder: Path, tmp_path: Path) -> None:
    async with scripted_stack(tmp_path, byte_folder, STARVED_LIMITS) as stack:
        assert stack.script is not None
        stack.script.broken = RuntimeError("out of memory")
        ask = Ask(prompt="again", max_tokens=6)
        answers = await asyncio.gather(*(send(stack, way, ask) for way in ALL_WAYS))
        assert {answer.token_ids for answer in answers} == {(FILLER,) * 6}
        assert len(stack.workers[0].executors) == 2
        await oracles.check(stack)


async def test_a_worker_that_dies_hands_its_requests_to_the_next(
    byte_folder: Path, tmp_path: Path
) -> None:
    async with scripted_stack(tmp_path, byte_folder, STARVED_LIMITS) as stack:
        assert stack.script is not None
        stack.script.hold(after_steps=6)
        first = stack.workers[0]
        async with asyncio.TaskGroup() as tasks:
            ask = Ask(prompt="carry on", max_tokens=20)
            calls = [tasks.create_task(send(stack, way, ask)) for way in TEXT_WAYS]
            await eventually(lambda: stack.core.loads().counters.generation_tokens > 2)
            first.die()
            await eventually(lambda: not stack.core.loads().workers)
            stack.script.go_on()
            async with running_worker(first.part, stack.scheduler_target, "w-1") as second:
                stack.workers[0] = second
                answers = [await call for call in calls]
                await oracles.check(stack)
        assert {answer.token_ids for answer in answers} == {(FILLER,) * 20}


async def test_a_leftover_is_noticed(scripted: Stack) -> None:
    """What no door would show: a row of the queue's bookkeeping that stays."""
    assert oracles.leftovers(scripted) == []
    scripted.worker_state.pending[b"left"] = 1
    assert oracles.leftovers(scripted) == ["1 pending hashes"]
    with pytest.raises(AssertionError, match="left behind: 1 pending hashes"):
        await oracles.quiet(scripted)
    del scripted.worker_state.pending[b"left"]


async def test_another_answer_to_the_same_request_is_noticed(
    scripted: Stack, pieces: Pieces
) -> None:
    assert scripted.script is not None
    output = pieces("hello", "!")
    prompt = scripted.prompt_for(output)
    ask = Ask(prompt=prompt, max_tokens=2)
    await send(scripted, Way.TOKENS, ask)
    scripted.script.say(scripted.prompt_ids(prompt), pieces("hello", "x"))
    with pytest.raises(AssertionError, match="another answer"):
        await send(scripted, Way.GENERATE_UNARY, ask)
    scripted.script.say(scripted.prompt_ids(prompt), output)
