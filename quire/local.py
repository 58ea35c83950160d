"""The whole set on this machine: one process each for scheduler, worker and tokenizer.

Owns the processes, their run folder and its socket: whatever happens, none outlives the set.
Starts services as programs, never by import, and knows of them only their flags and health names.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, NoReturn, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import die_with_parent
from quire.claims import claimed_folder
from quire.errors import SetFailed

PROGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: (sys.executable, "-m", f"services.{name}")
        for name in ("scheduler", "worker", "tokenizer")
    }
)
"""How each process is started, without its flags."""

_DRAIN_ORDER = ("tokenizer", "scheduler", "worker")
_TEXT_SERVICE, _TOKEN_SERVICE, _PROCESS = "quire.v1.TextService", "quire.v1.TokenService", ""

_LONGEST_PARENT = 107 - len("/quire-xxxxxxxx/scheduler.sock")
_POLL_S = 0.05
_FOLLOW_S = 0.1
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What to start.

    Attributes:
        model: the model's folder.
        served_model_name: what clients call it.
        host: where the tokenizer listens.
        port: its port; 0 for any free one.
        flags: further flags by process, e.g. `{"worker": ("--dtype", "float32")}`.
        programs: how each process is started, without its flags.
        log_dir: where the logs go; None for the run folder, which goes away with the set.
        drain_timeout_s: how long a process may take to end after it was asked, seconds.
    """

    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 50051
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=lambda: PROGRAMS)
    log_dir: Path | None = None
    drain_timeout_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A process became ready.

    Attributes:
        name: of the process.
        seconds: since the set was started.
    """

    name: str
    seconds: float


class LocalSet:
    """A set that runs as long as its `async with`.

        async with LocalSet(config) as running:
            ...  # talk to running.target
            await running.failure()  # or wait until a process ends by itself

    Entering starts all processes at once and returns when every one is ready; leaving ends them in
    the order tokenizer, scheduler, worker. `kill` ends them all at once.

    Args:
        config: what to start.
        on_phase: called when a process became ready.
        log_to: where to copy the logs of all processes, as they are written.

    Raises:
        SetFailed: on entering: the port is taken, or a process ended before it was ready.
    """

    def __init__(
        self,
        config: LocalConfig,
        *,
        on_phase: Callable[[Phase], None] | None = None,
        log_to: IO[str] | None = None,
    ) -> None:
        self._config = config
        self._on_phase = on_phase
        self._log_to = log_to
        self._processes: dict[str, _Process] = {}
        self._scope = contextlib.AsyncExitStack()
        self.target = ""
        """Address of the tokenizer, once entered."""
        self.scheduler = ""
        """Address of the scheduler, once entered; a unix socket of this set."""
        self.phases: tuple[Phase, ...] = ()

    async def __aenter__(self) -> Self:
        config = self._config
        port = _free_port(config.host, config.port)
        self.target = _address(_dialled(config.host), port)
        folder = self._scope.enter_context(claimed_folder(_run_parent(), "quire-"))
        try:
            self.scheduler = f"unix://{folder}/scheduler.sock"
            await self._start(folder, port)
            await self._watched(self._until_ready(self.scheduler))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def failure(self) -> NoReturn:
        """Waits until a process ends by itself.

        Raises:
            SetFailed: it did; says which and why.
        """
        await self._watched(_forever())
        raise AssertionError("the line above ends only by raising")

    def kill(self) -> None:
        """Ends all processes at once, without draining."""
        for process in self._processes.values():
            process.kill()

    async def _start(self, folder: Path, port: int) -> None:
        config = self._config
        socket_target = self.scheduler
        model = ("--model", str(config.model), "--served-model-name", config.served_model_name)
        flags = {
            "scheduler": ("--listen", socket_target),
            "worker": ("--scheduler", socket_target, *model),
            "tokenizer": (
                *("--listen", _address(config.host, port), "--scheduler", socket_target),
                *model,
            ),
        }
        logs = config.log_dir or folder
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for name, own in flags.items():
                command = (*config.programs[name], *own, *config.flags.get(name, ()))
                self._processes[name] = await _Process.start(name, command, logs / f"{name}.log")
        except OSError as error:
            raise SetFailed(f"cannot start the set: {error}") from error

    async def _until_ready(self, scheduler: str) -> None:
        started = time.monotonic()

        async def ready(name: str, target: str, service: str) -> None:
            await _serving(target, service)
            phase = Phase(name, time.monotonic() - started)
            self.phases = (*self.phases, phase)
            if self._on_phase is not None:
                self._on_phase(phase)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ready("scheduler", scheduler, _PROCESS))
            # The scheduler can serve tokens once a worker is attached to it.
            tasks.create_task(ready("worker", scheduler, _TOKEN_SERVICE))
            tasks.create_task(ready("tokenizer", self.target, _TEXT_SERVICE))

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it is done or a process ends, which is a SetFailed."""
        failure: SetFailed | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [
                    tasks.create_task(process.ended()) for process in self._processes.values()
                ]
                if self._log_to is not None:
                    watchers.append(tasks.create_task(self._follow(self._log_to)))
                await tasks.create_task(work)
                for watcher in watchers:
                    watcher.cancel()
        except* SetFailed as group:
            failure = _first(group)
        if failure is not None:
            raise failure

    async def _follow(self, out: IO[str]) -> NoReturn:
        while True:
            self._copy_logs(out)
            await asyncio.sleep(_FOLLOW_S)

    def _copy_logs(self, out: IO[str]) -> None:
        for process in self._processes.values():
            out.write(process.new_log())
        out.flush()

    async def _end(self) -> None:
        try:
            for name in _DRAIN_ORDER:
                if name in self._processes:
                    await self._processes[name].end(self._config.drain_timeout_s)
        finally:
            self.kill()
            for process in self._processes.values():
                await process.handle.wait()
            if self._log_to is not None:
                self._copy_logs(self._log_to)
            for process in self._processes.values():
                process.log.close()
            await self._scope.aclose()


