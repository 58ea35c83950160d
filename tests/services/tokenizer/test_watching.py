"""What the tokenizer tells of its requests: the tree of spans, and the counts."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.resources import Resource

from quire.v1 import generation_pb2, text_pb2
from services.chassis.errors import Overloaded, to_status
from services.chassis.metrics import Metrics
from services.chassis.tracing import Tracing, is_sampled
from services.tokenizer.watching import MAX_CONTENT
from tests.assets.tokenizers import byte_ids
from tests.fakes.otlp_receiver import OtlpReceiver, Span, receiving
from tests.services.tokenizer.calls import (
    STOP,
    collect,
    generate,
    ids,
    resume,
    status_of,
    unary,
)
from tests.services.tokenizer.harness import TextService, eventually

RESOURCE = Resource.create({"service.name": "quire-tokenizer", "service.instance.id": "one"})
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{PARENT}-01"


@dataclass
class Watched:
    """The service, and what it has told; `told` ends the telling."""

    running: TextService
    receiver: OtlpReceiver
    tracing: Tracing
    metrics: Metrics

    is_closed: bool = False

    async def told(self) -> OtlpReceiver:
        await self.running.is_empty()
        await asyncio.sleep(0)  # a call's span ends one turn of the loop after the call
        await self.close()
        return self.receiver

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            await asyncio.to_thread(self.tracing.close)
            await asyncio.to_thread(self.metrics.close)

    async def request_span(self) -> Span:
        """The one span of a request."""
        receiver = await self.told()
        (span,) = [span for span in receiver.spans if span.kind == "SERVER"]
        return span

    async def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        """Values of a metric by its labels' values, in the order of their names."""
        metric = self.receiver.metrics.get(("one", name))
        if metric is None:
            return {}
        return {
            tuple(value for _, value in sorted(labels)): value
            for labels, value in metric.points.items()
        }


@pytest.fixture
async def watched(service: Any) -> AsyncIterator[Any]:
    """Gives a context manager, so that a test opens and closes it in one task."""

    @asynccontextmanager
    async def opened(*, ratio: float | None = None, **kwargs: Any) -> AsyncIterator[Watched]:
        async with receiving() as receiver:
            tracing = Tracing(RESOURCE, url=receiver.url, ratio=ratio)
            metrics = Metrics(RESOURCE, prometheus=False, push_to=receiver.url)
            async with service(tracing=tracing, metrics=metrics, **kwargs) as running:
                made = Watched(running, receiver, tracing, metrics)
                try:
                    yield made
                finally:
                    await made.close()

    return opened


async def answered(running: TextService, request: Any, **kwargs: Any) -> list[Any]:
    """A request that gets three tokens and an end."""
    rpc = running.stub.Chat if isinstance(request, text_pb2.ChatRequest) else running.stub.Generate
    call = rpc(request, **kwargs)
    got = await running.scheduler.next_submission()
    got.emit(*ids("alpha", " beta"))
    got.end(*ids(" beta"), completion=3, cached=1)
    return await collect(call)


async def test_a_completion_is_one_span_with_two_children(watched: Any) -> None:
    async with watched() as w:
        request = generate(
            "Hi",
            request_id="r1",
            stop_strings=["end"],
            stopping=generation_pb2.StoppingCriteria(max_tokens=9),
            sampling=generation_pb2.SamplingParams(temperature=0.5, top_p=0.25, top_k=3, seed=8),
        )
        await answered(w.running, request, metadata=(("traceparent", CALLER),))
        receiver = await w.told()
        assert receiver.tree(TRACE).splitlines() == [
            f"(parent {PARENT} is elsewhere)",
            "  quire-tokenizer SERVER text_completion tiny",
            "    quire-tokenizer INTERNAL tokenize",
            "    quire-tokenizer INTERNAL detokenize",
        ]
        span, tokenize, detokenize = receiver.of_trace(TRACE)
        said = dict(span.attributes)
        assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 60
        assert said.pop("quire.scheduler") == w.running.scheduler.address
        assert said == {
            "rpc.system.name": "grpc",
            "rpc.method": "quire.v1.TextService/Generate",
            "rpc.response.status_code": "OK",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.request.id": "r1",
            "gen_ai.response.id": "r1",
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.25,
            "gen_ai.request.top_k": 3,
            "gen_ai.request.seed": 8,
            "gen_ai.request.stop_sequences": ("end",),
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 1,
        }
        assert span.status == "UNSET"
        assert dict(tokenize.attributes) == {"quire.chars": 2, "quire.tokens": 2}
        assert detokenize.attributes["quire.tokens"] == 3
        busy_ns = detokenize.attributes["quire.busy_time"] * 1e9
        assert 0 < busy_ns <= detokenize.end_ns - detokenize.start_ns + 1_000
        assert span.start_ns <= tokenize.start_ns <= tokenize.end_ns <= detokenize.start_ns
        assert detokenize.end_ns <= span.end_ns


