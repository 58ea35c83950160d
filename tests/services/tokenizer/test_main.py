import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import generation_pb2, text_pb2, text_pb2_grpc, token_pb2
from services.chassis.process import StartupError
from services.chassis.telemetry import Telemetry
from services.tokenizer.__main__ import serve
from services.tokenizer.settings import TokenizerSettings
from tests.assets.tokenizers import byte_ids, byte_level, write_folder
from tests.fakes.scheduler import FakeScheduler, default_limits

ROOT = Path(__file__).parents[3]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STOP = generation_pb2.FINISH_REASON_STOP

# As in an environment without torch: not found, rather than broken.
WITHOUT_TORCH = """
import importlib.machinery, sys
class PathFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            return None
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = PathFinder
"""


@pytest.fixture(autouse=True)
def memory_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tokenizer.__main__.settle_memory", lambda: None)


@pytest.fixture(autouse=True)
def logs_stay_as_they_are() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


def telemetry_of(made: TokenizerSettings) -> Telemetry:
    return Telemetry(made, service="tokenizer", version="1", env={})


@dataclass
class Client:
    """A client of the service at one address."""

    channel: grpc.aio.Channel

    @property
    def text(self) -> Any:
        return text_pb2_grpc.TextServiceStub(self.channel)

    async def health(self, service: str = "quire.v1.TextService") -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, wait_for_ready=True)).status

    async def until_health_is(self, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.health() != status:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def scheduler_at(sockets: Path) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler(f"unix://{sockets}/scheduler.sock", limits=default_limits())
    await scheduler.start()
    try:
        yield scheduler
    finally:
        if scheduler.runs:
            await scheduler.die()


def settings(folder: Path, sockets: Path, **kwargs: Any) -> TokenizerSettings:
    made = TokenizerSettings(
        model=str(folder),
        listen=(f"unix://{sockets}/text.sock",),
        scheduler=(f"unix://{sockets}/scheduler.sock",),
    )
    return replace(made, **kwargs)


@asynccontextmanager
async def serving(made: TokenizerSettings) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """The service in this process; it must end by itself once it is told to stop."""
    stopping = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(made, telemetry_of(made), stopping))
        async with grpc.aio.insecure_channel(made.listen[0]) as channel:
            try:
                yield Client(channel), stopping
            finally:
                stopping.set()


def ask(text: str = "Hi", **kwargs: Any) -> text_pb2.GenerateRequest:
    return text_pb2.GenerateRequest(text=text, **kwargs)


async def test_readiness_follows_the_session(folder: Path, sockets: Path) -> None:
    async with scheduler_at(sockets) as scheduler:
        async with serving(settings(folder, sockets)) as (client, _):
            await client.until_health_is(SERVING)
            assert await client.health("") == SERVING
            await scheduler.die()
            await client.until_health_is(NOT_SERVING)
            assert await client.health("") == SERVING
            await scheduler.start()
            await client.until_health_is(SERVING)
        assert scheduler.session.said_goodbye


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(
    folder: Path, sockets: Path
) -> None:
    async with (
        scheduler_at(sockets) as scheduler,
        serving(settings(folder, sockets)) as (client, stopping),
    ):
        await client.until_health_is(SERVING)
        calls, got = [], []
        for _ in range(2):  # one after the other, so that each is known by its place
            calls.append(client.text.Generate(ask()))
            got.append(await scheduler.next_submission())
        got[0].emit(*byte_ids(b"a"))
        assert (await calls[0].read()).text == "a"
        stopping.set()
        await client.until_health_is(NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.text.Generate(ask()).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not got[0].session.said_goodbye
        for one, text in zip(got, (b"b", b"c"), strict=True):
            one.end(*byte_ids(text), completion=2)
        for call, text in zip(calls, "bc", strict=True):
            last = await call.read()
            assert (last.text, last.HasField("finished")) == (text, True)
            assert await call.read() is grpc.aio.EOF
        await scheduler.until(lambda: got[0].session.said_goodbye)
        assert got[0].session.aborts == []


async def test_what_outlasts_the_drain_ends_with_a_status(folder: Path, sockets: Path) -> None:
    async with (
        scheduler_at(sockets) as scheduler,
        serving(settings(folder, sockets, drain_timeout=0.1)) as (client, stopping),
    ):
        await client.until_health_is(SERVING)
        call = client.text.Generate(ask())
        got = await scheduler.next_submission()
        stopping.set()
        with pytest.raises(grpc.aio.AioRpcError, match="going away") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await scheduler.until(lambda: got.session.said_goodbye)
        assert got.session.aborts == [got.stream_id]


async def test_names_and_defaults_come_from_settings_and_files(
    tmp_path: Path, sockets: Path
) -> None:
    config = {"temperature": 0.25, "top_k": 7}
    folder = write_folder(tmp_path / "named", byte_level(), generation_config=config)
    async with scheduler_at(sockets) as scheduler:
        scheduler.limits.model = "named"
        async with serving(settings(folder, sockets)) as (client, _):
            await client.until_health_is(SERVING)
            assert (await client.text.GetInfo(text_pb2.GetInfoRequest())).model == "named"
            call = client.text.Generate(ask())
            sampling = (await scheduler.next_submission()).request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 1.0, 7)
            call.cancel()
        scheduler.limits.model = "other"
        served = settings(folder, sockets, served_model_name="other")
        async with serving(served) as (client, _):
            await client.until_health_is(SERVING)
            assert (await client.text.GetInfo(text_pb2.GetInfoRequest())).model == "other"


