"""Each call has a span and a duration with its true status, however it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from services.chassis.channel import open_channel
from services.chassis.errors import NotFound
from services.chassis.metrics import Metrics
from services.chassis.rpc_telemetry import RpcTelemetry, status_of_call
from services.chassis.server import GrpcServer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


class Service:
    """Ends its calls as the request says, at once or after a first message."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.ended: list[str] = []
        self.says_late = False

    async def end(self, how: bytes, context: Any) -> None:
        context.add_done_callback(self.over)
        match how:
            case b"refuse":
                raise NotFound("no such thing", reason="NO_SUCH_THING")
            case b"crash":
                raise ZeroDivisionError
            case b"abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
            case b"wait":
                self.waits.set()
                await asyncio.Event().wait()

    def over(self, context: Any) -> None:
        self.ended.append(status_of_call(context))
        if self.says_late:
            trace.get_current_span().set_attribute("late", True)

    async def unary(self, how: bytes, context: Any) -> bytes:
        await self.end(how, context)
        trace.get_current_span().set_attribute("own", "word")
        return b"last"

    async def stream(self, how: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self.end(how, context)
        while how == b"flood":
            self.waits.set()
            yield bytes(1_000_000)
        yield b"last"

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


class Stand:
    """The service, observed; and a channel to it."""

    def __init__(self, service: Service, exporter: InMemorySpanExporter, metrics: Metrics) -> None:
        self.service = service
        self.exporter = exporter
        self.metrics = metrics
        self.channel: grpc.aio.Channel

    async def spans(self, count: int) -> list[ReadableSpan]:
        async with asyncio.timeout(20):
            while len(self.exporter.get_finished_spans()) < count:
                await asyncio.sleep(0.005)
        return list(self.exporter.get_finished_spans())

    async def span(self) -> ReadableSpan:
        (span,) = await self.spans(1)
        return span


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    service, exporter = Service(), InMemorySpanExporter()
    provider = TracerProvider(ParentBased(TraceIdRatioBased(1.0)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = Metrics(Resource.create({}), prometheus=True, push_to=None)
    server = GrpcServer(
        ["test.Service"], observers=[RpcTelemetry(provider.get_tracer("test"), metrics)]
    )
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(service.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(service.stream),
        "Watch": grpc.unary_stream_rpc_method_handler(service.stream),
        "Session": grpc.stream_stream_rpc_method_handler(service.both),
    }
    server.grpc.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", methods),)
    )
    (address,) = await server.start(["127.0.0.1:0"])
    made = Stand(service, exporter, metrics)
    async with open_channel(address) as channel:
        made.channel = channel
        yield made
    await server.stop(0)
    await asyncio.to_thread(metrics.close)


def call(stand: Stand, kind: str, how: bytes, **kwargs: Any) -> Any:
    shape = stand.channel.unary_unary if kind == "Unary" else stand.channel.unary_stream
    return shape(f"/test.Service/{kind}")(how, **kwargs)


async def read(kind: str, made: Any) -> None:
    if kind == "Unary":
        await made
    else:
        async for _ in made:
            pass


KINDS = pytest.mark.parametrize("kind", ["Unary", "Stream"])


@KINDS
@pytest.mark.parametrize(
    ("how", "status"),
    [(b"refuse", "NOT_FOUND"), (b"crash", "INTERNAL"), (b"abort", "DATA_LOSS")],
)
async def test_an_error_is_one(stand: Stand, kind: str, how: bytes, status: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read(kind, call(stand, kind, how))
    span = await stand.span()
    assert span.name == f"test.Service/{kind}"
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, status)
    assert span.attributes["rpc.response.status_code"] == status
    assert span.attributes["error.type"] == status
    assert span.attributes.get("quire.error.reason") == (
        "NO_SUCH_THING" if how == b"refuse" else None
    )
    assert stand.service.ended == [status]


async def test_the_log_of_a_crash_names_its_trace(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call(stand, "Unary", b"crash")
    span = await stand.span()
    (record,) = caplog.records
    assert record.fields == {"trace_id": f"{span.context.trace_id:032x}"}


@KINDS
async def test_a_good_call_is_none(stand: Stand, kind: str) -> None:
    await read(kind, call(stand, kind, b"good"))
    span = await stand.span()
    assert span.status.status_code is trace.StatusCode.UNSET
    assert span.attributes["rpc.response.status_code"] == "OK"
    assert span.attributes["rpc.system.name"] == "grpc"
    assert span.kind is trace.SpanKind.SERVER
    assert span.attributes.get("own") == ("word" if kind == "Unary" else None)


@pytest.mark.parametrize(
    ("kind", "how"), [("Unary", b"wait"), ("Stream", b"wait"), ("Stream", b"flood")]
)
async def test_a_caller_that_goes_has_cancelled(stand: Stand, kind: str, how: bytes) -> None:
    stand.service.says_late = True
    made = call(stand, kind, how)
    if kind == "Stream":
        await made.read()
    if how == b"wait":
        await stand.service.waits.wait()
    made.cancel()
    span = await stand.span()
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert span.status.status_code is trace.StatusCode.UNSET
    if how == b"wait":
        assert stand.service.ended == ["CANCELLED"]


@KINDS
async def test_a_deadline_that_passes_is_one(stand: Stand, kind: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read(kind, call(stand, kind, b"wait", timeout=0.2))
    span = await stand.span()
    assert span.attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert span.status.status_code is trace.StatusCode.ERROR


async def test_the_parent_is_the_caller_s_span_and_its_decision_counts(stand: Stand) -> None:
    for flags in ("01", "00"):
        await call(stand, "Unary", b"good", metadata=(("traceparent", f"{PARENT}-{flags}"),))
    await call(stand, "Unary", b"good", metadata=(("traceparent", "nonsense"),))
    first, second = await stand.spans(2)
    assert f"{first.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{first.parent.span_id:016x}" == PARENT.split("-")[2]
    assert second.parent is None
    assert second.context.trace_id not in (0, first.context.trace_id)


async def test_long_lived_streams_and_health_are_no_spans(stand: Stand) -> None:
    await read("Watch", stand.channel.unary_stream("/test.Service/Watch")(b"good"))
    session = stand.channel.stream_stream("/test.Service/Session")()
    await session.write(b"hello")
    assert await session.read() == b"hello"
    await session.done_writing()
    await health_pb2_grpc.HealthStub(stand.channel).Check(health_pb2.HealthCheckRequest())
    await call(stand, "Unary", b"good")
    assert (await stand.span()).name == "test.Service/Unary"


async def test_durations_are_counted_by_method_and_status(stand: Stand) -> None:
    await call(stand, "Unary", b"good")
    await read("Stream", call(stand, "Stream", b"good"))
    with pytest.raises(grpc.aio.AioRpcError):
        await call(stand, "Unary", b"refuse")
    await stand.spans(3)
    (histogram,) = stand.metrics._histograms
    points = histogram.metric().data.data_points
    counted = {tuple(point.attributes.values()): point.count for point in points}
    assert counted == {
        ("test.Service/Unary", "OK"): 1,
        ("test.Service/Stream", "OK"): 1,
        ("test.Service/Unary", "NOT_FOUND"): 1,
    }