async def test_a_conversation_is_rendered_then_tokenized(watched: Any) -> None:
    async with watched() as w:
        message = text_pb2.ChatMessage(role="user", content="Hi")
        await answered(w.running, text_pb2.ChatRequest(messages=[message], output=unary()))
        receiver = await w.told()
        (trace_id,) = receiver.trace_ids
        assert receiver.tree(trace_id, lambda span: span.name).splitlines() == [
            "chat tiny",
            "  render_chat",
            "  tokenize",
            "  detokenize",
        ]
        (render,), (tokenize,) = receiver.named("render_chat"), receiver.named("tokenize")
        assert render.end_ns == tokenize.start_ns
        assert render.attributes["quire.messages"] == 1
        assert render.attributes["quire.chars"] == tokenize.attributes["quire.chars"] > 2
        (span,) = receiver.named("chat tiny")
        assert span.attributes["gen_ai.request.stream"] is False
        # Nobody asked for what was said.
        assert not any("messages" in name and "gen_ai" in name for name in span.attributes)


async def test_the_scheduler_is_given_the_span_and_not_the_caller_s(watched: Any) -> None:
    async with watched() as w:
        for flags in ("01", "00"):
            caller = f"{CALLER[:-2]}{flags}"
            call = w.running.stub.Generate(generate(), metadata=(("traceparent", caller),))
            got = await w.running.scheduler.next_submission()
            _, trace_id, span_id, kept = got.request.traceparent.split("-")
            assert (trace_id, kept) == (TRACE, flags)
            assert span_id not in (PARENT, "0" * 16)
            got.end(*ids("alpha"))
            await collect(call)
            if flags == "01":
                own = span_id
        span = await w.request_span()
        assert (span.span_id, span.parent_id) == (own, PARENT)


async def test_a_trace_begins_here_where_none_came(watched: Any) -> None:
    async with watched() as w:
        call = w.running.stub.Generate(generate())
        got = await w.running.scheduler.next_submission()
        got.end(*ids("alpha"))
        await collect(call)
        span = await w.request_span()
        assert span.parent_id == ""
        assert got.request.traceparent.startswith(f"00-{span.trace_id}-{span.span_id}-")
        assert is_sampled(got.request.traceparent)


async def test_with_metrics_alone_the_caller_s_trace_passes_through(service: Any) -> None:
    metrics = Metrics(RESOURCE, prometheus=True, push_to=None)
    async with service(metrics=metrics) as running:
        call = running.stub.Generate(generate(), metadata=(("traceparent", CALLER),))
        got = await running.scheduler.next_submission()
        assert got.request.traceparent == CALLER
        got.end(*ids("alpha"))
        await collect(call)
    await asyncio.to_thread(metrics.close)


async def test_prompts_and_answers_are_told_only_when_asked_for(watched: Any) -> None:
    async with watched(content=True) as w:
        await answered(w.running, generate("Hi"))
        span = await w.request_span()
        assert json.loads(span.attributes["gen_ai.input.messages"]) == [
            {"role": "user", "parts": [{"type": "text", "content": "Hi"}]}
        ]
        assert json.loads(span.attributes["gen_ai.output.messages"]) == [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "alpha beta beta"}],
                "finish_reason": "length",
            }
        ]


async def test_what_is_told_of_a_long_conversation_is_bounded(watched: Any) -> None:
    async with watched(content=True) as w:
        long = text_pb2.ChatMessage(role="user", content="x" * 3 * MAX_CONTENT)
        await status_of(w.running.stub.Chat(text_pb2.ChatRequest(messages=[long, long])))
        span = await w.request_span()
        (only,) = json.loads(span.attributes["gen_ai.input.messages"])
        assert len(only["parts"][0]["content"]) == MAX_CONTENT + 2
        assert span.status == "ERROR"


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (generate(""), "INVALID_ARGUMENT", {"quire.error.field": "prompt"}),
        (generate(model="huge"), "NOT_FOUND", {"gen_ai.request.model": "huge"}),
        (generate(model="m" * 300), "NOT_FOUND", {"gen_ai.request.model": "m" * 128 + " …"}),
        (
            text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="x" * 300)]),
            "INVALID_ARGUMENT",
            {"quire.error.field": "messages"},
        ),
    ],
)
async def test_a_refused_request_has_its_span(
    watched: Any, request_: Any, status: str, said: dict[str, str]
) -> None:
    async with watched() as w:
        chat = isinstance(request_, text_pb2.ChatRequest)
        await status_of((w.running.stub.Chat if chat else w.running.stub.Generate)(request_))
        span = await w.request_span()
        assert span.name == ("chat tiny" if chat else "text_completion tiny")
        assert (span.status, span.status_message) == ("ERROR", status)
        assert span.attributes["error.type"] == status
        assert said.items() <= span.attributes.items()


