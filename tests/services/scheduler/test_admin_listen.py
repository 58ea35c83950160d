"""Where the scheduler's process serves the admin service, and facts."""

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.v1 import admin_pb2, admin_pb2_grpc, info_pb2, info_pb2_grpc
from services.scheduler.__main__ import ADMIN_SERVICE, INFO_SERVICE, TOKEN_SERVICE
from tests.quire.cli.running_quire import started

PROCESS = (sys.executable, "-m", "services.scheduler")


async def services(channel: grpc.aio.Channel) -> set[str]:
    """What reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = (await call.read()).list_services_response
    call.cancel()
    return {service.name for service in listed.service}


async def alive(channel: grpc.aio.Channel, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
    return response.status == health_pb2.HealthCheckResponse.SERVING


def sockets(folder: Path) -> list[Path]:
    return list(folder.rglob("*.sock"))


@pytest.mark.parametrize("apart", [False, True])
async def test_it_is_served_with_the_others_or_apart(tmp_path: Path, apart: bool) -> None:
    listen, admin = f"unix://{tmp_path}/s.sock", f"unix://{tmp_path}/admin/a.sock"
    flags = ["--listen", listen, *(["--admin-listen", admin] if apart else [])]
    async with (
        asyncio.timeout(30),
        started(*PROCESS, *flags) as process,
        grpc.aio.insecure_channel(listen) as channel,
        grpc.aio.insecure_channel(admin if apart else listen) as admin_channel,
    ):
        assert await alive(admin_channel, ADMIN_SERVICE)
        assert ADMIN_SERVICE in await services(admin_channel)
        request = admin_pb2.GetConfigRequest()
        response = await admin_pb2_grpc.AdminServiceStub(admin_channel).GetConfig(request)
        assert (response.version, response.config.prefill_chunk_size) == (1, 512)
        assert TOKEN_SERVICE in await services(channel)
        if apart:
            assert ADMIN_SERVICE not in await services(channel)
            assert TOKEN_SERVICE not in await services(admin_channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminServiceStub(channel).GetConfig(request)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert sockets(tmp_path) == []


async def test_facts_are_told_apart_and_wherever_admin_is(tmp_path: Path) -> None:
    listen, admin, info = (f"unix://{tmp_path}/{name}.sock" for name in ("s", "a", "i"))
    flags = ["--listen", listen, "--admin-listen", admin, "--info-listen", info]
    async with asyncio.timeout(30), started(*PROCESS, *flags) as process:
        for address in (listen, admin, info):
            async with grpc.aio.insecure_channel(address) as channel:
                assert await alive(channel, INFO_SERVICE)
                told = await info_pb2_grpc.InfoServiceStub(channel).GetLoads(
                    info_pb2.GetLoadsRequest()
                )
                assert told.uptime_us > 0
                seen = await services(channel) & {ADMIN_SERVICE, INFO_SERVICE, TOKEN_SERVICE}
                if address == info:
                    assert seen == {INFO_SERVICE}
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await admin_pb2_grpc.AdminServiceStub(channel).GetConfig(
                            admin_pb2.GetConfigRequest()
                        )
                    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert sockets(tmp_path) == []


@pytest.mark.parametrize("flag", ["--admin-listen", "--info-listen"])
async def test_an_address_that_cannot_be_bound_ends_the_process(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    flags = ["--listen", f"unix://{tmp_path}/s.sock", flag, f"unix://{tmp_path}/file"]
    async with asyncio.timeout(30), started(*PROCESS, *flags) as process:
        _, told = await process.communicate()
        assert process.returncode == 2
    assert f"cannot bind unix://{tmp_path}/file: it is not a socket" in told.decode()
    assert not (tmp_path / "s.sock").exists()
