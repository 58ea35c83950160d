"""The one thread that loads the model and executes steps, in the order they were submitted.

Owns the hand-over between an event loop and that thread. Knows nothing of models or steps.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# Nanoseconds busy and idle until an instant, that instant, and whether it is busy since then.
_Past = tuple[int, int, int, bool]
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """What the thread has done since its start, nanoseconds; the call under way counts too."""

    busy_ns: int
    idle_ns: int


class ModelThread:
    """Runs calls one after another beside an event loop.

    The thread is a daemon: a call that never returns must not keep the process from ending. What
    bounds the number of waiting calls is the caller (the step link: `max_in_flight`).

    Args:
        loop: the loop that submits and gets the results.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Replaced as a whole, since other threads read it.
        self._past: _Past = (0, 0, time.monotonic_ns(), False)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """How long the call under way has been running, seconds; 0 where there is none."""
        _, _, since_ns, busy = self._past
        return (time.monotonic_ns() - since_ns) / 1e9 if busy else 0.0

    def times(self) -> ThreadTimes:
        """How long it has been busy and idle; may be called on any thread, and never goes back."""
        now_ns = time.monotonic_ns()  # before the state is read: else it could go back
        # An instant after `now_ns` means that the state is newer than it.
        busy_ns, idle_ns, _, _ = _later(self._past, now_ns)
        return ThreadTimes(busy_ns, idle_ns)

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Queues `call`; its result or exception becomes the future's.

        A future that is cancelled before its turn is skipped; one cancelled later runs to its end
        and what it gives is dropped.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((call, future))
        return future

    async def close(self, timeout_s: float) -> bool:
        """Ends the thread after what is queued.

        Returns:
            False if it was still busy after `timeout_s` seconds.
        """
        self._jobs.put(None)
        await asyncio.wait([self._ended], timeout=timeout_s)
        return self._ended.done()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            if future.cancelled():
                continue
            self._set_busy(True)
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - it goes to whoever awaits the call
                self._tell(_set_exception, future, error)
            else:
                self._tell(_set_result, future, result)
            finally:
                self._set_busy(False)
        self._tell(_set_result, self._ended, None)

    def _set_busy(self, busy: bool) -> None:
        now_ns = time.monotonic_ns()
        busy_ns, idle_ns, _, _ = _later(self._past, now_ns)
        self._past = (busy_ns, idle_ns, now_ns, busy)

    def _tell(self, settle: Callable[..., None], future: "asyncio.Future[Any]", value: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(settle, future, value)
        except RuntimeError:
            log.debug("the loop is closed; a late result is dropped")


def _later(past: _Past, now_ns: int) -> _Past:
    busy_ns, idle_ns, since_ns, busy = past
    passed_ns = max(0, now_ns - since_ns)
    if busy:
        return busy_ns + passed_ns, idle_ns, now_ns, True
    return busy_ns, idle_ns + passed_ns, now_ns, False


def _set_result(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
