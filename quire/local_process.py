"""One process of a local set: started, watched, started again when it ends by itself, ended.

Owns the process, its log file and the rule when to start it again. Knows nothing of services.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire import die_with_parent
from quire.errors import SetFailed

_TAIL_BYTES = 65_536
"""How far back the last line of a log is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a process that ended by itself is started again, and when not any more.

    Attributes:
        first_delay_s: wait before the first restart, seconds; doubled for each further one.
        longest_delay_s: the doubling stops here, seconds.
        steady_s: after a run of this length the wait is the first one again, seconds.
        most_deaths: this many ends within `within_s` seconds are the last.
        within_s: see `most_deaths`.
    """

    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0
    steady_s: float = 60.0
    most_deaths: int = 5
    within_s: float = 60.0


class Deaths:
    """The ends of one process so far.

    Args:
        policy: what to make of them.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque(maxlen=policy.most_deaths)
        self._delay_s = policy.first_delay_s

    def delay_after(self, now: float, ran_s: float) -> float | None:
        """Seconds to wait before the next start; None gives the process up.

        Args:
            now: when the process ended, seconds on any steady clock.
            ran_s: how long it ran, seconds.
        """
        policy = self._policy
        if ran_s >= policy.steady_s:
            self._delay_s = policy.first_delay_s
        self._recent.append(now)
        full = len(self._recent) == policy.most_deaths
        if full and now - self._recent[0] <= policy.within_s:
            return None
        delay = self._delay_s
        self._delay_s = min(2 * delay, policy.longest_delay_s)
        return delay


class LocalProcess:
    """One supervised process; `run` is its life.

    Args:
        name: of the process, for messages.
        command: the program and its arguments.
        log: where its output goes; emptied by the first start, continued by the others.
        ending: set when the set ends: nothing is started from then on.
        policy: when to start it again.
        drain_timeout_s: how long it may take to end after it was asked, seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        ending: asyncio.Event,
        policy: RestartPolicy,
        drain_timeout_s: float,
    ) -> None:
        self.name = name
        self.pid: int | None = None
        """Of the program while it runs."""
        self.runs = asyncio.Event()
        """Set while the program runs."""
        self.restarts = False
        """Whether an end that nobody asked for is followed by a new start."""
        self.if_killed = ""
        """What to ask oneself when it was killed by SIGKILL, for the message."""
        self._over = asyncio.Event()
        self._command = tuple(command)
        self._path = log
        self._ending = ending
        self._policy = policy
        self._drain_timeout_s = drain_timeout_s
        self._handle: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._log_start = 0
        self._killed = False

    async def run(self, say: Callable[[str], None]) -> None:
        """Starts the program, again and again as far as the policy goes, until the set ends.

        Not to be cancelled, since a start cut short would leave a process to nobody: set `ending`
        and call `end` or `kill`.

        Args:
            say: told in one line of each end that is followed by a new start.

        Raises:
            SetFailed: it ended by itself and is not started again.
            OSError: it cannot be started.
        """
        deaths = Deaths(self._policy)
        while not self._ending.is_set():
            started = time.monotonic()
            code = await self._run_once()
            if self._ending.is_set():
                return
            how = f"{self.name} {self._how(code)}"
            if not self.restarts:
                raise SetFailed(how)
            now = time.monotonic()
            delay = deaths.delay_after(now, now - started)
            if delay is None:
                times, within_s = self._policy.most_deaths, self._policy.within_s
                raise SetFailed(f"{how}; given up, since it ended {times} times in {within_s:g} s")
            say(f"{how}; it is started again in {delay:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._ending.wait()

    def kill(self) -> None:
        """Ends the process at once."""
        self._killed = True
        # The process in between kills its program and ends when that is gone.
        self._send(signal.SIGUSR1)

    async def end(self, within_s: float | None = None) -> None:
        """Asks the process to end, makes it after the time for that, and waits for it.

        Args:
            within_s: the time, seconds; None for its own.
        """
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain_timeout_s if within_s is None else within_s):
                await self._over.wait()
        except TimeoutError:
            self.kill()
            await self._over.wait()

    def is_over(self, _: asyncio.Task[None]) -> None:
        """To be called when the task of `run` is done, however it ended."""
        self._over.set()

    async def wait(self) -> None:
        """Waits until `run` is done."""
        await self._over.wait()

    def new_log(self) -> list[str]:
        """The whole lines that were logged since the call before."""
        if self._log is None:
            return []
        lines, newline, rest = self._log.read().rpartition(b"\n")
        self._log.seek(-len(rest), os.SEEK_CUR)
        return (lines + newline).decode("utf-8", errors="replace").splitlines()

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    async def _run_once(self) -> int:
        handle = await self._start()
        if self._ending.is_set():  # it may have been told before there was anybody to tell
            self._send(signal.SIGUSR1 if self._killed else signal.SIGTERM)
        assert handle.stdout is not None
        told = await handle.stdout.readline()
        self.pid = int(told) if told.strip().isdigit() else None
        self.runs.set()
        code = await handle.wait()
        self.pid = None
        self.runs.clear()
        # Whatever the program left running, or the program itself if only the process in between
        # is gone: it would hold the port of the next start.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(handle.pid, signal.SIGKILL)
        return code

    async def _start(self) -> asyncio.subprocess.Process:
        first = self._log is None
        with self._path.open("wb" if first else "ab") as out:
            self._log_start = out.tell()
            self._handle = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", die_with_parent.__file__),
                *(str(os.getpid()), str(self._drain_timeout_s)),
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,  # for the pid
                stderr=out,
                # A session of its own: the terminal's Ctrl-C is for the parent, which drains.
                start_new_session=True,
            )
        if self._log is None:
            self._log = self._path.open("rb")
        return self._handle

    def _send(self, number: signal.Signals) -> None:
        if self._handle is not None and self._handle.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._handle.send_signal(number)

    def _how(self, code: int) -> str:
        if code == -signal.SIGKILL:
            # What was logged last has nothing to do with it.
            return f"was killed by SIGKILL{self.if_killed and f' ({self.if_killed})'}"
        if code == 0:
            return "ended in order, though nobody asked it to"
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        return f"{how}: {_last_line(self._path, self._log_start)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log: Path, start: int) -> str:
    """The last line after byte `start` that says something."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it logged nothing")
