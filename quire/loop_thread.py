"""An event loop in a thread of its own, for callers that have none.

Owns the thread, what was opened on its loop, and the work that runs there. Whatever ends it, nobody
waits for ever: each job is done or has failed when the thread is over.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from quire.errors import QuireError

_HANGS_AFTER_S = 5.0
"""A loop that has not called a function for so long will not do so any more."""


class Resource(Protocol):
    """What lives on the loop."""

    async def watch(self) -> NoReturn:
        """Runs until the resource is lost.

        Raises:
            QuireError: it is; says why.
        """
        ...


OpenedT = TypeVar("OpenedT", bound=Resource)

Opening = Callable[[], contextlib.AbstractAsyncContextManager[OpenedT]]
"""Makes, on the loop, what is entered before the first job and left after the last."""


class Job:
    """Work on the loop, seen from other threads.

    Args:
        loop: where it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the work is."""
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def call(self, function: Callable[[], object]) -> None:
        """Has `function` called on the loop, unless that is over."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def cancel(self) -> None:
        """Ends the work, soon; `outcome` says when.

        Waits for nothing: this may be called where garbage is collected, which happens in any
        thread and at any place, on the loop or while a lock is held that the work needs to end.
        """
        self.call(self._cancel_task)

    def begin(
        self,
        tasks: asyncio.TaskGroup,
        work: Coroutine[Any, Any, None],
        on_done: Callable[[object], None],
    ) -> None:
        """Starts it; on the loop."""
        self._task = tasks.create_task(work)
        self._task.add_done_callback(on_done)

    def end(self, error: BaseException | None) -> None:
        """Says how it ended; the first one counts."""
        if not self.outcome.done():
            self.outcome.set_result(None) if error is None else self.outcome.set_exception(error)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread(Generic[OpenedT]):
    """A daemon thread with a loop. `start` it once, then `run` jobs, from any thread; then `stop`.

    Args:
        opening: what to open on the loop.
        hurry: called on the loop when `stop` is interrupted: what is to end, ends at once.
        closed: message of the error of jobs that come after the end.
    """

    def __init__(
        self, opening: Opening[OpenedT], *, hurry: Callable[[], object], closed: str
    ) -> None:
        self._opening = opening
        self._hurry = hurry
        self._closed = closed
        self._thread = threading.Thread(target=self._run, name="quire-loop", daemon=True)
        self._opened: concurrent.futures.Future[OpenedT] = concurrent.futures.Future()
        self._process = os.getpid()
        self._begun = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        # The following are set on the loop.
        self._loop: asyncio.AbstractEventLoop
        self._main_task: asyncio.Task[None]
        self._tasks: asyncio.TaskGroup | None = None
        self._failure: QuireError | None = None

    def start(self) -> OpenedT:
        """Starts the thread and waits until everything is open.

        Raises:
            BaseException: whatever opening raised.
        """
        self._thread.start()
        return self._opened.result()

    def run(self, work: Callable[[OpenedT], Awaitable[None]]) -> Job:
        """Starts `work` on the loop.

        Raises:
            QuireError: it is over, or runs in another process; says why.
        """
        self.check_process()
        with self._lock:
            if self._over.is_set():
                raise self._reason()
            job = Job(self._loop)
            self._jobs.add(job)
            self._loop.call_soon_threadsafe(self._begin, job, work)
        return job

    def check_process(self) -> None:
        """Sees to it that nobody waits for a thread that a fork has left behind.

        Raises:
            QuireError: this is a child of the process in which the thread runs.
        """
        if os.getpid() != self._process:
            raise QuireError(
                "it was made before this process was forked, and works only in process "
                f"{self._process}; make one in this process, or start it by spawning"
            )

    def stop(self) -> None:
        """Cancels what runs, closes what was opened, and waits for it. May be called again.

        Raises:
            QuireError: the loop hangs, so that it cannot be waited for.
        """
        if not self._thread.is_alive():
            return
        self._begun.wait()
        if not self._over.is_set():
            self._call(self._main_task.cancel)
        if threading.current_thread() is self._thread:
            return  # e.g. garbage was collected here; the rest follows by itself
        try:
            self._wait_until_over()
        except KeyboardInterrupt:
            self._call(self._hurry)
            self._wait_until_over()
            raise
        self._thread.join()

    def _wait_until_over(self) -> None:
        while not self._over.is_set():
            answered = threading.Event()
            self._call(answered.set)
            if not self._over.wait(_HANGS_AFTER_S) and not answered.is_set():
                raise QuireError("its background thread hangs, and is left behind")

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            if not self._opened.done():
                was_stopped = isinstance(error, asyncio.CancelledError)
                self._opened.set_exception(self._reason() if was_stopped else error)
        finally:
            with self._lock:
                self._over.set()
                left, self._jobs = self._jobs, set()
            self._begun.set()
            for job in left:
                job.end(self._reason())

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._main_task = asyncio.get_running_loop(), task
        self._begun.set()
        async with self._opening() as opened, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(opened))
            self._tasks = tasks
            try:
                self._opened.set_result(opened)
                await self._loop.create_future()
            finally:
                self._tasks = None

    async def _watch(self, opened: OpenedT) -> NoReturn:
        try:
            await opened.watch()
        except QuireError as error:
            self._failure = error
            raise
        raise AssertionError("watching ends only by raising")

    def _begin(self, job: Job, work: Callable[[OpenedT], Awaitable[None]]) -> None:
        if self._tasks is None or self._failure is not None:
            self._end(job, self._reason())
        else:
            # A task that is cancelled before its first step never runs a line of its own.
            job.begin(
                self._tasks, self._guarded(job, work), lambda _: self._end(job, self._reason())
            )

    async def _guarded(self, job: Job, work: Callable[[OpenedT], Awaitable[None]]) -> None:
        """Runs `work`; its failure is the job's alone."""
        error: BaseException | None = self._reason()
        try:
            await work(self._opened.result())
            error = None
        except Exception as failure:  # noqa: BLE001 - whoever waits for the job is told
            error = failure
        finally:
            if isinstance(error, QuireError) and self._failure is not None:
                error = self._failure
            self._end(job, error)

    def _end(self, job: Job, error: BaseException | None) -> None:
        with self._lock:
            self._jobs.discard(job)
        job.end(error)

    def _reason(self) -> QuireError:
        return self._failure or QuireError(self._closed)
