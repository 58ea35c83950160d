"""The whole set on this machine: a scheduler, workers and tokenizers, each a process of its own.

Owns the processes, their run folder and its sockets: whatever happens, none outlives the set.
Starts services as programs, never by import.
"""

import asyncio
import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.claims import claimed_folder
from quire.errors import SetFailed
from quire.local_plan import (
    CHECKS,
    GATEWAY,
    PROGRAMS,
    SERVICES,
    LocalConfig,
    Member,
    WrongSettings,
    checked_plan,
)
from quire.local_process import LocalProcess, RestartPolicy

__all__ = [
    "CHECKS",
    "PROGRAMS",
    "LocalConfig",
    "LocalSet",
    "Phase",
    "RestartPolicy",
    "WrongSettings",
]

_DRAIN_ORDER = ((GATEWAY, "tokenizer"), ("scheduler",), ("worker",))
"""Who ends side by side, one group after the other."""
_LONGEST_PARENT = 107 - len("/quire-xxxxxxxx/worker-63.sock")
_POLL_S = 0.05
_FOLLOW_S = 0.1
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


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
            await running.failure()  # or wait until it cannot be kept up any more

    Entering starts all processes at once and returns when every one is ready. From then on a
    process that ends by itself is started again, see `LocalConfig.restarts`. Leaving ends the
    processes: first the doors (tokenizers and gateway), then scheduler, then workers; where one
    was given up, all together and soon, since nothing can be finished any more. `kill` ends them
    all at once.

    Args:
        config: what to start.
        on_phase: called when a process became ready.
        on_restart: told in one line of each process that ended and is started again, and in one
            more when it is ready again.
        log_to: where to copy the logs of all processes, as they are written.

    Raises:
        WrongSettings: on entering: settings are wrong, or a port is taken; nothing was started.
        SetFailed: on entering: a process ended before all were ready.
    """

    def __init__(
        self,
        config: LocalConfig,
        *,
        on_phase: Callable[[Phase], None] | None = None,
        on_restart: Callable[[str], None] | None = None,
        log_to: IO[str] | None = None,
    ) -> None:
        self._config = config
        self._on_phase = on_phase
        self._on_restart = on_restart
        self._log_to = log_to
        self._processes: dict[str, list[LocalProcess]] = {
            service: [] for service in (*SERVICES, GATEWAY)
        }
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._scope = contextlib.AsyncExitStack()
        self._ending = asyncio.Event()
        self._failed = asyncio.Event()
        self._error: SetFailed | None = None
        self.targets: tuple[str, ...] = ()
        """Addresses of the tokenizers, once entered."""
        self.scheduler = ""
        """Address of the scheduler, once entered; a unix socket of this set."""
        self.info = ""
        """Where the scheduler tells facts to others, once entered; "" nowhere."""
        self.openai_url = ""
        """Base URL for OpenAI clients, once entered; "" without a gateway."""
        self.phases: tuple[Phase, ...] = ()
        self.members: tuple[Member, ...] = ()
        """The processes as planned, once entered."""

    @property
    def target(self) -> str:
        """Addresses of the tokenizers as one string, as clients take it."""
        return ",".join(self.targets)

    def processes(self) -> tuple[tuple[str, int], ...]:
        """Name and pid of each process that runs now; one that is started again has a new pid."""
        return tuple((each.name, each.pid) for each in self._all() if each.pid is not None)

    async def __aenter__(self) -> Self:
        config = self._config
        folder = self._scope.enter_context(claimed_folder(_run_parent(), "quire-"))
        try:
            plan = await checked_plan(config, folder)
            self.scheduler, self.info, self.targets = plan.scheduler, plan.info, plan.targets
            self.openai_url = plan.openai_url
            self.members = plan.members
            started = time.monotonic()
            await self._start(plan.members, folder)
            await self._unless_failed(plan.members, started)
            for process in self._all():
                process.restarts = True
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
        """Waits until a process ended by itself and is not started again.

        Raises:
            SetFailed: says which and why.
        """
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    def kill(self) -> None:
        """Ends all processes at once, without draining."""
        self._ending.set()
        for process in self._all():
            process.kill()

    def _all(self) -> tuple[LocalProcess, ...]:
        return tuple(process for some in self._processes.values() for process in some)

    async def _start(self, members: Sequence[Member], folder: Path) -> None:
        config = self._config
        logs = config.log_dir or folder
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetFailed(f"cannot keep the logs in {logs}: {error.strerror}") from error
        tasks = await self._scope.enter_async_context(asyncio.TaskGroup())
        for member in members:
            process = LocalProcess(
                member.name,
                (*config.programs[member.service], *member.flags),
                logs / f"{member.name}.log",
                ending=self._ending,
                policy=config.restarts,
                drain_timeout_s=config.drain_timeout_s,
            )
            if member.service == "worker":
                process.if_killed = "is there enough memory?"
            self._processes[member.service].append(process)
            life = tasks.create_task(self._supervise(process, member, tasks))
            life.add_done_callback(process.is_over)
        if self._log_to is not None:
            tasks.create_task(self._follow(self._log_to))

    async def _supervise(
        self, process: LocalProcess, member: Member, tasks: asyncio.TaskGroup
    ) -> None:
        def on_death(line: str) -> None:
            self._tell(line)
            if member.name in self._returning:
                self._returning[member.name].cancel()
            returning = self._tell_ready_again(process, member, time.monotonic())
            self._returning[member.name] = tasks.create_task(returning)

        try:
            await process.run(on_death)
        except SetFailed as error:
            self._fail(error)
        except OSError as error:
            self._fail(SetFailed(f"cannot start {process.name}: {error}"))

    async def _tell_ready_again(
        self, process: LocalProcess, member: Member, died_at: float
    ) -> None:
        # Nobody answers before it runs, and a fork beside the threads of busy channels may hang.
        await process.runs.wait()
        await _ready(member)
        self._tell(f"{member.name} ready again after {time.monotonic() - died_at:.1f} s")

    def _tell(self, line: str) -> None:
        if self._on_restart is not None:
            self._on_restart(line)

    def _fail(self, error: SetFailed) -> None:
        self._error = self._error or error
        self._failed.set()

    async def _unless_failed(self, members: Sequence[Member], started: float) -> None:
        """Waits until all are ready; SetFailed if one ends before."""

        async def ready(member: Member) -> None:
            await _ready(member)
            phase = Phase(member.name, time.monotonic() - started)
            self.phases = (*self.phases, phase)
            if self._on_phase is not None:
                self._on_phase(phase)

        failure: SetFailed | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self.failure())
                async with asyncio.TaskGroup() as waiting:
                    for member in members:
                        waiting.create_task(ready(member))
                watcher.cancel()
        except* SetFailed as group:
            failure = _first(group)
        if failure is not None:
            raise failure

    async def _follow(self, out: IO[str]) -> None:
        while not self._ending.is_set():
            self._copy_logs(out)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FOLLOW_S):
                    await self._ending.wait()

    def _copy_logs(self, out: IO[str]) -> None:
        width = max((len(process.name) for process in self._all()), default=0)
        for process in self._all():
            for line in process.new_log():
                out.write(f"{process.name:<{width}} | {line}\n")
        out.flush()

    async def _end(self) -> None:
        self._ending.set()
        for task in self._returning.values():
            task.cancel()
        try:
            if self._error is not None:
                hurry_s = min(self._config.hurry_timeout_s, self._config.drain_timeout_s)
                await _ended(self._all(), hurry_s)
            for group in _DRAIN_ORDER:
                await _ended([one for service in group for one in self._processes[service]])
        finally:
            self.kill()
            for process in self._all():
                await process.wait()
            if self._log_to is not None:
                self._copy_logs(self._log_to)
            for process in self._all():
                process.close()
            await self._scope.aclose()


async def _ended(processes: Sequence[LocalProcess], within_s: float | None = None) -> None:
    """Ends all of them, side by side."""
    async with asyncio.TaskGroup() as tasks:
        for process in processes:
            tasks.create_task(process.end(within_s))


async def _ready(member: Member) -> None:
    """Waits until it can serve."""
    for target, service in member.ready_at:
        await _serving(target, service)
    if member.ready_url:
        await _answering(member.ready_url)


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


async def _answering(url: str) -> None:
    """Waits until whoever listens there answers with 200."""
    while True:
        if await asyncio.to_thread(_is_answered, url):
            return
        await asyncio.sleep(_POLL_S)


def _is_answered(url: str) -> bool:
    """Whether it is so now; asked without a proxy, whatever is set up."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, HTTPException):
        return False


def _run_parent() -> Path:
    """Where run folders go: the path of a socket may be 107 bytes long."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp")


def _first(group: BaseExceptionGroup[SetFailed]) -> SetFailed:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SetFailed)
    return error
