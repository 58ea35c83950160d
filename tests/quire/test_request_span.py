"""Each answer of the client is a span of the application's provider, if it has one."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire import AsyncClient, SamplingParams
from quire.errors import InvalidRequest, QuireError
from tests.fakes.text_service import FakeTextService, full, serving, words

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Application:
    """A provider, and a client whose tracer is of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("app")
        # A process has one provider for good; this one is the test's alone.
        monkeypatch.setattr("quire.client.make_tracer", lambda: provider.get_tracer("quire"))

    @property
    def span(self) -> ReadableSpan:
        (span,) = [s for s in self.exporter.get_finished_spans() if s.kind is SpanKind.CLIENT]
        return span


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Application:
    return Application(monkeypatch)


def hexed(number: int, digits: int) -> str:
    return f"{number:0{digits}x}"


def sent(service: FakeTextService, call: int = 0) -> tuple[str, str]:
    """Trace and span that a call carried."""
    _, trace_id, span_id, _ = service.metadata[call]["traceparent"].split("-")
    return trace_id, span_id


def own(span: ReadableSpan) -> tuple[str, str]:
    return hexed(span.context.trace_id, 32), hexed(span.context.span_id, 16)


async def test_an_answer_is_one_span_below_the_current_one(application: Application) -> None:
    service = FakeTextService()
    params = SamplingParams(temperature=0.5, top_p=0.25, top_k=3, seed=7, max_tokens=9)
    async with serving(service) as target, AsyncClient(target) as client:
        with application.tracer.start_as_current_span("outer") as outer:
            answer = await client.complete("Hi", params, request_id="r1")
    span = application.span
    assert span.parent.span_id == outer.get_span_context().span_id
    assert sent(service) == own(span)
    assert answer.trace_id == own(span)[0]
    said = dict(span.attributes)
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 60
    host, port = target.split(":")
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.id": "r1",
        "gen_ai.response.id": "r1",
        "server.address": host,
        "server.port": int(port),
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }
    assert (span.name, span.status.status_code) == ("text_completion", StatusCode.UNSET)


async def test_the_given_context_counts_before_the_current_span(application: Application) -> None:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        with application.tracer.start_as_current_span("outer"):
            await client.complete_chat([{"role": "user", "content": "Hi"}], traceparent=GIVEN)
    span = application.span
    assert (hexed(span.context.trace_id, 32), hexed(span.parent.span_id, 16)) == tuple(
        GIVEN.split("-")[1:3]
    )
    assert span.name == "chat"


async def test_the_state_of_the_trace_goes_along(application: Application) -> None:
    service = FakeTextService()
    carrier = {"traceparent": GIVEN, "tracestate": "vendor=1"}
    parent = TraceContextTextMapPropagator().extract(carrier)
    async with serving(service) as target, AsyncClient(target) as client:
        with trace.use_span(trace.get_current_span(parent)):
            await client.complete("Hi")
    assert service.metadata[0]["tracestate"] == "vendor=1"


async def test_a_resumed_answer_is_one_span_with_an_event(application: Application) -> None:
    service = FakeTextService(cuts=[2])
    async with serving(service) as target, AsyncClient(target) as client:
        assert (await client.complete("Hi")).text == "".join(words(5))
    span = application.span
    (event,) = span.events
    assert event.name == "resumed"
    assert event.attributes["quire.reason"] == "Unavailable"
    assert (event.attributes["quire.tokens"], event.attributes["quire.attempt"]) == (2, 1)
    assert sent(service, 0) == sent(service, 1) == own(span)
    assert span.status.status_code is StatusCode.UNSET


async def test_a_refusal_is_an_error_of_the_span(application: Application) -> None:
    service = FakeTextService(refusal=full())
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(QuireError):
            await client.complete("Hi")
    span = application.span
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "queue is full")
    assert span.attributes["error.type"] == "Overloaded"
    assert span.attributes["quire.error.reason"] == "QUEUE_REQUESTS"


async def test_who_stops_reading_ends_the_span_and_leaves_no_current_one(
    application: Application, caplog: pytest.LogCaptureFixture
) -> None:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        for _ in range(10):
            answer = client.generate("Hi")
            await anext(answer)
            assert not trace.get_current_span().get_span_context().is_valid
            await answer.aclose()
    spans = application.exporter.get_finished_spans()
    assert len(spans) == 10
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert {span.attributes["quire.left_early"] for span in spans} == {True}
    assert caplog.records == []


async def test_a_request_that_is_wrong_begins_no_span(application: Application) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest):
            client.generate("Hi", request_id="x" * 200)
    assert application.exporter.get_finished_spans() == ()


async def test_a_seed_too_large_for_the_wire_is_left_out(application: Application) -> None:
    async with serving(FakeTextService()) as target, AsyncClient(target) as client:
        await client.complete("Hi", SamplingParams(seed=2**64 - 1))
    assert "gen_ai.request.seed" not in application.span.attributes


@pytest.fixture
async def bare() -> AsyncIterator[Any]:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        yield service, client


async def test_without_a_provider_a_trace_that_is_there_passes_through(bare: Any) -> None:
    service, client = bare
    plain = await client.complete("Hi")
    parent = TraceContextTextMapPropagator().extract({"traceparent": GIVEN})
    with trace.use_span(trace.get_current_span(parent)):
        inside = await client.complete("Hi")
    given = await client.complete("Hi", traceparent=GIVEN)
    assert "traceparent" not in service.metadata[0]
    assert [metadata["traceparent"] for metadata in service.metadata[1:]] == [GIVEN, GIVEN]
    assert (plain.trace_id, inside.trace_id) == ("", GIVEN.split("-")[1])
    assert given.trace_id == inside.trace_id


THREADS = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire import LLM
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with LLM(target=sys.argv[1]) as llm:
    trace.set_tracer_provider(provider)
    with trace.get_tracer("app").start_as_current_span("outer"):
        llm.generate(["a", "b"])
spans = exporter.get_finished_spans()
outer = next(span for span in spans if span.name == "outer")
inner = [span for span in spans if span.name != "outer"]
print(json.dumps([span.parent.span_id == outer.context.span_id for span in inner]))
"""


async def test_a_batch_of_the_blocking_client_is_below_its_caller_s_span() -> None:
    async with serving(FakeTextService()) as target:
        command = [sys.executable, "-c", THREADS, target]
        ended = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True
        )
    assert json.loads(ended.stdout) == [True, True]
