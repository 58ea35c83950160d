"""How the services start, say what they can, and end."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.system.raw_requests import successors, text_request, token_request
from tests.system.service_set import (
    NOT_SERVING,
    ROOT,
    SERVING,
    TEXT_SERVICE,
    TOKEN_SERVICE,
    WORKER_LINK_SERVICE,
    ServiceSet,
    serving,
)

SEATS = 2
LONG = 300
MOST = 15_000

READY = {
    "scheduler": TOKEN_SERVICE,
    "worker-0": WORKER_LINK_SERVICE,
    "tokenizer": TEXT_SERVICE,
}
"""The service whose health is the readiness of a process."""

ALWAYS = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def shared(successor_model: Path) -> AsyncIterator[ServiceSet]:
    worker = (f"--max-num-seqs={SEATS}", "--kv-cache-memory=4MiB")
    async with serving(successor_model, {"worker": worker}) as running:
        yield running


@pytest.fixture
async def services(shared: ServiceSet) -> ServiceSet:
    """The shared set; what the test before has ended is up again."""
    for name, program in shared.programs.items():
        if not program.is_running:
            await shared.start(name)
    await shared.until_ready()
    await shared.until(shared.at_rest)
    return shared


# Health


async def test_a_process_is_alive_before_it_can_serve(successor_model: Path) -> None:
    async def said(services: ServiceSet, name: str) -> tuple[int | None, int | None]:
        return await services.health(name), await services.health(name, READY[name])

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        services = ServiceSet(Path(folder), successor_model, {})
        async with contextlib.AsyncExitStack() as scope:
            scope.push_async_callback(services.end)
            for name in ("tokenizer", "worker-0", "scheduler"):
                await services.start(name)
                await services.until(lambda n=name: said(services, n), (SERVING, NOT_SERVING))
                if name == "worker-0":
                    await services.programs["worker-0"].kill()
            assert await services.health("scheduler", "quire.v1.InfoService") == SERVING
            assert await services.health("scheduler", WORKER_LINK_SERVICE) == SERVING
            await services.start("worker-0")
            for name in READY:
                await services.until(lambda n=name: said(services, n), (SERVING, SERVING))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tokenizer", {TEXT_SERVICE}),
        (
            "scheduler",
            {
                TOKEN_SERVICE,
                WORKER_LINK_SERVICE,
                "quire.v1.InfoService",
                "quire.v1.AdminService",
                "vllm.grpc.engine.VllmEngine",
            },
        ),
        ("worker-0", {WORKER_LINK_SERVICE}),
    ],
)
async def test_every_service_says_what_it_serves(
    services: ServiceSet, name: str, wanted: set[str]
) -> None:
    async with services.channel(name) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    listed = {service.name for service in answer.list_services_response.service}
    assert listed == wanted | ALWAYS


# SIGTERM


async def answer(services: ServiceSet, first: int, count: int) -> None:
    """One stream through the text door, which must give its known tokens."""
    ids: list[int] = []
    async for response in services.text.Generate(text_request([first], count)):
        ids.extend(response.token_ids)
    assert response.HasField("finished")
    assert ids == successors(first, count, VOCAB_SIZE)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ended."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


async def seated(services: ServiceSet) -> tuple[int, int]:
    loads = await services.loads()
    return loads.running, loads.waiting


@contextlib.asynccontextmanager
async def two_run_and_two_wait(services: ServiceSet) -> AsyncIterator[None]:
    """Four long streams on two seats; after it all have ended with their known tokens."""
    async with asyncio.TaskGroup() as tasks:
        for first in range(2 * SEATS):
            tasks.create_task(answer(services, first, LONG))
        await services.until(lambda: seated(services), (SEATS, SEATS))
        yield


async def refused(call: Any) -> None:
    code, details = await status_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE, details


async def test_a_tokenizer_that_ends_finishes_what_runs(services: ServiceSet) -> None:
    program = services.programs["tokenizer"]
    async with two_run_and_two_wait(services):
        program.send(signal.SIGTERM)
        await services.until(lambda: services.health("tokenizer", TEXT_SERVICE), NOT_SERVING)
        assert await services.health("tokenizer") == SERVING
        await refused(services.text.Generate(text_request([1], 1)))
        assert sum(await seated(services)) > 0
    assert await program.exit_code() == 0
    assert not (services.folder / "tokenizer.sock").exists()


async def test_a_scheduler_that_ends_finishes_what_runs_and_what_waits(
    services: ServiceSet,
) -> None:
    program = services.programs["scheduler"]
    async with two_run_and_two_wait(services):
        program.send(signal.SIGTERM)
        await services.until(lambda: services.health("scheduler", TOKEN_SERVICE), NOT_SERVING)
        assert await services.health("scheduler") == SERVING
        await refused(services.tokens.Generate(token_request([1], 1)))
        await refused(services.text.Generate(text_request([1], 1)))
        assert sum(await seated(services)) > 0
    assert await program.exit_code() == 0
    assert not (services.folder / "scheduler.sock").exists()


async def test_the_requests_of_a_worker_that_ends_wait_for_the_next_one(
    services: ServiceSet,
) -> None:
    program = services.programs["worker-0"]
    before = (await services.loads()).counters
    async with two_run_and_two_wait(services):
        program.send(signal.SIGTERM)
        assert await program.exit_code() == 0
        assert not (services.folder / "worker-0.sock").exists()
        await services.until(lambda: seated(services), (0, 2 * SEATS))
        await services.start("worker-0")
    counters = (await services.loads()).counters
    assert counters.requeues - before.requeues == SEATS
    assert "goodbye" in services.programs["scheduler"].log
    # The steps it had were answered: nothing was computed twice but what the next one must.
    made = counters.generation_tokens - before.generation_tokens
    assert made == 2 * SEATS * LONG


async def test_the_requests_of_a_worker_that_ends_go_on_elsewhere(services: ServiceSet) -> None:
    await services.start("worker-1")
    await services.until(lambda: attached(services), {"worker-0", "worker-1"})
    async with asyncio.TaskGroup() as tasks:
        for first in range(2 * SEATS):
            tasks.create_task(answer(services, first, LONG))
        await services.until(lambda: seated(services), (2 * SEATS, 0))
        before = await requeues(services)
        await end(services, "worker-1")
        assert await requeues(services) == before + SEATS


async def requeues(services: ServiceSet) -> int:
    return int((await services.loads()).counters.requeues)


async def attached(services: ServiceSet) -> set[str]:
    return {worker.worker_id for worker in (await services.loads()).workers}


async def end(services: ServiceSet, name: str) -> None:
    program = services.programs.pop(name)
    program.send(signal.SIGTERM)
    assert await program.exit_code() == 0


@pytest.mark.parametrize("name", ["tokenizer", "scheduler"])
async def test_what_outlasts_the_drain_timeout_ends_with_a_status(
    services: ServiceSet, name: str
) -> None:
    await end(services, name)
    services.flags = {**services.flags, name: ("--drain-timeout=0.3",)}
    await services.start(name)
    await services.until_ready()
    try:
        if name == "tokenizer":
            call = services.text.Generate(text_request([1], MOST))
        else:
            call = services.tokens.Generate(token_request([1], MOST))
        await call.read()
        services.programs[name].send(signal.SIGTERM)
        assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, GOING_AWAY[name])
        assert await services.programs[name].exit_code() == 0
    finally:
        services.flags = {key: value for key, value in services.flags.items() if key != name}
        services.flags = {**services.flags, name: ()}


GOING_AWAY = {
    "tokenizer": "this tokenizer is going away",
    "scheduler": "the scheduler is stopping",
}


@pytest.mark.parametrize("name", ["tokenizer", "scheduler"])
async def test_the_second_sigterm_ends_at_once(services: ServiceSet, name: str) -> None:
    program = services.programs[name]
    call = services.text.Generate(text_request([1], MOST))
    await call.read()
    program.send(signal.SIGTERM)
    await services.until(lambda: services.health(name, READY[name]), NOT_SERVING)
    program.send(signal.SIGTERM)
    assert await program.exit_code() == 128 + signal.SIGTERM
    call.cancel()


async def test_the_second_signal_ends_a_worker_at_once(services: ServiceSet) -> None:
    program = services.programs["worker-0"]
    call = services.text.Generate(text_request([1], MOST))
    await call.read()
    # It would be gone before a second one; so it is given both at the same time, in either order.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        program.send(number)
    assert await program.exit_code() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    call.cancel()


# quire up


@contextlib.asynccontextmanager
async def quire_up(
    model: Path, folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Callable[[], list[str]]]]:
    """A set from the command line, and what tells which of its processes are there."""
    marker = f"QUIRE_TEST_MARK={folder}".encode()

    def processes() -> list[str]:
        return [entry.name for entry in Path("/proc").iterdir() if is_marked(entry, marker)]

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "up", "--model", str(model), "--port", "0", *flags),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "QUIRE_TEST_MARK": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process, processes
    finally:
        for pid in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        await process.wait()


def is_marked(entry: Path, marker: bytes) -> bool:
    try:
        return entry.name.isdigit() and marker in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


async def said(process: asyncio.subprocess.Process, pattern: str) -> None:
    """Reads what it says until the pattern comes."""
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line.decode())
        if re.search(pattern, lines[-1]):
            return
    pytest.fail(f"{pattern!r} was not said: {lines}")


async def all_there(processes: Callable[[], list[str]], count: int) -> None:
    while len(processes()) < count:
        await asyncio.sleep(0.02)


@pytest.fixture
def short_folder() -> Any:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        yield Path(folder)


async def ready(process: asyncio.subprocess.Process, _: Callable[[], list[str]]) -> None:
    await said(process, r"127\.0\.0\.1:\d+")


async def starting(_: asyncio.subprocess.Process, processes: Callable[[], list[str]]) -> None:
    await all_there(processes, 4)


@pytest.mark.parametrize("when", [ready, starting])
async def test_ctrl_c_leaves_no_process_and_no_file(
    successor_model: Path,
    short_folder: Path,
    when: Callable[[Any, Any], Awaitable[None]],
) -> None:
    async with quire_up(successor_model, short_folder) as (process, processes):
        await when(process, processes)
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0
        assert processes() == []
    assert os.listdir(short_folder) == []


async def test_a_service_that_dies_at_start_leaves_no_process_and_no_file(
    successor_model: Path, short_folder: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(successor_model, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    async with quire_up(broken, short_folder) as (process, processes):
        out, _ = await process.communicate()
        assert process.returncode == 1
        assert b"quire: worker-0 ended" in out
        assert b"model.safetensors" in out
        assert processes() == []
    assert os.listdir(short_folder) == []
