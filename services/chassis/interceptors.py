"""Turns exceptions of handlers into gRPC statuses, at one place for every rpc."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from opentelemetry import trace

from services.chassis.errors import Internal, InvalidArgument, ServiceError, status_of
from services.chassis.logs import fields
from services.chassis.tracing import trace_id

log = logging.getLogger(__name__)

# Both are generic in grpc's stubs and plain classes at run time.
ServicerContext = Any
Handler = Any

# The call is over: its handler has aborted it, or the peer is gone and a write failed.
_ENDED = (grpc.aio.AbortError, grpc.aio.InternalError)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps ServiceError by the table in `errors`; anything else is logged and sent as INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler that `continuation` finds; unknown methods pass through as None."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = _streaming(inner, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = _unary(inner, method)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        read = handler.request_deserializer
        if read is not None and not handler.request_streaming:
            read = _or_error(read)
        return make(wrapped, read, handler.response_serializer)


def _or_error(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`read`, which gives an error instead of raising it, where no handler could see it."""

    def call(message: bytes) -> Any:
        try:
            return read(message)
        except DecodeError as error:
            return error

    return call


def _unary(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> Any:
        try:
            _refuse_unreadable(request)
            return await inner(request, context)
        except Exception as error:  # noqa: BLE001 -- the one place that turns all of them into statuses
            await _abort(context, error, method)

    return call


def _streaming(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            _refuse_unreadable(request)
            responses = inner(request, context)
            if inspect.isawaitable(responses):
                # A handler that writes by itself, as the health service's Watch does.
                await responses
                return
            async for response in responses:
                yield response
        except Exception as error:  # noqa: BLE001 -- the one place that turns all of them into statuses
            await _abort(context, error, method)

    return call


def _refuse_unreadable(request: Any) -> None:
    if isinstance(request, DecodeError):
        raise request


async def _abort(context: ServicerContext, error: Exception, method: str) -> NoReturn:
    """Ends the call with the status of `error`; raises what gRPC must see."""
    if isinstance(error, _ENDED) or context.done():
        raise error
    if isinstance(error, ServiceError):
        known = error
        if known.reason:
            trace.get_current_span().set_attribute("quire.error.reason", known.reason)
    elif isinstance(error, DecodeError):
        known = InvalidArgument("message", "the bytes are no message of this method")
    else:
        log.error("%s failed", method, exc_info=error, extra=fields(trace_id=trace_id()))
        known = Internal("internal error; see the log of the service")
    await context.abort_with_status(rpc_status.to_status(status_of(known)))
    raise AssertionError("abort_with_status returns only by raising")
