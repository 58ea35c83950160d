"""A reader that stands still costs nobody else anything, and the services no memory without end."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import text_pb2_grpc, token_pb2, token_pb2_grpc
from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.system.raw_requests import successors, text_request, token_request
from tests.system.service_set import ServiceSet, serving

STREAMS = 64
ANSWER = 40
LONG_ANSWER = 600
LONGEST = 6_000

GROWTH_MIB = {"scheduler": 8.0, "tokenizer": 8.0, "worker-0": 256.0}
"""Most that a service may grow by while somebody does not read. What waits for a reader waits in
the first two; the worker's matrix library keeps code for each of the last 1,024 shapes it met."""

# The transport holds back 1 KiB for a reader that reads no more: its writer stands still at once.
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    worker = (
        *(f"--max-num-seqs={STREAMS}", f"--max-model-len={LONGEST}"),
        *("--kv-cache-memory=8MiB", "--max-num-batched-tokens=256"),
    )
    async with serving(successor_model, {"worker": worker}) as running:
        await stream_all(running, range(STREAMS))
        yield running


async def stream_all(services: ServiceSet, numbers: range) -> None:
    """As many streams at once, each of which must give its own known tokens."""
    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(one_stream(services, number))


async def one_stream(services: ServiceSet, number: int) -> None:
    ids: list[int] = []
    async for response in services.text.Generate(text_request([number], ANSWER)):
        ids.extend(response.token_ids)
    assert ids == successors(number, ANSWER, VOCAB_SIZE)


def memory(services: ServiceSet) -> dict[str, float]:
    return {name: program.rss_mib() for name, program in services.programs.items()}


@contextlib.contextmanager
def memory_bounded(services: ServiceSet) -> Any:
    before = memory(services)
    yield
    after = memory(services)
    growth = {name: round(after[name] - before[name], 1) for name in before}
    sys.stdout.write(f"growth in MiB: {growth}\n")
    assert all(growth[name] < GROWTH_MIB[name] for name in growth), growth


@pytest.mark.parametrize("door", ["text", "token"])
async def test_a_stalled_stream_holds_up_nobody_and_loses_nothing(
    services: ServiceSet, door: str
) -> None:
    address = services.address("tokenizer" if door == "text" else "scheduler")
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        with memory_bounded(services):
            if door == "text":
                stub: Any = text_pb2_grpc.TextServiceStub(channel)
                call = stub.Generate(text_request([9], LONG_ANSWER))
            else:
                stub = token_pb2_grpc.TokenServiceStub(channel)
                call = stub.Generate(token_request([9], LONG_ANSWER))
            response = await call.read()
            rounds = 0
            while not await services.at_rest():
                await stream_all(services, range(STREAMS - 1))
                rounds += 1
            assert rounds > 1
        # All its tokens have been made meanwhile; they wait where it left them.
        ids = list(response.token_ids)
        while not response.HasField("finished"):
            response = await call.read()
            ids.extend(response.token_ids)
    assert ids == successors(9, LONG_ANSWER, VOCAB_SIZE)


async def test_a_session_that_is_not_read_is_closed_and_holds_up_nobody(
    services: ServiceSet,
) -> None:
    requests = 32
    async with grpc.aio.insecure_channel(
        services.address("scheduler"), options=SMALL_WINDOW
    ) as channel:
        stub: Any = token_pb2_grpc.TokenServiceStub(channel)
        call = stub.Session()
        hello = token_pb2.Hello(instance_id="slow", tokenizer_digest="d", protocol_major=1)
        await call.write(token_pb2.SessionRequest(hello=hello))
        assert (await call.read()).WhichOneof("message") == "welcome"
        with memory_bounded(services):
            for stream in range(1, requests + 1):
                request = token_request([stream], LONGEST - 1, request_id=f"slow-{stream}").request
                submit = token_pb2.Submit(stream_id=stream, request=request)
                await call.write(token_pb2.SessionRequest(submit=submit))
            await services.until(lambda: runs_at_least(services, requests))
            rounds = 0
            while (await services.loads()).running:
                await stream_all(services, range(STREAMS - requests))
                rounds += 1
        assert rounds
        # Long before they would have ended by themselves.
        assert await services.generated() < requests * LONGEST - 1
        assert await services.at_rest()
        while await read_or_end(call):
            pass
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "reads too slowly" in await call.details()
    await stream_all(services, range(STREAMS))


async def runs_at_least(services: ServiceSet, count: int) -> bool:
    return (await services.loads()).running >= count


async def read_or_end(call: Any) -> bool:
    try:
        return await call.read() is not grpc.aio.EOF
    except grpc.aio.AioRpcError:
        return False
