"""What an exporter gets of steps and requests that went over a real link."""

import contextlib
import itertools
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from services.chassis.tracing import context_of
from services.worker.observer import AttachmentObserver
from services.worker.spans import AttachmentSpans
from tests.fakes.scheduler_link import FakeScheduler, new_request, step
from tests.services.worker.sum_worker import LIMITS, Worker, attached, eventually, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
REQUEST = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER = f"00-{TRACE}-b7ad6b7169203332-01"
STEP = "00-1af7651916cd43dd8448eb211c80319d-c7ad6b7169203331-01"


@dataclass
class Traces:
    """Where the spans of a worker under test arrive."""

    exporter: InMemorySpanExporter
    provider: TracerProvider

    def observe(self, attachment):
        tracer = self.provider.get_tracer("test")
        spans = AttachmentSpans(tracer, "w-0", attachment)
        return AttachmentObserver(attachment, metrics=None, spans=spans)

    def named(self, name):
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    @property
    def requests(self):
        return self.named("worker_request")

    @property
    def steps(self):
        return self.named("worker_step")


@pytest.fixture
def traces():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(exporter, provider)


async def play(link, *steps):
    """Sends steps one by one and waits for each result."""
    for one in steps:
        await link.send(one)
        await link.result()


def says(span, **values):
    """Asserts some attributes, `_` for the dots of their names."""
    found = {name.replace(".", "_"): value for name, value in span.attributes.items()}
    assert {name: found.get(name) for name in values} == values


def parent_of(span):
    return (span.context.trace_id, span.parent.span_id, span.parent.is_remote)


def named_by(traceparent):
    context = context_of(traceparent)
    return (context.trace_id, context.span_id, True)


async def test_the_stay_of_a_request_is_one_span_from_its_first_step_to_its_release(
    address, traces
):
    async with attached(address, observe=traces.observe) as (_, _, link):
        await play(
            link,
            step(step_id=1),
            step(
                step_id=2, new=[new_request(3, [1] * 6, traceparent=REQUEST)], rows=[(3, 4, [1, 2])]
            ),
            step(step_id=3, rows=[(3, 2, [])]),
            step(step_id=4, rows=[(3, 1, [])]),
            step(step_id=5, rows=[(3, 1, [])]),
        )
        assert traces.requests == []
        await play(link, step(step_id=6, released=[3]))
        (span,) = traces.requests
    assert parent_of(span) == named_by(REQUEST)
    says(
        span,
        quire_worker_id="w-0",
        quire_worker_end="released",
        quire_steps=4,
        quire_first_step=2,
        quire_last_step=5,
        quire_prefill_tokens=6,
        quire_decode_tokens=2,
    )
    assert span.status.status_code is StatusCode.UNSET
    assert span.end_time - span.start_time >= 1e6 * span.attributes["quire.worker_ms"] > 0
    assert traces.steps == []


async def test_tokens_computed_again_count_as_prefill_and_cached_ones_do_not(address, traces):
    back = new_request(0, [1] * 9, prompt_len=4, num_computed=4, traceparent=REQUEST)
    async with attached(address, observe=traces.observe) as (_, _, link):
        await play(
            link,
            step(step_id=1, new=[back], rows=[(0, 5, [1, 2, 3])]),
            step(step_id=2, rows=[(0, 1, [])]),
            step(step_id=3, released=[0]),
        )
        says(traces.requests[0], quire_prefill_tokens=5, quire_decode_tokens=1)


