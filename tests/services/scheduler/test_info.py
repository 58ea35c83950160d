"""The facts of `quire.v1.InfoService` beside queues and counters: workers, time, latencies."""

from pathlib import Path

import grpc
import pytest

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire.version import VERSION
from tests.fakes.scripted_worker import REGISTER, attached
from tests.services.scheduler.conftest import Running, running_scheduler
from tests.services.scheduler.token_session import opened


async def test_before_the_first_worker(scheduler: Running) -> None:
    first, second = await scheduler.loads(), await scheduler.loads()
    assert (first.version, first.model) == (VERSION, "")
    assert 0 < first.uptime_us < second.uptime_us
    assert not first.HasField("latencies")
    assert not any(one.HasField("latencies") for one in first.classes)


async def test_what_a_worker_is(scheduler: Running) -> None:
    async with attached(scheduler.target, device="abacus", version="1.2"):
        loads = await scheduler.loads()
    (worker,) = loads.workers
    assert loads.model == "scripted-model"
    assert (worker.device, worker.dtype, worker.version) == ("abacus", "float32", "1.2")
    assert (worker.max_num_seqs, worker.max_num_batched_tokens) == (4, 8)
    assert 0 < worker.attached_us < loads.uptime_us
    assert (worker.computed_tokens, worker.execute_us) == (0, 0)


async def test_the_budget_is_the_one_in_force(tmp_path: Path) -> None:
    caps = {"max_num_seqs": 3, "max_num_batched_tokens": 5}
    async with running_scheduler(tmp_path, **caps) as scheduler, attached(scheduler.target):
        (worker,) = (await scheduler.loads()).workers
    assert (worker.max_num_seqs, worker.max_num_batched_tokens) == (3, 5)


async def test_steps_count_once_they_are_answered(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6, 7], max_tokens=30)
        first = await worker.step()
        (load,) = (await scheduler.loads()).workers
        assert (load.computed_tokens, load.execute_us) == (0, 0)
        await worker.answer(first)
        await session.until(lambda: session.tokens.get(1) == [7])
        (load,) = (await scheduler.loads()).workers
        assert (load.computed_tokens, load.execute_us) == (3, 900)
        await worker.answer(await worker.step())
        await session.until(lambda: session.tokens.get(1) == [7, 7])
        (load,) = (await scheduler.loads()).workers
        assert (load.computed_tokens, load.execute_us) == (4, 1800)


async def test_latencies_are_told_in_all_and_by_class(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6, 7], max_tokens=3)
        for _ in range(3):
            await worker.answer(await worker.step())
        await session.end_of(1)
        loads = await scheduler.loads()
    told = loads.latencies
    assert (told.requests, told.tpot_requests) == (1, 1)
    assert 0 < told.ttft_us_p50 == told.ttft_us_p95 < loads.uptime_us
    assert 0 < told.tpot_us_p50 < loads.uptime_us
    named = {one.name: one for one in loads.classes}
    assert named["standard"].latencies == told
    assert not named["batch"].HasField("latencies")


@pytest.mark.parametrize("field", ["device", "dtype", "version"])
async def test_what_cannot_be_shown_is_refused(scheduler: Running, field: str) -> None:
    async with grpc.aio.insecure_channel(scheduler.target) as channel:
        call = worker_pb2_grpc.WorkerLinkServiceStub(channel).Attach()
        register = worker_pb2.Register(**{**REGISTER, field: "\x1b[2J"})
        await call.write(worker_pb2.AttachRequest(register=register))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"register.{field}" in await call.details()
