"""The real set as processes, with the demo model."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import pytest

from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, ModelNotFound, locate_model
from quire.v1 import info_pb2, info_pb2_grpc


@dataclass(frozen=True)
class System:
    """A running set and a client of it."""

    local: LocalSet
    client: AsyncClient

    async def loads(self) -> info_pb2.GetLoadsResponse:
        """The scheduler's load report."""
        async with grpc.aio.insecure_channel(self.local.scheduler) as channel:
            stub = info_pb2_grpc.InfoServiceStub(channel)
            return await stub.GetLoads(info_pb2.GetLoadsRequest())


@contextlib.asynccontextmanager
async def running_system(flags: Mapping[str, Sequence[str]]) -> AsyncIterator[System]:
    """Starts the set with further flags by process; block tables are compared in every step."""
    try:
        model = locate_model(DEFAULT_MODEL)
    except ModelNotFound as error:
        pytest.skip(str(error))
    scheduler = ("--check-block-tables=true", *flags.get("scheduler", ()))
    config = LocalConfig(
        model=model.path,
        served_model_name=model.name,
        port=0,
        flags={**flags, "scheduler": scheduler},
    )
    async with LocalSet(config) as local, AsyncClient(local.target) as client:
        yield System(local, client)


@pytest.fixture(scope="session")
async def system() -> AsyncIterator[System]:
    """One set with ordinary settings for all tests that do not hurt it."""
    async with running_system({}) as running:
        yield running
