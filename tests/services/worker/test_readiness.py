"""The worker's health while steps are taken, and while one hangs."""

import asyncio
import threading
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.chassis.channel import open_channel
from services.chassis.server import GrpcServer
from services.worker.__main__ import WORKER_LINK_SERVICE, Readiness
from services.worker.engine import StartUp
from services.worker.model_thread import ModelThread

SERVING = health_pb2.HealthCheckResponse.SERVING


async def _health(channel: grpc.aio.Channel) -> tuple[bool, bool]:
    """Whether it is alive, and whether it is ready."""
    stub = health_pb2_grpc.HealthStub(channel)
    answers = [
        await stub.Check(health_pb2.HealthCheckRequest(service=name))
        for name in ("", WORKER_LINK_SERVICE)
    ]
    alive, ready = (answer.status == SERVING for answer in answers)
    return alive, ready


async def _reach(channel: grpc.aio.Channel, wanted: tuple[bool, bool]) -> None:
    async with asyncio.timeout(10):
        while await _health(channel) != wanted:
            await asyncio.sleep(0.01)


async def test_a_step_that_hangs_is_neither_alive_nor_ready_until_it_ends(tmp_path: Path) -> None:
    server = GrpcServer([WORKER_LINK_SERVICE])
    (address,) = await server.start([f"unix://{tmp_path}/w.sock"])
    thread = ModelThread(asyncio.get_running_loop())
    readiness = Readiness(server, StartUp(0.0))
    release = threading.Event()
    try:
        async with open_channel(address) as channel, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(readiness.watch(thread, 0.05))
            assert await _health(channel) == (True, False)
            await readiness.set(True)
            await asyncio.sleep(0.3)  # idle for several times the timeout
            assert await _health(channel) == (True, True)
            stuck = thread.submit(release.wait)
            await _reach(channel, (False, False))
            await readiness.set(True)  # attached anew meanwhile
            assert await _health(channel) == (False, False)
            release.set()
            assert await stuck
            await _reach(channel, (True, True))
            watching.cancel()
    finally:
        release.set()
        assert await thread.close(5.0)
        await server.stop()
