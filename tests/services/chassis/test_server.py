"""Health, what can be bound, and what is left behind."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.chassis.channel import MAX_MESSAGE_BYTES, open_channel
from services.chassis.process import StartupError
from services.chassis.server import GrpcServer

SERVICE = "test.Service"
ALWAYS = "test.AlwaysReady"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: bytes, context: object) -> bytes:
    return request


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    made = GrpcServer([SERVICE], always_ready=[ALWAYS])
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    made.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    yield made
    await made.stop(grace_s=0)


async def health(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def refused(address: str) -> str:
    server = GrpcServer([SERVICE])
    with pytest.raises(StartupError) as caught:
        await server.start([address])
    return str(caught.value)


async def test_the_process_is_up_before_the_service_is_ready(server: GrpcServer) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        assert (await health(channel, ""), await health(channel, SERVICE)) == (SERVING, NOT_SERVING)
        await server.set_ready(True)
        assert await health(channel, SERVICE) == SERVING
        await server.set_ready(False)
        assert (await health(channel, ""), await health(channel, SERVICE)) == (SERVING, NOT_SERVING)


async def test_a_service_that_needs_nothing_is_ready_from_the_start(server: GrpcServer) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        assert await health(channel, ALWAYS) == SERVING
        await server.set_ready(False)
        assert await health(channel, ALWAYS) == SERVING


async def test_the_health_of_an_unknown_service_is_not_found(server: GrpcServer) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, "test.Other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_sees_readiness_come_and_go(server: GrpcServer) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        seen = [(await watch.read()).status]
        for ready in (True, False):
            await server.set_ready(ready)
            seen.append((await watch.read()).status)
        watch.cancel()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_one_server_listens_on_tcp_and_on_a_socket(
    server: GrpcServer, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "er" / "q.sock"
    bound = await server.start(["127.0.0.1:0", f"unix://{path}"])
    assert bound[1] == f"unix://{path}"
    for address in bound:
        async with open_channel(address) as channel:
            assert await channel.unary_unary(f"/{SERVICE}/Echo")(b"hello") == b"hello"
    await server.stop()
    assert not path.exists()


async def test_a_message_above_the_default_limit_passes_and_one_above_ours_is_refused(
    server: GrpcServer,
) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")
        large = bytes(5 * 1024 * 1024)
        assert await call(large) == large
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"small") == b"small"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:http", ":0", "", "127.0.0.1:²"],
)
async def test_a_malformed_address_is_refused(address: str) -> None:
    assert await refused(address) == (
        f"listen: must be host:port with a port of 0 to 65535, or unix:///path: {address!r}"
    )


async def test_a_port_in_use_is_refused(server: GrpcServer) -> None:
    (address,) = await server.start(["127.0.0.1:0"])
    assert (await refused(address)).startswith(f"listen: cannot bind {address}: it is in use")


async def test_a_failed_start_leaves_no_socket_and_no_listener(tmp_path: Path) -> None:
    path = tmp_path / "q.sock"
    server = GrpcServer([SERVICE])
    with pytest.raises(StartupError):
        await server.start([f"unix://{path}", "127.0.0.1:nonsense"])
    assert not path.exists()


async def test_a_socket_in_use_is_not_taken_over(server: GrpcServer, tmp_path: Path) -> None:
    address = f"unix://{tmp_path / 'q.sock'}"
    await server.start([address])
    assert await refused(address) == f"listen: cannot bind {address}: another process listens there"
    async with open_channel(address) as channel:
        assert await channel.unary_unary(f"/{SERVICE}/Echo")(b"still here") == b"still here"


async def test_a_dead_socket_is_replaced(server: GrpcServer, tmp_path: Path) -> None:
    path = tmp_path / "q.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    await server.start([f"unix://{path}"])
    async with open_channel(f"unix://{path}") as channel:
        assert await channel.unary_unary(f"/{SERVICE}/Echo")(b"x") == b"x"


async def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    assert (await refused(f"unix://{path}")).endswith("it is not a socket")
    assert path.read_text() == "data"


async def test_a_socket_path_must_be_absolute_and_short(tmp_path: Path) -> None:
    assert "must be absolute" in await refused("unix://q.sock")
    assert "longer than 107 bytes" in await refused(f"unix://{tmp_path / ('x' * 108)}")


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = await refused(f"unix://{tmp_path / 'file' / 'q.sock'}")
    assert message.startswith("listen: cannot make the folder ")


async def test_stop_may_come_twice_and_without_a_start() -> None:
    server = GrpcServer([SERVICE])
    await server.stop()
    await server.stop()
