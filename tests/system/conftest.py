"""The real set as processes: with the demo model, or with a model folder made for the test."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, ModelNotFound, locate_model
from quire.v1 import info_pb2, info_pb2_grpc
from tests.assets.checkpoints import make_random_checkpoint, make_successor_checkpoint


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
async def running_system(
    flags: Mapping[str, Sequence[str]], *, model: Path | None = None, workers: int = 1
) -> AsyncIterator[System]:
    """Starts the set with further flags by process; block tables are compared in every step.

    Args:
        flags: further flags by process.
        model: the model's folder, served as "tiny"; None for the demo model.
        workers: how many.
    """
    name = "tiny"
    if model is None:
        try:
            located = locate_model(DEFAULT_MODEL)
        except ModelNotFound as error:
            pytest.skip(str(error))
        model, name = located.path, located.name
    scheduler = ("--check-block-tables=true", *flags.get("scheduler", ()))
    config = LocalConfig(
        model=model,
        served_model_name=name,
        port=0,
        workers=workers,
        flags={**flags, "scheduler": scheduler},
    )
    async with LocalSet(config) as local, AsyncClient(local.target) as client:
        yield System(local, client)


@pytest.fixture(scope="session")
async def system() -> AsyncIterator[System]:
    """One set with ordinary settings for all tests that do not hurt it."""
    async with running_system({}) as running:
        yield running


@pytest.fixture(scope="session")
def successor_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says a known token after each token, for prompts and answers of any length."""
    folder = tmp_path_factory.mktemp("successor")
    return make_successor_checkpoint(folder, max_positions=40_000)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answer depends on all tokens before."""
    return make_random_checkpoint(tmp_path_factory.mktemp("random"))