@dataclass(frozen=True, slots=True)
class _Process:
    """One running program and its log file, opened for reading."""

    name: str
    handle: asyncio.subprocess.Process
    log: IO[bytes]

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path) -> "_Process":
        launcher = (sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()))
        with log.open("wb") as out:
            handle = await asyncio.create_subprocess_exec(
                *launcher,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # A session of its own: the terminal's Ctrl-C is for the parent, which drains.
                start_new_session=True,
            )
        return cls(name, handle, log.open("rb"))

    def new_log(self) -> str:
        """The whole lines that were logged since the call before."""
        lines, newline, rest = self.log.read().rpartition(b"\n")
        self.log.seek(-len(rest), os.SEEK_CUR)
        return (lines + newline).decode("utf-8", errors="replace")

    async def ended(self) -> NoReturn:
        """Waits for the end, which here is always too early."""
        code = await self.handle.wait()
        if code == -signal.SIGKILL:
            # What was logged last has nothing to do with it.
            raise SetFailed(f"the {self.name} was killed by SIGKILL (is there enough memory?)")
        how = (
            f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        )
        raise SetFailed(f"the {self.name} {how}: {_last_line(Path(self.log.name))}")

    def kill(self) -> None:
        """Ends the process at once."""
        if self.handle.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # The process in between kills its program and ends when that is gone.
                self.handle.send_signal(signal.SIGUSR1)

    async def end(self, timeout_s: float) -> None:
        """Asks the process to end, and makes it after `timeout_s` seconds."""
        if self.handle.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.handle.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.handle.wait()
        except TimeoutError:
            self.kill()
            await self.handle.wait()


async def _serving(target: str, service: str) -> None:
    """Waits until the health service at `target` says that `service` can serve."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                response = await check(request, timeout=5.0)
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_S)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


def _run_parent() -> Path:
    """Where run folders go: the path of a socket may be 107 bytes long."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp")


def _free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, after trying it out."""
    if not 0 <= port <= 65_535:
        raise SetFailed(f"the port must be from 0 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            return int(trial.getsockname()[1])
    except OSError as error:
        where = _address(host, port)
        reason = error.strerror or str(error)
        raise SetFailed(f"cannot listen on {where} ({reason}); choose another --port") from error


def _dialled(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it logged nothing")


def _first(group: BaseExceptionGroup[SetFailed]) -> SetFailed:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SetFailed)
    return error
