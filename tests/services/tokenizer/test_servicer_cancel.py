"""Callers that go away leave nothing behind."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import generation_pb2
from tests.fakes.scheduler import FakeScheduler, default_limits
from tests.services.tokenizer.calls import answer, collect, generate, ids, unary
from tests.services.tokenizer.harness import TextService, eventually


async def cancel_waiting(running: TextService) -> None:
    call = running.stub.Generate(generate())
    await eventually(lambda: running.link.counts.unsent == 1)
    call.cancel()


async def cancel_submitted(running: TextService) -> None:
    call = running.stub.Generate(generate(output=unary()))
    got = await running.scheduler.next_submission()
    call.cancel()
    await running.scheduler.until(lambda: got.session.aborts == [got.stream_id])


async def cancel_streaming(running: TextService) -> None:
    call = running.stub.Generate(generate())
    got = await running.scheduler.next_submission()
    got.emit(*ids("alpha"))
    await call.read()
    call.cancel()
    await running.scheduler.until(lambda: got.session.aborts == [got.stream_id])


async def cancel_unread(running: TextService) -> None:
    """The client reads nothing, so the handler may stand in a write when it is cut."""
    criteria = generation_pb2.StoppingCriteria()
    call = running.stub.Generate(generate(stopping=criteria))
    got = await running.scheduler.next_submission()
    word = ids("alpha") * 20_000
    for _ in range(20):
        got.batch(word)
        await asyncio.sleep(0.005)
    call.cancel()
    await running.scheduler.until(lambda: got.session.aborts == [got.stream_id])


async def cancel_after_stop(running: TextService) -> None:
    call = running.stub.Generate(generate(stop_strings=["alpha"]))
    got = await running.scheduler.next_submission()
    got.emit(*ids("alpha"))
    await running.scheduler.until(lambda: bool(got.session.finishes))
    call.cancel()


async def deadline_passes(running: TextService) -> None:
    call = running.stub.Generate(generate(), timeout=2.0)
    got = await running.scheduler.next_submission()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await running.scheduler.until(lambda: got.session.aborts == [got.stream_id])


@pytest.mark.parametrize(
    "leave",
    [
        cancel_submitted,
        cancel_streaming,
        cancel_unread,
        cancel_after_stop,
        deadline_passes,
    ],
)
async def test_a_client_that_goes_away_leaves_nothing(service: Any, leave: Any) -> None:
    async with service() as running:
        await leave(running)
        await running.is_empty()
        messages = await answer(running, generate(), [ids("alpha")])
        assert "".join(message.text for message in messages) == "alpha"


async def test_a_client_that_goes_away_while_its_request_waits_leaves_nothing(
    service: Any, sockets: Path
) -> None:
    scheduler = FakeScheduler(
        f"unix://{sockets}/s.sock", credits=0, gives_credits=False, limits=default_limits()
    )
    async with service(scheduler=scheduler) as running:
        await cancel_waiting(running)
        await running.is_empty()
        assert scheduler.session.aborts == []


async def test_a_client_that_cancels_while_its_text_is_encoded_leaves_nothing(
    service: Any,
) -> None:
    async with service() as running:
        call = running.stub.Generate(generate("word " * 200_000))
        await eventually(lambda: running.servicer.live_calls == 1)
        call.cancel()
        await running.is_empty()


async def test_200_cancelled_calls_leave_nothing(service: Any) -> None:
    async with service() as running:
        for number in range(200):
            call = running.stub.Generate(generate(request_id="same"))
            if number % 2:
                got = await running.scheduler.next_submission()
                if number % 4 == 3:
                    got.emit(*ids("alpha"))
                    await call.read()
            call.cancel()
        await running.is_empty()
        while not running.scheduler.submissions.empty():
            running.scheduler.submissions.get_nowait()
        messages = await answer(running, generate(request_id="same"), [ids("alpha")])
        assert messages[0].request_id == "same"