async def test_the_scheduler_s_refusal_tells_its_reason(watched: Any) -> None:
    async with watched() as w:
        call = w.running.stub.Generate(generate())
        got = await w.running.scheduler.next_submission()
        error = to_status(Overloaded("full", reason="QUEUE_REQUESTS"))
        got.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", *error.details)
        await status_of(call)
        span = await w.request_span()
        assert span.attributes["quire.error.reason"] == "QUEUE_REQUESTS"
        assert span.attributes["error.type"] == "RESOURCE_EXHAUSTED"
        assert await w.points("quire.tokenizer.failures") == {("QUEUE_REQUESTS",): 1}


async def test_a_draining_tokenizer_s_refusal_has_its_span(watched: Any) -> None:
    async with watched() as w:
        w.running.servicer.refuse_new()
        await status_of(w.running.stub.Generate(generate()))
        span = await w.request_span()
        assert span.name == "text_completion tiny"
        assert span.attributes["quire.error.reason"] == "DRAINING"


async def test_one_out_of_time_is_an_error(watched: Any) -> None:
    async with watched() as w:
        request = generate(scheduling=generation_pb2.SchedulingOptions(deadline_ms=500))
        call = w.running.stub.Generate(request)
        got = await w.running.scheduler.next_submission()
        got.emit(*ids("alpha"))
        assert (await call.read()).text == "alpha"
        await status_of(call)
        span = await w.request_span()
        assert span.attributes["error.type"] == "DEADLINE_EXCEEDED"
        assert span.attributes["gen_ai.usage.output_tokens"] == 1
        assert [child.name for child in w.receiver.of_trace(span.trace_id)][-1] == "detokenize"


