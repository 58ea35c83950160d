"""Scheduling options and deadlines at the text door."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2

from quire.v1 import generation_pb2, text_pb2
from tests.fakes.scheduler import FakeScheduler, default_limits
from tests.services.tokenizer.calls import answer, generate, ids, status_of, unary, violations
from tests.services.tokenizer.harness import TextService, eventually

ALL = generation_pb2.SchedulingOptions(
    priority_class="batch",
    tenant="acme",
    ttft_target_ms=250,
    tpot_target_ms=40,
    shed_late=True,
    session_id="s-1",
    cache_salt="",
    skip_reading_prefix_cache=True,
)


def options(**fields: Any) -> generation_pb2.SchedulingOptions:
    return generation_pb2.SchedulingOptions(**fields)


def start(running: TextService, door: str, **fields: Any) -> Any:
    """A call of one of the two doors; `call_s` is the call's own deadline."""
    timeout = fields.pop("call_s", None)
    if door == "Generate":
        return running.stub.Generate(generate(**fields), timeout=timeout)
    turn = text_pb2.ChatMessage(role="user", content="Hi")
    return running.stub.Chat(text_pb2.ChatRequest(messages=[turn], **fields), timeout=timeout)


doors = pytest.mark.parametrize("door", ["Generate", "Chat"])


@doors
async def test_options_travel_to_the_scheduler_as_they_came(service: Any, door: str) -> None:
    async with service() as running:
        call = start(running, door, scheduling=ALL)
        got = await running.scheduler.next_submission()
        assert got.request.scheduling == ALL
        call.cancel()


async def test_nothing_is_added_to_a_request_without_options(service: Any) -> None:
    async with service() as running:
        call = start(running, "Generate")
        got = await running.scheduler.next_submission()
        assert not got.request.HasField("scheduling")
        call.cancel()


@doors
async def test_all_wrong_fields_are_named_at_once(service: Any, door: str) -> None:
    async with service() as running:
        wrong = options(priority_class="x" * 129, cache_salt="é" * 65, ttft_target_ms=0)
        status = await status_of(start(running, door, scheduling=wrong))
        assert status.code == code_pb2.INVALID_ARGUMENT
        assert violations(status) == [
            "scheduling.priority_class",
            "scheduling.cache_salt",
            "scheduling.ttft_target_ms",
        ]
        assert running.scheduler.submissions.empty()
        messages = await answer(running, generate(scheduling=ALL), [ids("alpha")])
        assert "".join(message.text for message in messages) == "alpha"


@doors
@pytest.mark.parametrize(
    ("call_s", "deadline_ms", "limit_ms"),
    [(60.0, None, 60_000), (60.0, 20_000, 20_000), (60.0, 90_000, 60_000), (None, 9_000, 9_000)],
)
async def test_the_time_left_travels_with_a_request(
    service: Any, door: str, call_s: float | None, deadline_ms: int | None, limit_ms: int
) -> None:
    async with service() as running:
        asked = options(deadline_ms=deadline_ms, tenant="acme")
        call = start(running, door, scheduling=asked, call_s=call_s)
        got = await running.scheduler.next_submission()
        # Some was spent on the way, and gRPC sends its own deadline rounded up.
        assert limit_ms - 5_000 < got.request.scheduling.deadline_ms < limit_ms + 1_000
        assert got.request.scheduling.tenant == "acme"
        call.cancel()


@doors
async def test_a_running_request_ends_at_its_deadline(service: Any, door: str) -> None:
    async with service() as running:
        call = start(running, door, scheduling=options(deadline_ms=300), output=unary())
        got = await running.scheduler.next_submission()
        got.emit(*ids("alpha"))
        status = await status_of(call)
        assert (status.code, status.message) == (
            code_pb2.DEADLINE_EXCEEDED,
            "the deadline has passed",
        )
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.reason == "DEADLINE"
        await running.scheduler.until(lambda: got.session.aborts == [got.stream_id])
        await running.is_empty()


async def test_a_request_that_waits_for_credit_ends_at_its_deadline(
    service: Any, sockets: Path
) -> None:
    scheduler = FakeScheduler(
        f"unix://{sockets}/s.sock", credits=0, gives_credits=False, limits=default_limits()
    )
    async with service(scheduler=scheduler) as running:
        status = await status_of(start(running, "Generate", scheduling=options(deadline_ms=50)))
        assert status.code == code_pb2.DEADLINE_EXCEEDED
        await running.is_empty()
        assert scheduler.submissions.empty()


