"""Errors of handlers become statuses on all four shapes of rpc, over a real connection."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.chassis.channel import open_channel
from services.chassis.errors import Internal, InvalidArgument, NotFound, Overloaded, RemoteError
from services.chassis.errors import to_status as status_of_error
from services.chassis.server import GrpcServer

SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "unary_writes")

CASES = {
    b"good": None,
    b"field": InvalidArgument("prompt.text", "must not be empty", reason="EMPTY"),
    b"full": Overloaded("queue is full", retry_after_s=2),
    b"long": NotFound("字" * 100_000),
    b"remote": RemoteError(status_of_error(Overloaded("full below", retry_after_s=5))),
    b"bug": ZeroDivisionError("secret of the house"),
}


class Handlers:
    """Raises what the request names, each shape in its own way; answers it otherwise."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def answer(self, request: bytes) -> bytes:
        if request == b"wait":
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cleaned.set()
        if (error := CASES[request]) is not None:
            raise error
        return request

    async def unary_unary(self, request: bytes, context: object) -> bytes:
        return await self.answer(request)

    async def unary_stream(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.answer(request)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: object) -> bytes:
        return [await self.answer(request) async for request in requests][-1]

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: object
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield b"first"
            yield await self.answer(request)

    async def unary_writes(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"first")
        await context.write(await self.answer(request))

    async def aborts(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        return request

    async def floods(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        self.started.set()
        try:
            while True:
                await context.write(bytes(1_000_000))
        finally:
            self.cleaned.set()


def parsed(message: bytes) -> bytes:
    """Reads a request; one of them is no message."""
    if message == b"garbage":
        raise DecodeError("wire format was corrupt")
    return message


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def channel(handlers: Handlers) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(["test.Service"])
    methods = {
        shape: getattr(grpc, f"{shape.replace('writes', 'stream')}_rpc_method_handler")(
            getattr(handlers, shape), request_deserializer=parsed
        )
        for shape in SHAPES
    }
    methods["aborts"] = grpc.unary_unary_rpc_method_handler(handlers.aborts)
    methods["floods"] = grpc.unary_stream_rpc_method_handler(handlers.floods)
    server.grpc.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", methods),)
    )
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as opened:
        yield opened
    await server.stop(grace_s=0)


async def call(channel: grpc.aio.Channel, shape: str, request: bytes) -> list[bytes]:
    """All responses to one request."""
    kind = {"unary_writes": "unary_stream"}.get(shape, shape)
    made = getattr(channel, kind)(f"/test.Service/{shape}")
    argument = iter([request]) if kind.startswith("stream") else request
    if kind.endswith("stream"):
        return [response async for response in made(argument)]
    return [await made(argument)]


async def failure(channel: grpc.aio.Channel, shape: str, request: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, shape, request)
    return caught.value


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_good_call_passes(channel: grpc.aio.Channel, shape: str) -> None:
    assert (await call(channel, shape, b"good"))[-1] == b"good"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_wrong_field_arrives_with_its_name(channel: grpc.aio.Channel, shape: str) -> None:
    error = await failure(channel, shape, b"field")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "prompt.text: must not be empty"
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    assert status.details[0].Unpack(bad)
    assert bad.field_violations[0].field == "prompt.text"
    assert (await call(channel, shape, b"good"))[-1] == b"good"


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_overload_arrives_with_its_delay(channel: grpc.aio.Channel, shape: str) -> None:
    error = await failure(channel, shape, b"full")
    retry = error_details_pb2.RetryInfo()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 2


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_remote_error_arrives_as_it_was(channel: grpc.aio.Channel, shape: str) -> None:
    error = await failure(channel, shape, b"remote")
    assert rpc_status.from_call(error) == CASES[b"remote"].status


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_bug_is_logged_and_tells_the_client_nothing(
    channel: grpc.aio.Channel, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await failure(channel, shape, b"bug")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == Internal("internal error; see the log of the service").message
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == f"/test.Service/{shape} failed"
    assert isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_long_message_still_arrives(channel: grpc.aio.Channel, shape: str) -> None:
    error = await failure(channel, shape, b"long")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details().startswith("字字字")


async def test_an_abort_by_hand_stays_what_it_is(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/test.Service/aborts")(b"")
    error = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/test.Service/nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream", "unary_writes"])
async def test_a_client_that_goes_away_ends_the_handler_quietly(
    channel: grpc.aio.Channel, handlers: Handlers, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {"unary_writes": "unary_stream"}.get(shape, shape)
    running = getattr(channel, kind)(f"/test.Service/{shape}")(b"wait")
    await handlers.started.wait()
    running.cancel()
    await handlers.cleaned.wait()
    assert (await call(channel, shape, b"good"))[-1] == b"good"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_goes_away_during_a_write_is_not_a_bug(
    channel: grpc.aio.Channel, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    running = channel.unary_stream("/test.Service/floods")(b"")
    await running.read()
    running.cancel()
    await handlers.cleaned.wait()
    assert await call(channel, "unary_unary", b"good") == [b"good"]
    assert [record for record in caplog.records if record.name.startswith("services")] == []


@pytest.mark.parametrize("shape", SHAPES)
async def test_bytes_that_are_no_message_are_the_callers_mistake(
    channel: grpc.aio.Channel, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, shape, b"garbage")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "message: the bytes are no message of this method"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