async def test_it_is_not_ready_while_the_scheduler_serves_another_model_or_nothing(
    folder: Path, sockets: Path
) -> None:
    async with (
        scheduler_at(sockets) as scheduler,
        serving(settings(folder, sockets)) as (client, _),
    ):
        await client.until_health_is(SERVING)
        other = default_limits()
        other.model = "another"
        scheduler.session.send(limits=other)
        await client.until_health_is(NOT_SERVING)
        scheduler.session.send(limits=default_limits())
        await client.until_health_is(SERVING)
        scheduler.session.send(readiness=token_pb2.Readiness(serving=False))
        await client.until_health_is(NOT_SERVING)
        scheduler.session.send(readiness=token_pb2.Readiness(serving=True))
        await client.until_health_is(SERVING)


async def test_it_may_be_told_to_stop_while_it_loads(folder: Path, sockets: Path) -> None:
    stopping = asyncio.Event()
    stopping.set()
    async with asyncio.timeout(30):
        made = settings(folder, sockets)
        await serve(made, telemetry_of(made), stopping)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/nowhere"}, "model: there is no folder /nowhere"),
        ({"listen": ("nonsense",)}, "listen: must be host:port"),
    ],
)
async def test_what_cannot_be_used_is_said_in_one_line(
    folder: Path, sockets: Path, change: dict[str, Any], message: str
) -> None:
    made = settings(folder, sockets, **change)
    with pytest.raises(StartupError, match=message):
        await serve(made, telemetry_of(made), asyncio.Event())


async def start_process(
    sockets: Path, *arguments: str, env: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.tokenizer",
        *arguments,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.system
async def test_the_process_needs_no_torch_answers_and_ends_in_order(
    folder: Path, sockets: Path
) -> None:
    (sockets / "sitecustomize.py").write_text(WITHOUT_TORCH)
    async with scheduler_at(sockets) as scheduler:
        process = await start_process(
            sockets,
            f"--model={folder}",
            f"--listen=unix://{sockets}/text.sock",
            f"--scheduler=unix://{sockets}/scheduler.sock",
            env={"PYTHONPATH": f"{sockets}:{ROOT}"},
        )
        try:
            async with grpc.aio.insecure_channel(f"unix://{sockets}/text.sock") as channel:
                client = Client(channel)
                await client.until_health_is(SERVING)
                messages = [text_pb2.ChatMessage(role="user", content="Capital of France?")]
                call = client.text.Chat(text_pb2.ChatRequest(messages=messages))
                got = await scheduler.next_submission()
                process.send_signal(signal.SIGTERM)
                await client.until_health_is(NOT_SERVING)
                got.end(*byte_ids(b"Paris."), 2, reason=STOP, stop_token_id=2, completion=7)
                answer = await call.read()
            _, errors = await asyncio.wait_for(process.communicate(), 30)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert answer.text == "Paris."
        assert process.returncode == 0, errors.decode()
        assert scheduler.session.said_goodbye
        assert "Traceback" not in errors.decode()


@pytest.mark.system
async def test_the_process_says_what_is_wrong_in_one_line(tmp_path: Path, sockets: Path) -> None:
    folder = write_folder(tmp_path / "broken", byte_level())
    (folder / "tokenizer.json").write_text("{")
    process = await start_process(sockets, f"--model={folder}", "--log-level=error")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    lines = errors.decode().splitlines()
    assert process.returncode == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{folder}/tokenizer.json: is not JSON: ")


async def test_hidden_torch_is_really_hidden(sockets: Path) -> None:
    (sockets / "sitecustomize.py").write_text(WITHOUT_TORCH)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import torch",
        env={**os.environ, "PYTHONPATH": str(sockets)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "No module named 'torch'" in errors.decode()
