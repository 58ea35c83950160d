"""B029: health tells that the engine is dead or frozen, within a stated bound, and that it is back.

Readiness is of the services, liveness is "" of each process; an idle engine stays ready.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.system.raw_requests import successors, text_request
from tests.system.service_set import (
    NOT_SERVING,
    SERVING,
    TEXT_SERVICE,
    TOKEN_SERVICE,
    ServiceSet,
    serving,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


QUICK = {"scheduler": ("--stall-timeout=1", "--worker-grace=1")}


@pytest.fixture
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    async with serving(successor_model, QUICK) as running:
        yield running


async def readiness(services: ServiceSet) -> tuple[int | None, int | None]:
    """Of scheduler and tokenizer."""
    return (
        await services.health("scheduler", TOKEN_SERVICE),
        await services.health("tokenizer", TEXT_SERVICE),
    )


async def answered(services: ServiceSet, count: int) -> list[int]:
    ids: list[int] = []
    async for message in services.text.Generate(text_request([65], count), timeout=60):
        ids.extend(message.token_ids)
    return ids


@contextlib.asynccontextmanager
async def stopped(services: ServiceSet, name: str) -> AsyncIterator[None]:
    services.programs[name].send(signal.SIGSTOP)
    try:
        yield
    finally:
        services.programs[name].send(signal.SIGCONT)


async def test_a_frozen_worker_shows_while_work_waits_and_only_then(services: ServiceSet) -> None:
    async with stopped(services, "worker-0"):
        await asyncio.sleep(2)  # nothing waits for it: to be idle is no stall
        assert await readiness(services) == (SERVING, SERVING)
    async with asyncio.TaskGroup() as tasks:
        async with stopped(services, "worker-0"):
            answer = tasks.create_task(answered(services, 40))
            await services.until(lambda: readiness(services), (NOT_SERVING, NOT_SERVING))
            # The scheduler itself is well; it is the worker that a restart would mend.
            assert await services.health("scheduler") == SERVING
            assert "nothing moves" in services.programs["scheduler"].log
        await services.until(lambda: readiness(services), (SERVING, SERVING))
        assert await answer == successors(65, 40, VOCAB_SIZE)


async def test_a_killed_worker_shows_after_the_grace(services: ServiceSet) -> None:
    await services.programs["worker-0"].kill()
    await services.until(lambda: readiness(services), (NOT_SERVING, NOT_SERVING))
    assert await services.health("tokenizer") == SERVING
    await services.start("worker-0")
    await services.until_ready()
    assert await answered(services, 5) == successors(65, 5, VOCAB_SIZE)


async def test_a_killed_scheduler_shows_at_its_tokenizer(services: ServiceSet) -> None:
    await services.programs["scheduler"].kill()
    await services.until(lambda: services.health("tokenizer", TEXT_SERVICE), NOT_SERVING)
    await services.start("scheduler")
    await services.until_ready()
    assert await answered(services, 5) == successors(65, 5, VOCAB_SIZE)


async def test_a_frozen_scheduler_shows_at_its_tokenizer(services: ServiceSet) -> None:
    async with stopped(services, "scheduler"):
        # Its connection is found dead by keepalive, which is what takes the time.
        await services.until(lambda: services.health("tokenizer", TEXT_SERVICE), NOT_SERVING)
    await services.until_ready()
    assert await answered(services, 5) == successors(65, 5, VOCAB_SIZE)
