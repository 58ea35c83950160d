"""A client that goes away leaves nothing behind, whatever its request was doing."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import text_pb2_grpc, token_pb2_grpc
from tests.system.raw_requests import text_request, token_request
from tests.system.service_set import ROOT, ServiceSet, is_at_rest, serving

GONE_S = 5.0 if os.environ.get("CI") else 1.0
"""Within this time after a client is gone nothing of its request may be left, seconds."""

SEATS = 2
LONG_PROMPT, LONG_ANSWER = 30_000, 30_000
SMALL_WINDOW, WIDE_WINDOW = 1024, 65_536

# With the small window a writer whose messages nobody reads stands still after 128 of them.
BEYOND_WINDOW = 500

STATES = ("queued", "prefill", "decode", "unary", "blocked")

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    worker = (f"--max-num-seqs={SEATS}", "--max-num-batched-tokens=8", "--kv-cache-memory=16MiB")
    async with serving(successor_model, {"worker": worker}) as running:
        yield running


def shape(state: str) -> tuple[int, int, bool, int]:
    """Prompt length, answer length, whether it streams, and the client's window."""
    window = SMALL_WINDOW if state == "blocked" else WIDE_WINDOW
    prompt = LONG_PROMPT if state == "prefill" else 5
    return prompt, LONG_ANSWER if prompt == 5 else 5, state != "unary", window


def door_of(services: ServiceSet, door: str) -> str:
    return services.address({"text": "tokenizer", "token": "scheduler"}[door])


@contextlib.asynccontextmanager
async def seats_taken(services: ServiceSet) -> AsyncIterator[None]:
    """All seats of the worker are taken by streams that are read."""
    async with asyncio.TaskGroup() as tasks:
        calls = [services.text.Generate(text_request([7], LONG_ANSWER)) for _ in range(SEATS)]
        readers = [tasks.create_task(read_until_cancelled(call)) for call in calls]
        await services.until(lambda: running(services), SEATS)
        yield
        for reader in readers:
            reader.cancel()
    await services.until(services.at_rest)


async def read_until_cancelled(call: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        async for _ in call:
            pass
    call.cancel()


async def running(services: ServiceSet) -> int:
    return int((await services.loads()).running)


async def waiting(services: ServiceSet) -> int:
    return int((await services.loads()).waiting)


async def reached(services: ServiceSet, state: str, before: Any) -> bool:
    """Whether the one client's request is in this state now."""
    loads = await services.loads()
    counters = loads.counters
    if state == "queued":
        return bool(loads.waiting == 1)
    if state == "prefill":
        return bool(loads.running == 1 and counters.chunked_prefills - before.chunked_prefills > 9)
    more = BEYOND_WINDOW if state == "blocked" else 20
    return bool(loads.running == 1 and counters.generation_tokens - before.generation_tokens > more)


async def is_gone(services: ServiceSet, state: str) -> bool:
    loads = await services.loads()
    if state == "queued":
        return bool((loads.running, loads.waiting) == (SEATS, 0))
    return is_at_rest(loads)


async def gone_in_time(services: ServiceSet, state: str, since: float) -> None:
    """The requirement: nothing is left within GONE_S seconds."""
    try:
        async with asyncio.timeout_at(since + GONE_S):
            while not await is_gone(services, state):
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"still there after {GONE_S:g} s: {await services.loads()}")
    took = asyncio.get_running_loop().time() - since
    sys.stdout.write(f"{state}: gone after {took * 1000:.0f} ms\n")


@contextlib.asynccontextmanager
async def in_state(
    services: ServiceSet, state: str
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Gives what waits until the one client's request is in `state`."""
    await services.until(services.at_rest)
    async with contextlib.AsyncExitStack() as scope:
        if state == "queued":
            await scope.enter_async_context(seats_taken(services))
        before = (await services.loads()).counters
        yield lambda: services.until(lambda: reached(services, state, before))
    await services.until(services.at_rest)


@contextlib.asynccontextmanager
async def client_process(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.system.client_process", *map(str, arguments)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


CASES = [
    (door, state)
    for door in ("text", "token")
    for state in STATES
    if (door, state) != ("token", "unary")
]


@pytest.mark.parametrize(("door", "state"), CASES)
async def test_a_killed_client_leaves_nothing(services: ServiceSet, door: str, state: str) -> None:
    prompt, answer, stream, window = shape(state)
    address = door_of(services, door)
    async with (
        in_state(services, state) as in_that_state,
        client_process(address, door, prompt, answer, stream, window) as client,
    ):
        assert client.stdout is not None
        assert await client.stdout.readline() == b"sent\n"
        if state in ("decode", "blocked"):
            assert await client.stdout.readline() == b"answered\n"
        if state == "blocked":
            client.send_signal(signal.SIGSTOP)
        await in_that_state()
        client.kill()
        assert await client.wait() == -signal.SIGKILL
        await gone_in_time(services, state, asyncio.get_running_loop().time())


@pytest.mark.parametrize(("door", "state"), CASES)
async def test_a_cancelled_call_leaves_nothing(services: ServiceSet, door: str, state: str) -> None:
    prompt_len, answer, stream, window = shape(state)
    prompt = [index % 251 for index in range(prompt_len)]
    options = (("grpc.http2.lookahead_bytes", window), ("grpc.http2.bdp_probe", 0))
    async with (
        in_state(services, state) as in_that_state,
        grpc.aio.insecure_channel(door_of(services, door), options=options) as channel,
    ):
        if door == "text":
            stub: Any = text_pb2_grpc.TextServiceStub(channel)
            call = stub.Generate(text_request(prompt, answer, stream=stream))
        else:
            call = token_pb2_grpc.TokenServiceStub(channel).Generate(token_request(prompt, answer))
        if state in ("decode", "blocked"):
            assert await call.read() is not grpc.aio.EOF
        await in_that_state()
        call.cancel()
        await gone_in_time(services, state, asyncio.get_running_loop().time())