async def test_early_closes_end_their_spans_and_log_no_error(
    watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with watched() as w:
        for _ in range(10):
            call = w.running.stub.Generate(generate())
            got = await w.running.scheduler.next_submission()
            got.emit(*ids("alpha"))
            await call.read()
            call.cancel()
            await w.running.is_empty()
        receiver = await w.told()
        spans = receiver.named("text_completion tiny")
        assert len(spans) == len(receiver.named("detokenize")) == 10
        assert {span.status for span in spans} == {"UNSET"}
        assert {span.attributes["rpc.response.status_code"] for span in spans} == {"CANCELLED"}
        assert all(span.attributes["gen_ai.usage.output_tokens"] == 1 for span in spans)
        assert caplog.records == []
        points = await w.points("gen_ai.server.request.duration")
        assert points["CANCELLED", "text_completion", "tiny"][0] == 10


async def test_a_slow_receiver_holds_up_no_request(watched: Any) -> None:
    async with watched() as w:
        w.receiver.hold.clear()
        for _ in range(20):
            assert await answered(w.running, generate("Hi"))
        assert w.receiver.spans == []
        w.receiver.hold.set()
        receiver = await w.told()
        assert len(receiver.named("text_completion tiny")) == 20


async def test_a_resubmission_is_an_event(watched: Any) -> None:
    async with watched() as w:
        call = w.running.stub.Generate(generate())
        got = await w.running.scheduler.next_submission()
        got.emit(*ids("alpha"))
        await call.read()
        await w.running.scheduler.die()
        await w.running.scheduler.start()
        again = await w.running.scheduler.next_submission()
        assert again.request.traceparent == got.request.traceparent
        again.end(*ids(" beta"), completion=2)
        await collect(call)
        span = await w.request_span()
        (event,) = span.events
        assert (event.name, dict(event.attributes)) == (
            "resubmitted",
            {
                "quire.scheduler": w.running.scheduler.address,
                "quire.attempt": 1,
                "quire.tokens": 1,
                "quire.reason": "lost",
            },
        )
        assert await w.points("quire.tokenizer.session_restarts") == {
            (w.running.scheduler.address,): 1
        }


async def test_a_resumed_answer_counts_its_own_tokens(watched: Any) -> None:
    async with watched() as w:
        call = w.running.stub.Generate(generate(resume=resume(*ids("alpha", " beta")), attempt=1))
        got = await w.running.scheduler.next_submission()
        got.end(*ids(" beta"), completion=3)
        await collect(call)
        span = await w.request_span()
        assert span.attributes["quire.resumed_tokens"] == 2
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
        assert await w.points("quire.tokenizer.output_tokens") == {(): 1}
        (count, _), *_ = (await w.points("gen_ai.server.time_to_first_token")).values()
        assert count == 1


async def test_a_seed_too_large_for_the_wire_costs_no_span(watched: Any) -> None:
    async with watched() as w:
        sampling = generation_pb2.SamplingParams(seed=2**64 - 1)
        await answered(w.running, generate(sampling=sampling))
        span = await w.request_span()
        assert "gen_ai.request.seed" not in span.attributes


async def test_requests_are_counted_as_their_callers_see_them(watched: Any) -> None:
    async with watched() as w:
        await answered(w.running, generate("Hi"))
        message = text_pb2.ChatMessage(role="user", content="Hi")
        await answered(w.running, text_pb2.ChatRequest(messages=[message], output=unary()))
        await status_of(w.running.stub.Generate(generate(model="huge")))
        call = w.running.stub.Generate(generate("Hi", stop_strings=["beta"]))
        got = await w.running.scheduler.next_submission()
        got.emit(*ids("alpha", " beta"))
        await w.running.scheduler.until(lambda: bool(got.session.finishes))
        got.end(reason=STOP, completion=2)
        await collect(call)
        await w.told()
        done = await w.points("gen_ai.server.request.duration")
        assert {labels: count for labels, (count, _) in done.items()} == {
            ("", "text_completion", "tiny"): 2,
            ("", "chat", "tiny"): 1,
            ("NOT_FOUND", "text_completion", "tiny"): 1,
        }
        first = await w.points("gen_ai.server.time_to_first_token")
        assert {labels: count for labels, (count, _) in first.items()} == {
            ("text_completion", "tiny"): 2,
            ("chat", "tiny"): 1,
        }
        between = await w.points("gen_ai.server.time_per_output_token")
        assert sum(count for count, _ in between.values()) == 3
        (prompts,) = (await w.points("quire.tokenizer.prompt_tokens")).values()
        assert prompts > 3 * 2  # twice "Hi", and once with a template around it
        assert await w.points("quire.tokenizer.output_tokens") == {(): 8}
        assert await w.points("quire.tokenizer.cached_tokens") == {(): 2}
        assert await w.points("quire.tokenizer.failures") == {("MODEL_NOT_FOUND",): 1}
        calls = await w.points("quire.tokenizer.encoding_time")
        assert {labels: count for labels, (count, _) in calls.items()} == {
            ("encode",): 2,
            ("render",): 1,
        }


async def test_what_is_live_is_read_from_the_loop(watched: Any) -> None:
    async with watched() as w:
        call = w.running.stub.Generate(generate())
        await w.running.scheduler.next_submission()
        await eventually(lambda: w.running.servicer.live_calls == 1)
        await w.close()
        where = w.running.scheduler.address
        assert await w.points("quire.tokenizer.calls") == {(): 1}
        assert await w.points("quire.tokenizer.requests") == {
            (where, "unsent"): 0,
            (where, "submitted"): 1,
        }
        assert await w.points("quire.tokenizer.session") == {
            (where, "none"): 0,
            (where, "open"): 0,
            (where, "serving"): 1,
        }
        call.cancel()
        await w.running.is_empty()


async def test_the_number_of_series_does_not_grow_with_requests(watched: Any) -> None:
    async with watched() as w:

        async def ask(number: int) -> None:
            scheduling = generation_pb2.SchedulingOptions(tenant=f"t{number}")
            kind = number % 3
            request = generate(
                f"{number}", request_id=f"r{number}", scheduling=scheduling, output=unary()
            )
            if kind == 1:
                request.model = f"model-{number}"
            if kind == 2:
                request.stopping.stop_token_ids.append(10_000 + number)
            call = w.running.stub.Generate(request)
            if kind:
                await status_of(call)
            else:
                got = await w.running.scheduler.next_submission()
                got.end(*byte_ids(b"x"), completion=1)
                await collect(call)

        def series() -> int:
            points = [len(metric.metric().data.data_points) for metric in w.metrics._histograms]
            return sum(points) + len(failures)

        failures = w.running.servicer._watchers.metrics._failures
        for number in range(100):
            await ask(number)
        before = series()
        for number in range(100, 1_000):
            await ask(number)
        assert series() == before
        await w.told()
        assert sum((await w.points("quire.tokenizer.failures")).values()) == 666
