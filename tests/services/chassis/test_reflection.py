"""What tools without stubs are told, under both names of the reflection service."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2

from services.chassis.channel import open_channel
from services.chassis.reflection import V1, V1ALPHA
from services.chassis.server import GrpcServer

Request = reflection_pb2.ServerReflectionRequest
Response = reflection_pb2.ServerReflectionResponse


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer([health.SERVICE_NAME], always_ready=["test.Other"])
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as opened:
        yield opened
    await server.stop(grace_s=0)


async def asked(channel: grpc.aio.Channel, service: str, request: Request) -> Response:
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )
    (answer,) = [answer async for answer in call(iter([request]), timeout=10)]
    return answer


@pytest.mark.parametrize("service", [V1, V1ALPHA])
async def test_it_lists_the_services(channel: grpc.aio.Channel, service: str) -> None:
    answer = await asked(channel, service, Request(list_services=""))
    names = {found.name for found in answer.list_services_response.service}
    assert names == {"grpc.health.v1.Health", "test.Other", V1, V1ALPHA}


@pytest.mark.parametrize("service", [V1, V1ALPHA])
@pytest.mark.parametrize("symbol", ["grpc.health.v1.Health", V1, V1ALPHA])
async def test_it_describes_what_it_lists(
    channel: grpc.aio.Channel, service: str, symbol: str
) -> None:
    answer = await asked(channel, service, Request(file_containing_symbol=symbol))
    pool = descriptor_pool.DescriptorPool()
    for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
        pool.AddSerializedFile(raw)
    assert pool.FindServiceByName(symbol).methods


async def test_the_messages_of_v1_are_those_of_v1alpha_on_the_wire(
    channel: grpc.aio.Channel,
) -> None:
    answer = await asked(channel, V1, Request(file_containing_symbol=V1))
    pool = descriptor_pool.DescriptorPool()
    for raw in answer.file_descriptor_response.file_descriptor_proto:
        assert "v1alpha" not in str(descriptor_pb2.FileDescriptorProto.FromString(raw))
        pool.AddSerializedFile(raw)
    found = pool.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionResponse")
    read = message_factory.GetMessageClass(found).FromString(answer.SerializeToString())
    assert read.original_request.file_containing_symbol == V1


@pytest.mark.parametrize("service", [V1, V1ALPHA])
async def test_what_there_is_not_is_not_found(channel: grpc.aio.Channel, service: str) -> None:
    answer = await asked(channel, service, Request(file_containing_symbol="test.Nothing"))
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