async def test_a_request_that_waits_for_a_session_ends_at_its_deadline(service: Any) -> None:
    async with service(scheduler_runs=False, new_request_s=60.0) as running:
        status = await status_of(start(running, "Generate", scheduling=options(deadline_ms=50)))
        assert status.code == code_pb2.DEADLINE_EXCEEDED
        await running.is_empty()


async def test_a_scheduler_that_is_not_there_is_told_of_before_a_later_deadline(
    service: Any,
) -> None:
    async with service(scheduler_runs=False, new_request_s=0.05) as running:
        status = await status_of(start(running, "Generate", scheduling=options(deadline_ms=60_000)))
        assert status.code == code_pb2.UNAVAILABLE


async def test_a_resubmitted_request_has_what_is_left_of_its_first_deadline(service: Any) -> None:
    async with service() as running:
        call = start(running, "Generate", scheduling=options(deadline_ms=60_000))
        first = await running.scheduler.next_submission()
        first.emit(*ids("alpha"))
        await call.read()
        await asyncio.sleep(0.05)
        first.session.drop()
        again = await running.scheduler.next_submission()
        assert (again.request.attempt, again.resumed) == (1, ids("alpha"))
        before, after = (got.request.scheduling.deadline_ms for got in (first, again))
        assert before - 5_000 < after <= before - 50
        call.cancel()


async def test_a_deadline_passes_while_no_session_stands(service: Any) -> None:
    async with service(lost_request_s=60.0) as running:
        call = start(running, "Generate", scheduling=options(deadline_ms=400))
        await running.scheduler.next_submission()
        await running.scheduler.die()
        assert (await status_of(call)).code == code_pb2.DEADLINE_EXCEEDED
        await running.is_empty()


async def test_encoding_counts_and_is_cut_at_the_deadline(service: Any, sockets: Path) -> None:
    # No worker has said how long a text may be, so this one is encoded.
    scheduler = FakeScheduler(f"unix://{sockets}/s.sock", limits=None)
    async with service(scheduler=scheduler) as running:
        words = "word " * 400_000
        request = generate(words, scheduling=options(deadline_ms=1))
        status = await status_of(running.stub.Generate(request))
        assert status.code == code_pb2.DEADLINE_EXCEEDED
        await running.is_empty()
        assert running.scheduler.submissions.empty()


async def test_an_answer_that_is_whole_is_given_at_the_deadline(service: Any) -> None:
    """A stop string was found, and the scheduler does not answer the finish in time."""
    async with service(finish_s=60.0) as running:
        asked = options(deadline_ms=500)
        call = running.stub.Generate(generate(stop_strings=[" beta"], scheduling=asked))
        got = await running.scheduler.next_submission()
        got.emit(*ids("alpha", " beta"))
        await running.scheduler.until(lambda: bool(got.session.finishes))
        messages = [message async for message in call]
        assert "".join(message.text for message in messages) == "alpha"
        assert messages[-1].finished.stop_string == " beta"


REFUSALS = [
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue holds at most so many requests: 4", 2.5),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "its time to first token could no longer be met", 0.25),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed", None),
]


@pytest.mark.parametrize(("code", "message", "retry_after_s"), REFUSALS)
async def test_what_the_scheduler_refuses_reaches_the_client_untouched(
    service: Any, code: grpc.StatusCode, message: str, retry_after_s: float | None
) -> None:
    details = [error_details_pb2.ErrorInfo(reason="WHY", domain="quire", metadata={"limit": "4"})]
    packed = [any_pb2.Any(), any_pb2.Any()]
    packed[0].Pack(details[0])
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(int((retry_after_s or 0) * 1000))
    packed[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if retry_after_s is None:
        del packed[1]
    async with service() as running:
        call = start(running, "Generate")
        got = await running.scheduler.next_submission()
        got.fail(code, message, *packed)
        status = await status_of(call)
        assert (status.code, status.message) == (code.value[0], message)
        assert list(status.details) == packed
        await running.is_empty()
        # It was not submitted a second time behind the client's back.
        assert running.scheduler.submissions.empty()
        await eventually(lambda: running.link.counts.live == 0)
