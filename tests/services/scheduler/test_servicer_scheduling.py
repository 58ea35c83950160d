"""Scheduling options at the token door: deadlines, refusals, wrong fields."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.v1 import generation_pb2, token_pb2
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running, running_scheduler
from tests.services.scheduler.token_session import opened, served

LONG = "é" * 65


def options(**fields: Any) -> generation_pb2.SchedulingOptions:
    return generation_pb2.SchedulingOptions(**fields)


def generate(scheduler: Running, *, call_s: float | None = None, **fields: Any) -> Any:
    request = token_pb2.TokenRequest(prompt=generation_pb2.TokenIds(ids=[5, 6, 7]), **fields)
    message = token_pb2.TokenServiceGenerateRequest(request=request)
    return scheduler.tokens.Generate(message, timeout=call_s)


async def status_of(call: Any) -> status_pb2.Status:
    """The google.rpc.Status that a call ends with; none where it ended on this side."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in call]
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    return status


def reason(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return info.reason


def retry_after_s(status: status_pb2.Status) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    return float(retry.retry_delay.ToMilliseconds() / 1000)


def fields(status: status_pb2.Status) -> list[str]:
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    return [violation.field for violation in bad.field_violations]


async def test_b067_a_deadline_ends_what_runs_at_both_doors(scheduler: Running) -> None:
    """The worker never answers its step."""
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], scheduling=options(deadline_ms=300))
        await worker.step()
        by_itself = await status_of(generate(scheduler, scheduling=options(deadline_ms=300)))
        assert by_itself.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert reason(by_itself) == "DEADLINE"
        on_the_session = (await session.end_of(1)).status
        assert on_the_session.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert reason(on_the_session) == "DEADLINE"
        loads = await scheduler.loads()
        assert (loads.running, loads.waiting) == (0, 0)


async def test_b067_a_deadline_ends_what_waits_for_a_worker(scheduler: Running) -> None:
    async with opened(scheduler) as session:
        await session.submit(1, [5, 6], scheduling=options(deadline_ms=100))
        status = (await session.end_of(1)).status
        assert (status.code, reason(status)) == (
            grpc.StatusCode.DEADLINE_EXCEEDED.value[0],
            "DEADLINE",
        )
        # The others of the session go on.
        async with served(scheduler):
            await session.submit(2, [5, 6], scheduling=options(deadline_ms=60_000))
            end = await session.end_of(2)
            assert end.finished.reason == generation_pb2.FINISH_REASON_LENGTH
        await scheduler.quiesced()


@pytest.mark.parametrize(("call_s", "deadline_ms"), [(60.0, 200), (None, 200)])
async def test_the_earlier_deadline_of_call_and_request_counts(
    scheduler: Running, call_s: float | None, deadline_ms: int
) -> None:
    call = generate(scheduler, call_s=call_s, scheduling=options(deadline_ms=deadline_ms))
    status = await status_of(call)
    assert status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert reason(status) == "DEADLINE"
    await scheduler.quiesced()


async def test_a_deadline_of_the_call_frees_its_request(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker:
        call = generate(scheduler, call_s=0.3, scheduling=options(deadline_ms=60_000))
        await worker.step()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(2):
            while (loads := await scheduler.loads()).running:
                await asyncio.sleep(0.01)
        assert loads.accepted == loads.ended == 1


@pytest.mark.parametrize(
    ("settings", "scheduling", "why"),
    [
        ({"max_queued_requests": 2}, options(), "QUEUE_REQUESTS"),
        ({"max_queued_tokens": 7}, options(), "QUEUE_TOKENS"),
        ({"tenant": ("acme:max-queued-requests=2",)}, options(tenant="acme"), "TENANT_REQUESTS"),
        ({"tenant": ("acme:max-queued-tokens=7",)}, options(tenant="acme"), "TENANT_TOKENS"),
        ({"tenant": ("acme:max-live-requests=2",)}, options(tenant="acme"), "TENANT_LIVE"),
    ],
)
async def test_a_full_queue_says_when_to_come_back_at_both_doors(
    tmp_path: Path, settings: dict[str, Any], scheduling: Any, why: str
) -> None:
    """No worker is there, so that everything queues."""
    async with running_scheduler(tmp_path, **settings) as scheduler, opened(scheduler) as session:
        for stream in (1, 2):
            await session.submit(stream, [5, 6, 7], scheduling=scheduling)
        await session.submit(3, [5, 6, 7], scheduling=scheduling)
        refused = (await session.end_of(3)).status
        alone = await status_of(generate(scheduler, scheduling=scheduling))
        for status in (refused, alone):
            assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert reason(status) == why
            assert retry_after_s(status) > 0
        assert not {1, 2} & set(session.ends), "those before it stay"
        async with served(scheduler):
            for stream in (1, 2):
                end = await session.end_of(stream)
                assert end.finished.reason == generation_pb2.FINISH_REASON_LENGTH
            await session.submit(4, [5, 6, 7], scheduling=scheduling)
            assert (await session.end_of(4)).finished.usage.completion_tokens == 4
        await scheduler.quiesced()


async def test_what_is_wrong_is_named_at_both_doors(scheduler: Running) -> None:
    wrong = options(
        priority_class=LONG,
        tenant=LONG,
        session_id=LONG,
        cache_salt=LONG,
        deadline_ms=0,
        ttft_target_ms=0,
        tpot_target_ms=0,
    )
    names = ("priority_class", "tenant", "session_id", "cache_salt")
    times = ("deadline_ms", "ttft_target_ms", "tpot_target_ms")
    expected = [f"request.scheduling.{name}" for name in (*names, *times)]
    async with served(scheduler), opened(scheduler) as session:
        alone = await status_of(generate(scheduler, scheduling=wrong))
        await session.submit(1, [5], scheduling=wrong)
        for status in (alone, (await session.end_of(1)).status):
            assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert fields(status) == expected
            assert "must be at most 128 bytes, got 130" in status.message
            assert "must be >= 1, got 0" in status.message
        await session.submit(2, [5], scheduling=options(priority_class="urgent"))
        unknown = (await session.end_of(2)).status
        assert (reason(unknown), fields(unknown)) == (
            "UNKNOWN_CLASS",
            ["request.scheduling.priority_class"],
        )
        await session.submit(3, [5], scheduling=options(priority_class="batch", tenant="é" * 64))
        assert (await session.end_of(3)).finished.usage.completion_tokens == 4
        await scheduler.quiesced()