async def test_a_traced_step_is_a_span_and_its_time_is_shared_by_tokens(address, traces):
    both = [
        new_request(0, [1, 2, 3], traceparent=REQUEST),
        new_request(1, [4], traceparent=OTHER),
    ]
    async with attached(address, observe=traces.observe) as (worker, _, link):
        await eventually(lambda: worker.executors)
        worker.executors[0].gate.clear()
        await link.send(
            step(step_id=1, new=both, rows=[(0, 3, [1]), (1, 1, [2])], traceparent=STEP)
        )
        await eventually(lambda: worker.executors[0].started == [1])
        worker.executors[0].gate.set()
        await link.result()
        await play(link, step(step_id=2, released=[0, 1]))
        (span,) = traces.steps
        shares = [one.attributes["quire.worker_ms"] for one in traces.requests]
    assert parent_of(span) == named_by(STEP)
    says(
        span,
        quire_worker_id="w-0",
        quire_step_id=1,
        quire_step_num_seqs=2,
        quire_step_prefill_tokens=4,
        quire_step_decode_tokens=0,
    )
    execute_ms = span.attributes["quire.step.execute_ms"]
    took_ms = span.attributes["quire.step.wait_ms"] + execute_ms
    assert (span.end_time - span.start_time) / 1e6 == pytest.approx(took_ms)
    assert span.attributes["quire.step.idle_ms"] >= 0
    # Thousandths of a millisecond, and whole nanoseconds, are rounded.
    assert shares == pytest.approx([execute_ms * 3 / 4, execute_ms / 4], abs=0.001)
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("context", ["", REQUEST[:-2] + "00", "00-x", REQUEST.upper()])
async def test_what_is_not_sampled_has_no_spans(address, traces, context):
    async with attached(address, observe=traces.observe) as (_, _, link):
        await play(
            link,
            step(
                step_id=1,
                new=[new_request(0, [1], traceparent=context)],
                rows=[(0, 1, [1])],
                traceparent=context,
            ),
            step(step_id=2, released=[0], traceparent=context),
        )
    assert traces.exporter.get_finished_spans() == ()


async def test_a_slot_that_is_used_again_begins_anew(address, traces):
    async with attached(address, observe=traces.observe) as (_, _, link):
        await play(
            link,
            step(step_id=1, new=[new_request(0, [1, 2], traceparent=REQUEST)], rows=[(0, 2, [1])]),
            step(step_id=2, rows=[(0, 1, [])]),
            step(
                step_id=3,
                released=[0],
                new=[new_request(0, [5, 6, 7], traceparent=OTHER)],
                rows=[(0, 3, [1])],
                traceparent=STEP,
            ),
            step(step_id=4, released=[0], new=[new_request(0, [5])], rows=[(0, 1, [1])]),
            step(step_id=5, released=[0]),
        )
        first, second = traces.requests
        (only_step,) = traces.steps
    its_ms = only_step.attributes["quire.step.execute_ms"]
    assert second.attributes["quire.worker_ms"] == pytest.approx(its_ms, abs=0.001)
    says(first, quire_steps=2, quire_prefill_tokens=2, quire_decode_tokens=1, quire_first_step=1)
    says(second, quire_steps=1, quire_prefill_tokens=3, quire_decode_tokens=0, quire_first_step=3)
    assert [parent_of(first), parent_of(second)] == [named_by(REQUEST), named_by(OTHER)]
    assert first.end_time <= second.end_time


async def test_a_lost_link_ends_the_spans_of_requests_and_of_steps_without_an_answer(
    address, traces
):
    async with attached(address, observe=traces.observe) as (worker, scheduler, link):
        await play(
            link,
            step(step_id=1, new=[new_request(0, [1, 2], traceparent=REQUEST)], rows=[(0, 2, [1])]),
        )
        worker.executors[0].gate.clear()
        await link.send(
            step(
                step_id=2,
                new=[new_request(1, [3], traceparent=OTHER)],
                rows=[(0, 1, []), (1, 1, [2])],
                traceparent=STEP,
            )
        )
        await eventually(lambda: worker.executors[0].started == [1, 2])
        await link.close()
        await scheduler.next_link()
        (of_step,) = traces.steps
        first, second = traces.requests
    for span in (of_step, first, second):
        assert span.status.status_code is StatusCode.ERROR
        says(span, error_type="link_lost")
    says(first, quire_worker_end="link_lost", quire_steps=1, quire_prefill_tokens=2)
    says(second, quire_worker_end="link_lost", quire_steps=0, quire_first_step=2)
    says(of_step, quire_step_id=2, quire_step_num_seqs=2)


async def test_an_orderly_end_of_the_link_is_no_error(address, traces):
    async with attached(address, observe=traces.observe) as (_, scheduler, link):
        await play(
            link,
            step(step_id=1, new=[new_request(0, [1], traceparent=REQUEST)], rows=[(0, 1, [1])]),
        )
        await link.bye("moving")
        again = await scheduler.next_link()
        await again.accept(epoch=2)
        await play(
            again,
            step(
                epoch=2,
                step_id=1,
                new=[new_request(0, [1], traceparent=OTHER)],
                rows=[(0, 1, [1])],
            ),
        )
    left, stopped = traces.requests
    says(left, quire_worker_end="scheduler_left", error_type=None)
    says(stopped, quire_worker_end="worker_stopped", error_type=None)
    assert {span.status.status_code for span in traces.requests} == {StatusCode.UNSET}


