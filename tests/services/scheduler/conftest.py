"""A real scheduler server in this process, on a unix socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from quire.v1 import info_pb2, info_pb2_grpc, token_pb2_grpc
from services.scheduler.__main__ import wire
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.model_folder import read_model_folder
from services.scheduler.settings import Settings


@dataclass(frozen=True)
class Running:
    target: str
    loop: EngineLoop
    channel: grpc.aio.Channel

    @property
    def tokens(self):
        return token_pb2_grpc.TokenServiceStub(self.channel)

    async def loads(self) -> info_pb2.GetLoadsResponse:
        stub = info_pb2_grpc.InfoServiceStub(self.channel)
        return await stub.GetLoads(info_pb2.GetLoadsRequest())

    async def quiesced(self) -> info_pb2.GetLoadsResponse:
        """Waits until nothing lives and asserts that every block is back."""
        async with asyncio.timeout(5):
            while True:
                loads = await self.loads()
                if not loads.running + loads.waiting:
                    break
                await asyncio.sleep(0.01)
        for worker in loads.workers:
            assert worker.blocks_free + worker.blocks_evictable == worker.blocks_total
        assert loads.accepted == loads.ended
        return loads


@contextlib.asynccontextmanager
async def running_scheduler(folder: Path, **settings: object) -> AsyncIterator[Running]:
    parsed = Settings(**{"check_block_tables": True, **settings})
    model = None if parsed.tokenizer is None else read_model_folder(parsed.tokenizer)
    loop, server = wire(parsed, folder=model)
    (target,) = await server.start([f"unix://{folder}/s.sock"])
    async with asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel(target) as channel:
        tasks.create_task(loop.run())
        try:
            yield Running(target, loop, channel)
        finally:
            loop.close()
            await server.stop()


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_scheduler(tmp_path) as running:
        yield running
