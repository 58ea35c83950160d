"""The services as processes that a test may kill, stop and start again, one by one.

`quire.local.LocalSet` mends what breaks; here nothing is mended but by the test.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import info_pb2, info_pb2_grpc, text_pb2_grpc, token_pb2_grpc

ROOT = Path(__file__).parents[2]

TEXT_SERVICE, TOKEN_SERVICE = "quire.v1.TextService", "quire.v1.TokenService"
WORKER_LINK_SERVICE = "quire.v1.WorkerLinkService"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

QUICK_DIAL = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100))


_KILLED_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Program:
    """One running service. Killed when the test's process ends, whatever ends that."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, command: Sequence[str], log: Path) -> "Program":
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _KILLED_WITH_PARENT, *command),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def kill(self) -> None:
        """As `kill -9` does; also what ends it after a test, in whatever state it is."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        await self.exit_code()

    def rss_mib(self) -> float:
        """Resident memory of the service."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class ServiceSet:
    """Processes by name ("scheduler", "tokenizer", "worker-0" …), and channels to both doors.

    Args:
        folder: where sockets and logs are; its name must be short.
        model: folder of the model.
        flags: further flags by kind of service.
    """

    def __init__(self, folder: Path, model: Path, flags: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.model = model
        self.flags = flags
        self.programs: dict[str, Program] = {}
        self.text_channel = self.channel("tokenizer")
        self.token_channel = self.channel("scheduler")

    def address(self, name: str) -> str:
        return f"unix://{self.folder}/{name}.sock"

    def channel(self, name: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address(name), options=QUICK_DIAL)

    @property
    def text(self) -> Any:
        return text_pb2_grpc.TextServiceStub(self.text_channel)

    @property
    def tokens(self) -> Any:
        return token_pb2_grpc.TokenServiceStub(self.token_channel)

    async def start(self, *names: str) -> None:
        """Starts these services and waits for none of them."""
        for name in names:
            self.programs[name] = await Program.start(
                self.command(name), self.folder / f"{name}.log"
            )

    async def end(self) -> None:
        """Nothing is left of it."""
        await self.text_channel.close()
        await self.token_channel.close()
        for program in self.programs.values():
            await program.kill()

    def command(self, name: str) -> tuple[str, ...]:
        kind = name.partition("-")[0]
        flags = [f"--listen={self.address(name)}", *self.flags.get(kind, ())]
        if kind != "scheduler":
            flags += [f"--model={self.model}", f"--scheduler={self.address('scheduler')}"]
            flags += ["--served-model-name=tiny"]
        if kind == "worker":
            flags += [f"--worker-id={name}", "--device=cpu", "--num-threads=1"]
        return (sys.executable, "-m", f"services.{kind}", *flags)

    async def health(self, name: str, service: str = "") -> int | None:
        """What the health service of a process says; None where nobody answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        async with self.channel(name) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.aio.AioRpcError:
                return None  # not there yet, or not any more
        return int(answer.status)

    async def until_ready(self) -> None:
        """Waits until every service that runs can serve."""
        named = {"scheduler": TOKEN_SERVICE, "tokenizer": TEXT_SERVICE}
        for name in list(self.programs):
            service = named.get(name, WORKER_LINK_SERVICE)
            while await self.health(name, service) != SERVING:
                assert self.programs[name].is_running, self.logs
                await asyncio.sleep(0.02)

    async def until(self, ask: Callable[[], Any], wanted: object = True) -> None:
        """Waits for an answer, and fails with the logs if it does not come."""
        try:
            async with asyncio.timeout(60):
                while await ask() != wanted:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it did not come to that; logs:\n{self.logs}") from None

    @property
    def logs(self) -> str:
        """The last words of all."""
        return "\n".join(program.log[-2000:] for program in self.programs.values())

    async def loads(self) -> info_pb2.GetLoadsResponse:
        stub = info_pb2_grpc.InfoServiceStub(self.token_channel)
        return await stub.GetLoads(info_pb2.GetLoadsRequest(), timeout=10)

    async def generated(self) -> int:
        """Tokens emitted since the scheduler started."""
        return int((await self.loads()).counters.generation_tokens)

    async def at_rest(self) -> bool:
        """Nothing lives, and every block is free or evictable."""
        return is_at_rest(await self.loads())


def is_at_rest(loads: info_pb2.GetLoadsResponse) -> bool:
    held = [w.blocks_total - w.blocks_free - w.blocks_evictable for w in loads.workers]
    return not (loads.running or loads.waiting or any(held))


@contextlib.asynccontextmanager
async def serving(
    model: Path, flags: Mapping[str, Sequence[str]] | None = None, *, workers: int = 1
) -> AsyncIterator[ServiceSet]:
    """A scheduler, a tokenizer and workers, all ready; block tables are compared in every step."""
    flags = dict(flags or {})
    flags["scheduler"] = ("--check-block-tables=true", *flags.get("scheduler", ()))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        services = ServiceSet(Path(folder), model, flags)
        try:
            names = [f"worker-{number}" for number in range(workers)]
            await services.start("scheduler", *names, "tokenizer")
            await services.until_ready()
            yield services
        finally:
            await services.end()
