"""An OTLP receiver: keeps the spans and metrics that processes send, and shows traces as trees.

Speaks the real protocol over gRPC. A test may have it answer late (`hold`) or not at all; for a
receiver that is dead take `dead_url`, for one that accepts and says nothing `silent_url`.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

KINDS = {
    number: name.removeprefix("SPAN_KIND_") for name, number in trace_pb2.Span.SpanKind.items()
}
STATUSES = {
    number: name.removeprefix("STATUS_CODE_")
    for name, number in trace_pb2.Status.StatusCode.items()
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened during a span."""

    name: str
    attributes: Mapping[str, Any]
    time_ns: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """A span of another trace that belongs to this one; ids in hex."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span as it was received; ids in hex, `parent_id` "" for the first of a trace.

    Attributes:
        resource: what the process said of itself.
        kind: "SERVER", "CLIENT", "INTERNAL" …
        status: "UNSET", "OK" or "ERROR".
    """

    resource: Mapping[str, Any]
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    attributes: Mapping[str, Any]
    events: Sequence[Event]
    links: Sequence[Link]
    status: str
    status_message: str
    start_ns: int
    end_ns: int
    trace_state: str

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def line(self) -> str:
        """Service, kind and name, and what was wrong."""
        wrong = f" {self.status}({self.status_message})" if self.status == "ERROR" else ""
        return f"{self.service} {self.kind} {self.name}{wrong}"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of one process as it was received last: its points by labels.

    Attributes:
        points: a value for each set of labels; of a histogram the count and the sum.
    """

    resource: Mapping[str, Any]
    name: str
    unit: str
    points: Mapping[frozenset[tuple[str, Any]], Any]


class OtlpReceiver(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Use: `async with receiving() as receiver`, and give processes `receiver.url`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[tuple[str, str], Metric] = {}
        """By the instance id of the process and the metric's name; the newest."""
        self.exports = 0
        self.hold = asyncio.Event()
        """Exports are answered once it is set; it is, unless a test clears it."""
        self.hold.set()
        self.url = ""
        self._changed = asyncio.Condition()

    async def Export(self, request: Any, context: Any) -> Any:
        await self.hold.wait()
        self.exports += 1
        answer: Any
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            self.spans += _spans(request)
            answer = trace_service_pb2.ExportTraceServiceResponse()
        else:
            self.metrics.update(_metrics(request))
            answer = metrics_service_pb2.ExportMetricsServiceResponse()
        async with self._changed:
            self._changed.notify_all()
        return answer

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        """Waits until what was received makes `condition` true."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"received so far:\n{self.forest}") from None

    def named(self, name: str) -> list[Span]:
        """All spans of that name."""
        return [span for span in self.spans if span.name == name]

    def of_trace(self, trace_id: str) -> list[Span]:
        """All spans of a trace, the earliest first."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)

    def tree(self, trace_id: str, line: Callable[[Span], str] = lambda span: span.line) -> str:
        """A trace as text: a line for each span, indented below its parent; orphans are told."""
        spans = self.of_trace(trace_id)
        return "\n".join(_lines(spans, line))

    @property
    def trace_ids(self) -> list[str]:
        """Of all traces, in the order in which they came."""
        return list(dict.fromkeys(span.trace_id for span in self.spans))

    @property
    def forest(self) -> str:
        """All traces as trees."""
        return "\n\n".join(self.tree(trace_id) for trace_id in self.trace_ids)


@contextlib.asynccontextmanager
async def receiving(address: str = "127.0.0.1:0") -> AsyncIterator[OtlpReceiver]:
    """A receiver that runs, at any free port if none is given."""
    receiver = OtlpReceiver()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port(address)
    await server.start()
    receiver.url = f"http://{address.rpartition(':')[0]}:{port}"
    try:
        yield receiver
    finally:
        receiver.hold.set()
        await server.stop(None)


@contextlib.contextmanager
def dead_url() -> Iterator[str]:
    """The URL of nobody: a port that is taken, and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def silent_url() -> Iterator[str]:
    """The URL of somebody who takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _lines(spans: Sequence[Span], line: Callable[[Span], str]) -> Iterator[str]:
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)

    def below(parent_id: str, depth: int) -> Iterator[str]:
        for span in children.get(parent_id, ()):
            yield "  " * depth + line(span)
            yield from below(span.span_id, depth + 1)

    yield from below("", 0)
    for parent_id in children.keys() - known - {""}:
        yield f"(parent {parent_id} is elsewhere)"
        yield from below(parent_id, 1)


def _spans(request: Any) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    resource=resource,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=KINDS[span.kind],
                    attributes=_attributes(span.attributes),
                    events=[
                        Event(
                            name=event.name,
                            attributes=_attributes(event.attributes),
                            time_ns=event.time_unix_nano,
                        )
                        for event in span.events
                    ],
                    links=[
                        Link(
                            trace_id=link.trace_id.hex(),
                            span_id=link.span_id.hex(),
                            attributes=_attributes(link.attributes),
                        )
                        for link in span.links
                    ],
                    status=STATUSES[span.status.code],
                    status_message=span.status.message,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    trace_state=span.trace_state,
                )


def _metrics(request: Any) -> Iterator[tuple[tuple[str, str], Metric]]:
    for group in request.resource_metrics:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                taken = Metric(
                    resource=resource,
                    name=metric.name,
                    unit=metric.unit,
                    points={
                        frozenset(_attributes(point.attributes).items()): _value(point)
                        for point in data.data_points
                    },
                )
                yield (str(resource.get("service.instance.id", "")), metric.name), taken


def _value(point: Any) -> Any:
    if hasattr(point, "bucket_counts"):
        return point.count, point.sum
    return getattr(point, point.WhichOneof("value"))


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_plain(one) for one in value.array_value.values)
    return None if kind is None else getattr(value, kind)