async def test_a_step_that_fails_is_an_error_of_the_step_and_of_its_requests(address, traces):
    async with attached(address, observe=traces.observe) as (worker, scheduler, link):
        await eventually(lambda: worker.executors)
        worker.executors[0].fails[1] = RuntimeError("no kernel for this")
        await link.send(
            step(
                step_id=1,
                new=[new_request(0, [1], traceparent=REQUEST)],
                rows=[(0, 1, [1])],
                traceparent=STEP,
            )
        )
        await scheduler.next_link()
        (of_step,) = traces.steps
        (request,) = traces.requests
    says(of_step, error_type="RuntimeError")
    says(request, error_type="link_broken", quire_worker_end="link_broken", quire_steps=0)
    for span in (of_step, request):
        assert span.status.status_code is StatusCode.ERROR
        assert "kernel" not in str(span.to_json())


async def test_a_step_that_breaks_the_contract_is_an_error_and_the_next_attachment_works(
    address, traces
):
    async with attached(address, observe=traces.observe) as (_, scheduler, link):
        await link.send(
            step(
                step_id=1,
                released=[2**32 - 1],
                new=[new_request(2**32 - 1, [1], traceparent=REQUEST)],
                rows=[(2**32 - 1, 1, [1])],
                traceparent=STEP,
            )
        )
        again = await scheduler.next_link()
        says(traces.steps[0], error_type="LinkProtocolError")
        assert traces.requests == []
        await again.accept(epoch=2)
        await play(
            again,
            step(
                epoch=2,
                step_id=1,
                new=[new_request(0, [1], traceparent=OTHER)],
                rows=[(0, 1, [1])],
            ),
            step(epoch=2, step_id=2, released=[0]),
        )
        says(traces.requests[0], quire_worker_end="released")


async def test_a_request_that_cannot_be_computed_is_an_error_without_its_tokens(address, traces):
    bad = new_request(0, [12345], traceparent=REQUEST)
    good = new_request(1, [1, 2], traceparent=OTHER)
    async with attached(address, observe=traces.observe) as (_, _, link):
        await play(
            link,
            step(step_id=1, new=[bad, good], rows=[(0, 1, [1]), (1, 2, [2])], traceparent=STEP),
            step(step_id=2, released=[0, 1]),
        )
        failed, fine = traces.requests
    says(failed, error_type="bad_request", quire_prefill_tokens=0, quire_worker_end="released")
    assert failed.status.status_code is StatusCode.ERROR
    assert fine.status.status_code is StatusCode.UNSET
    says(fine, quire_prefill_tokens=2)
    says(traces.steps[0], quire_step_num_seqs=2, quire_step_prefill_tokens=2)
    assert "12345" not in "".join(str(span.to_json()) for span in traces.requests + traces.steps)


async def test_a_refused_attachment_leaves_no_spans(address, traces):
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address, observe=traces.observe, register_timeout_s=0.05)
        async with running(worker):
            await scheduler.next_link()
            await scheduler.next_link()
    assert traces.exporter.get_finished_spans() == ()


async def test_no_more_stays_are_kept_than_there_are_slots(address, traces):
    """Requests without end on few slots: what is kept is bounded by the slots."""
    slots = itertools.cycle(range(LIMITS.max_num_seqs))
    observers = []

    def observe(attachment):
        observers.append(traces.observe(attachment))
        return observers[0]

    async with contextlib.AsyncExitStack() as stack:
        _, _, link = await stack.enter_async_context(attached(address, observe=observe))
        for number, slot in zip(range(1, 31), slots, strict=False):
            used = number > LIMITS.max_num_seqs
            await play(
                link,
                step(
                    step_id=number,
                    released=[slot] if used else [],
                    new=[new_request(slot, [1], traceparent=REQUEST)],
                    rows=[(slot, 1, [slot])],
                ),
            )
        assert len(observers[0]._spans._stays) == LIMITS.max_num_seqs
    assert len(traces.requests) == 30
