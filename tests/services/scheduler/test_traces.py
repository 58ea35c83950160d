"""The spans of requests and steps, against a worker played by hand."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import StatusCode

from quire.v1 import generation_pb2
from services.chassis.tracing import is_sampled
from services.scheduler.traces import Traces
from tests.fakes.scripted_worker import ScriptedWorker, attached
from tests.services.scheduler.conftest import Running, running_scheduler
from tests.services.scheduler.test_worker_link import collect, generate

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@dataclass
class Traced:
    scheduler: Running
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def tree(self) -> list[str]:
        """Spans below each llm_request, by their begin."""
        (request,) = self.named("llm_request")
        below = [
            span
            for span in self.spans
            if span.parent is not None and span.parent.span_id == request.context.span_id
        ]
        return [span.name for span in sorted(below, key=lambda span: span.start_time)]

    async def ended(self, count: int = 1) -> list[ReadableSpan]:
        async with asyncio.timeout(5):
            while len(self.named("llm_request")) < count:
                await asyncio.sleep(0.01)
        return self.named("llm_request")


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    # No trace begins here: a request is traced where its caller says so.
    requests = TracerProvider(ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    steps = TracerProvider(ALWAYS_ON, shutdown_on_exit=False)
    for provider in (requests, steps):
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_scheduler(tmp_path, prefill_chunk_size=4) as scheduler:
        scheduler.loop.watch(Traces(requests.get_tracer("t"), steps.get_tracer("t")))
        yield Traced(scheduler, exporter)


async def play(worker: ScriptedWorker, steps: int) -> None:
    for _ in range(steps):
        await worker.answer(await worker.step())


async def test_a_request_from_arrival_to_end(traced: Traced) -> None:
    async with attached(traced.scheduler.target, max_in_flight=1) as worker:
        call = generate(traced.scheduler, [5] * 7, max_tokens=3, traceparent=SAMPLED)
        first = await worker.step()
        await worker.answer(first)
        await play(worker, 3)
        await collect(call)
        (request,) = await traced.ended()
        assert traced.tree() == ["queue", "prefill", "prefill", "decode"]
        assert f"{request.context.trace_id:032x}" == TRACE
        assert f"{request.parent.span_id:016x}" == PARENT
        assert request.status.status_code is StatusCode.UNSET
        said = request.attributes
        assert said["gen_ai.usage.input_tokens"] == 7
        assert said["gen_ai.usage.output_tokens"] == 3
        assert said["quire.end.reason"] == "length"
        assert (said["quire.first_step"], said["quire.last_step"]) == (1, 4)
        assert said["quire.worker_ms"] == pytest.approx(4 * 0.9)
        assert 0 < said["gen_ai.latency.time_to_first_token"] < said["gen_ai.latency.e2e"]
        assert events(request) == ["first_token"]
        chunks = [span.attributes["quire.tokens"] for span in traced.named("prefill")]
        assert chunks == [4, 3]
        (decode,) = traced.named("decode")
        assert decode.attributes["quire.steps"] == 2
        assert decode.end_time <= request.end_time
        # The worker is told of the request by the scheduler's own span.
        (new,) = first.new_requests
        assert new.traceparent == f"00-{TRACE}-{request.context.span_id:016x}-01"


async def test_steps_that_prefill_link_to_their_requests(traced: Traced) -> None:
    async with attached(traced.scheduler.target, max_in_flight=1) as worker:
        calls = [
            generate(traced.scheduler, [5 + i] * 3, max_tokens=2, traceparent=SAMPLED)
            for i in range(2)
        ]
        steps = [await worker.step()]
        await worker.answer(steps[0])
        async with asyncio.timeout(5):
            while len(traced.named("llm_request")) < 2:
                steps.append(await worker.step())
                await worker.answer(steps[-1])
                await asyncio.sleep(0.02)
        for call in calls:
            await collect(call)
        requests = {span.context.span_id for span in traced.named("llm_request")}
        spans = traced.named("batch_step")
        assert {link.context.span_id for span in spans for link in span.links} == requests
        assert all(span.parent is None for span in spans)
        told = {step.traceparent for step in steps if step.traceparent}
        ids = {f"{s.context.trace_id:032x}-{s.context.span_id:016x}" for s in spans}
        assert {text[3:-3] for text in told} == ids
        prefills = {span.attributes["quire.step.id"] for span in traced.named("prefill")}
        assert {span.attributes["quire.step.id"] for span in spans} == prefills
        assert spans[0].attributes["quire.step.execute_ms"] == 0.9


async def test_one_in_fifty_decode_steps_is_a_span(traced: Traced) -> None:
    async with attached(traced.scheduler.target, max_model_len=256, num_blocks=64) as worker:
        call = generate(traced.scheduler, [5], max_tokens=120, traceparent=SAMPLED)
        await play(worker, 120)
        await collect(call)
        await traced.ended()
        roles = [
            link.attributes["quire.step.role"]
            for span in traced.named("batch_step")
            for link in span.links
        ]
        assert roles == ["prefill", "decode", "decode"]


@pytest.mark.parametrize("traceparent", [UNSAMPLED, ""])
async def test_what_the_caller_does_not_keep_makes_no_span(
    traced: Traced, traceparent: str
) -> None:
    async with attached(traced.scheduler.target) as worker:
        call = generate(traced.scheduler, [5, 6], max_tokens=2, traceparent=traceparent)
        step = await worker.step()
        await worker.answer(step)
        await play(worker, 1)
        await collect(call)
        await traced.scheduler.quiesced()
        assert traced.spans == []
        assert step.traceparent == ""
        assert not is_sampled(step.new_requests[0].traceparent)


async def test_preemption_and_resumption(traced: Traced) -> None:
    """Two that grow into each other: six blocks of four tokens."""
    async with attached(traced.scheduler.target, num_blocks=6, max_in_flight=1) as worker:
        calls = [
            generate(traced.scheduler, [5 + i] * 5, max_tokens=14, traceparent=SAMPLED)
            for i in range(2)
        ]
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(worker.serve())
            for call in calls:
                await collect(call)
            serving.cancel()
        requests = await traced.ended(2)
        assert (await traced.scheduler.loads()).counters.preemptions > 0
        (victim,) = [span for span in requests if "preempted" in events(span)]
        assert "resumed" in events(victim)
        mine = [s for s in traced.spans if s.parent and s.parent.span_id == victim.context.span_id]
        waits = [s.attributes["quire.queue.reason"] for s in mine if s.name == "queue"]
        assert waits == ["arrival", "preemption"]
        assert victim.attributes["quire.preemptions"] == 1


async def test_a_lost_worker(traced: Traced) -> None:
    async with attached(traced.scheduler.target) as worker:
        call = generate(traced.scheduler, [5, 6], max_tokens=3, traceparent=SAMPLED)
        await worker.answer(await worker.step())
        await worker.step()
    async with attached(traced.scheduler.target, worker_id="other", instance_id="2") as worker:
        await play(worker, 2)
        tokens, _ = await collect(call)
        assert len(tokens) == 3
        (request,) = await traced.ended()
        assert events(request)[:2] == ["requeued", "resumed"]
        assert traced.tree()[:3] == ["queue", "prefill", "decode"]
        waits = [span.attributes["quire.queue.reason"] for span in traced.named("queue")]
        assert waits == ["arrival", "loss"]
        assert request.attributes["quire.requeues"] == 1
        assert request.attributes["quire.worker.id"] == "other"


async def test_an_aborted_request_has_its_span(traced: Traced) -> None:
    async with attached(traced.scheduler.target) as worker:
        call = generate(traced.scheduler, [5, 6], traceparent=SAMPLED)
        await worker.answer(await worker.step())
        await anext(aiter(call))
        call.cancel()
        (request,) = await traced.ended()
        assert request.attributes["error.type"] == "abort"
        assert request.status.status_code is StatusCode.UNSET


async def test_one_that_waited_in_vain(traced: Traced) -> None:
    call = generate(
        traced.scheduler,
        [5, 6],
        traceparent=SAMPLED,
        scheduling=generation_pb2.SchedulingOptions(deadline_ms=50),
    )
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        await collect(call)
    (request,) = await traced.ended()
    assert request.attributes["error.type"] == "deadline"
    assert request.status.status_code is StatusCode.ERROR
    assert traced.tree() == ["queue"]


async def test_a_refused_request_has_its_span(traced: Traced) -> None:
    async with attached(traced.scheduler.target) as worker:
        first = generate(traced.scheduler, [5], traceparent=SAMPLED, request_id="same")
        await worker.step()
        with pytest.raises(Exception, match="ALREADY_EXISTS"):
            await collect(generate(traced.scheduler, [5], traceparent=SAMPLED, request_id="same"))
        (refused,) = await traced.ended()
        assert refused.attributes["quire.error.reason"] == "DUPLICATE"
        assert refused.status.status_code is StatusCode.ERROR
        first.cancel()
        await traced.ended(2)


async def test_what_lives_when_the_scheduler_stops_is_ended(traced: Traced) -> None:
    async with attached(traced.scheduler.target) as worker:
        call = generate(traced.scheduler, [5], traceparent=SAMPLED)
        await worker.step()
        traced.scheduler.loop.close()
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await collect(call)
        (request,) = await traced.ended()
        assert request.attributes["error.type"] == "scheduler_stopped"
        (step,) = traced.named("batch_step")
        assert step.attributes["error.type"] == "worker_lost"
