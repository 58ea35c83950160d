"""The scheduler's readiness: what its health says, and what sessions are told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import generation_pb2, token_pb2, token_pb2_grpc
from services.scheduler.__main__ import TOKEN_SERVICE, follow_readiness, wire
from services.scheduler.settings import Settings
from tests.fakes.scripted_worker import attached

_NOT_SERVING, _SERVING = (
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVING,
)


class Followed:
    """A running scheduler, what its health says, and what a session was told last."""

    def __init__(self, channel: grpc.aio.Channel, target: str) -> None:
        self.target = target
        self.told: list[bool] = []
        self._channel = channel

    async def listen(self) -> None:
        """Holds a session open and notes what it is told."""
        call = token_pb2_grpc.TokenServiceStub(self._channel).Session()
        hello = token_pb2.Hello(instance_id="t", tokenizer_digest="d", protocol_major=1)
        await call.write(token_pb2.SessionRequest(hello=hello))
        self.told.append((await call.read()).welcome.readiness.serving)
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("readiness"):
                self.told.append(message.readiness.serving)

    async def health(self, service: str = TOKEN_SERVICE) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(self._channel).Check(request)).status

    async def reach(self, serving: bool) -> None:
        """Waits until both say so."""
        async with asyncio.timeout(10):
            while (
                await self.health() != (_SERVING if serving else _NOT_SERVING)
                or not self.told
                or self.told[-1] is not serving
            ):
                await asyncio.sleep(0.01)

    def generate(self):
        request = token_pb2.TokenRequest(
            prompt=generation_pb2.TokenIds(ids=[5, 6, 7]),
            stopping=generation_pb2.StoppingCriteria(max_tokens=3),
        )
        stub = token_pb2_grpc.TokenServiceStub(self._channel)
        return stub.Generate(token_pb2.TokenServiceGenerateRequest(request=request))


@contextlib.asynccontextmanager
async def followed(
    folder: Path, *, grace_s: float, stall_timeout_s: float = 60
) -> AsyncIterator[Followed]:
    loop, server = wire(Settings(check_block_tables=True, stall_timeout=stall_timeout_s))
    (target,) = await server.start([f"unix://{folder}/s.sock"])
    async with asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel(target) as channel:
        made = Followed(channel, target)
        running = [
            tasks.create_task(follow_readiness(loop, server, grace_s)),
            tasks.create_task(made.listen()),
        ]
        tasks.create_task(loop.run())
        try:
            yield made
        finally:
            for task in running:
                task.cancel()
            loop.close()
            await server.stop()


async def test_ready_while_a_worker_is_attached_and_within_the_grace_time(tmp_path: Path) -> None:
    async with followed(tmp_path, grace_s=0.2) as scheduler:
        await scheduler.reach(False)
        async with attached(scheduler.target):
            await scheduler.reach(True)
        assert scheduler.told == [False, True]
        await scheduler.reach(False)
        assert await scheduler.health("") == _SERVING


@pytest.mark.parametrize("hangs", [True, False])
async def test_ready_only_while_steps_are_answered(tmp_path: Path, hangs: bool) -> None:
    timeout_s = 0.05 if hangs else 60.0
    async with followed(tmp_path, grace_s=60, stall_timeout_s=timeout_s) as scheduler:
        await scheduler.reach(False)
        async with attached(scheduler.target) as worker:
            await scheduler.reach(True)
            call = scheduler.generate()
            step = await worker.step()
            await scheduler.reach(not hangs)
            await worker.answer(step)
            async with asyncio.TaskGroup() as tasks:
                rest = tasks.create_task(worker.serve())
                tokens = [token async for response in call for token in response.token_ids]
                await scheduler.reach(True)
                rest.cancel()
            assert tokens == [7, 7, 7]
        assert scheduler.told[:3] == ([False, True, False] if hangs else [False, True])


async def test_an_idle_worker_stays_ready(tmp_path: Path) -> None:
    async with followed(tmp_path, grace_s=60, stall_timeout_s=0.02) as scheduler:
        await scheduler.reach(False)
        async with attached(scheduler.target):
            await scheduler.reach(True)
            await asyncio.sleep(0.2)  # ten times the timeout
            assert scheduler.told == [False, True]
