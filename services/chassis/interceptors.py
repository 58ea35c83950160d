"""Turns exceptions of handlers into gRPC statuses, at one place for every rpc."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from services.chassis.errors import Internal, ServiceError, status_of

log = logging.getLogger(__name__)

# Both are generic in grpc's stubs and plain classes at run time.
ServicerContext = Any
Handler = Any


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps ServiceError by the table in `errors`, anything else to INTERNAL with the cause logged."""

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
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _unary(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> Any:
        try:
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


def _streaming(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(
    context: ServicerContext, error: Exception, method: str
) -> NoReturn:
    if isinstance(error, ServiceError):
        known = error
    elif context.cancelled() or context.done():
        raise error  # the peer is gone; there is nobody to tell
    else:
        log.error("%s failed", method, exc_info=error)
        known = Internal("internal error; see the log of the service")
    await context.abort_with_status(rpc_status.to_status(status_of(known)))
    raise AssertionError("abort_with_status returns only by raising")
