"""The scheduler of a running set as a benchmark sees it: its loads, and its configuration changed.

Owns the channel to it. What it reads and changes is in `info.proto` and `admin.proto`.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from quire.v1 import admin_pb2, admin_pb2_grpc, info_pb2, info_pb2_grpc

_ACTOR = "quire bench"


class SchedulerProbe:
    """Looks at a scheduler and changes how it decides.

    Args:
        channel: to it.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._info: Any = info_pb2_grpc.InfoServiceStub(channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(channel)

    async def loads(self) -> info_pb2.GetLoadsResponse:
        """Gauges and counters."""
        response: info_pb2.GetLoadsResponse = await self._info.GetLoads(info_pb2.GetLoadsRequest())
        return response

    async def step_ms(self) -> float:
        """Median time of the recent steps of its workers, milliseconds."""
        timings = [worker.timings.execute_us_p50 for worker in (await self.loads()).workers]
        return max(timings, default=0) / 1000

    async def configure(self, change: admin_pb2.SchedulerConfig) -> None:
        """Changes the configuration."""
        await self._admin.SetConfig(admin_pb2.SetConfigRequest(change=change, actor=_ACTOR))


@contextlib.asynccontextmanager
async def probed(address: str) -> AsyncIterator[SchedulerProbe]:
    """A probe of the scheduler at this address."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield SchedulerProbe(channel)
