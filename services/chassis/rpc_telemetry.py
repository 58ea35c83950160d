"""A span and a duration for each call a server answers; outermost of its interceptors.

Calls that live long, with a stream of requests or of watching, are left out: their spans would end
never. What is asked again and again, as by health checks, is left out as well.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from services.chassis.metrics import DURATION_S, Histogram, Metrics
from services.chassis.tracing import child_of, traceparent_of

# Both are generic in grpc's stubs and plain classes at run time.
ServicerContext = Any
Handler = Any

_QUIET = ("/grpc.",)
_LONG_LIVED = ("/SubscribeKvEvents", "/Watch")
_POLLED = ("/HealthCheck", "/GetLoads")
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_CANCELLED = grpc.StatusCode.CANCELLED.name
_OWN_DEADLINE_S = 0.1
"""A caller that goes so shortly before the deadline has seen it pass."""


class RpcTelemetry(grpc.aio.ServerInterceptor):
    """Observes the calls of one server.

    A handler finds the span of its call by `trace.get_current_span()`; it may rename it and say
    more. The span is the parent of what the handler begins.

    Args:
        tracer: makes the spans, or None.
        metrics: where durations are counted, or None.
    """

    def __init__(self, tracer: Tracer | None, metrics: Metrics | None) -> None:
        self._tracer = tracer
        self._duration: Histogram | None = None
        if metrics is not None:
            self._duration = metrics.histogram(
                "rpc.server.call.duration",
                "Time from the arrival of a call to its end.",
                bounds=DURATION_S,
                labels=("rpc.method", "rpc.response.status_code"),
            )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler that `continuation` finds, unless its calls are not observed."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or handler.request_streaming or method.startswith(_QUIET):
            return handler
        if method.endswith((*_LONG_LIVED, *_POLLED)):
            return handler
        name = method.removeprefix("/")
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, name), read, write
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, name), read, write
        )

    def _unary(self, inner: Any, name: str) -> Any:
        async def call(request: Any, context: ServicerContext) -> Any:
            self._begin(name, context)
            return await inner(request, context)

        return call

    def _streaming(self, inner: Any, name: str) -> Any:
        async def call(request: Any, context: ServicerContext) -> Any:
            self._begin(name, context)
            async for response in inner(request, context):
                yield response

        return call

    def _begin(self, name: str, context: ServicerContext) -> None:
        """Begins the span; the end of the call ends it, however that comes about.

        A call that its caller has cancelled is no error, as the conventions say.

        Each call is a task of its own, so that what is attached to its context here is seen by its
        handler alone and goes with it.
        """
        span: Span | None = None
        if self._tracer is not None:
            span = self._tracer.start_span(
                name,
                child_of(traceparent_of(context.invocation_metadata())),
                SpanKind.SERVER,
                attributes={"rpc.system.name": "grpc", "rpc.method": name},
            )
            otel_context.attach(trace.set_span_in_context(span))
        began = time.perf_counter()

        def end(context: ServicerContext) -> None:
            status = status_of_call(context)
            if self._duration is not None:
                self._duration.record(time.perf_counter() - began, name, status)
            if span is not None:
                span.set_attribute("rpc.response.status_code", status)
                if status not in ("OK", _CANCELLED):
                    span.set_attribute("error.type", status)
                    span.set_status(StatusCode.ERROR, status)
                # After the other callbacks of the call, which may have more to say.
                asyncio.get_running_loop().call_soon(span.end, time.time_ns())

        context.add_done_callback(end)


def status_of_call(context: ServicerContext) -> str:
    """How a call ended, e.g. "OK"; for callbacks that are told of its end.

    Of a call that its peer cut, gRPC says here neither that nor why; but no status was sent then.
    """
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    if code:
        return _NAMES.get(code, "UNKNOWN")
    if context.done() and not context.cancelled():
        return "OK"
    left_s = context.time_remaining()
    late = left_s is not None and left_s <= _OWN_DEADLINE_S
    return "DEADLINE_EXCEEDED" if late else _CANCELLED
