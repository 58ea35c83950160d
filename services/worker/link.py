"""Keeps the worker attached to its scheduler: dial, attach, and dial again after every end.

Owns the pace of dialling and what the log says about it. What happens on a stream is the stream's.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from quire.v1 import worker_pb2_grpc
from services.chassis.channel import open_channel
from services.chassis.tasks import run_until_first_ends
from services.worker.model_thread import ModelThread
from services.worker.plan import Attachment
from services.worker.stream import End, EndKind, LinkOptions, StepExecutor, StepObserver, Stream

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class SchedulerLink:
    """Keeps this worker attached to its scheduler until told to stop.

    Args:
        options: where and how.
        make_executor: makes the empty state of a new attachment.
        thread: where steps are executed.
        on_ready: told True when steps are taken, False when they are not any more: the attachment
            has ended, or `stopping` is set.
        observe: makes the observer of an attachment, or None: nobody watches.
    """

    def __init__(
        self,
        options: LinkOptions,
        *,
        make_executor: Callable[[Attachment], StepExecutor],
        thread: ModelThread,
        on_ready: Callable[[bool], Awaitable[None]],
        observe: Callable[[Attachment], StepObserver] | None = None,
    ) -> None:
        self._options = options
        self._make_executor = make_executor
        self._thread = thread
        self._on_ready = on_ready
        self._observe = observe
        self._ready = False
        self._random = random.Random()
        self._logged: End | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Attaches, and attaches again whenever the link ends, until `stopping` is set.

        Then the steps already received are answered and the scheduler is told goodbye.

        Raises:
            DeviceLost: the device is gone; the process must end.
        """
        delay = _FIRST_DELAY_S
        while not stopping.is_set():
            dialled = time.monotonic()
            end = await self._attach(stopping)
            if stopping.is_set():
                log.info("detached: %s", end.reason)
                return
            self._log(end)
            if time.monotonic() - dialled > _LONGEST_DELAY_S:
                delay = _FIRST_DELAY_S  # it was attached for a while: a new story
            if end.kind is EndKind.REFUSED:
                delay = _LONGEST_DELAY_S
            await _sleep(delay * self._random.uniform(0.5, 1.0), stopping)
            delay = min(delay * 2, _LONGEST_DELAY_S)

    async def _attach(self, stopping: asyncio.Event) -> End:
        """One stream, from dialling to its end."""
        async with open_channel(self._options.target) as channel:
            stub: Any = worker_pb2_grpc.WorkerLinkServiceStub(channel)
            stream = Stream(stub.Attach(), self._options, self._thread, self._observe)
            try:
                await run_until_first_ends(
                    stream.read(self._attached),
                    stream.write(),
                    stream.stop_on(stopping, self._set_ready),
                )
            finally:
                stream.close()
                await self._set_ready(False)
            return stream.end

    async def _attached(self, attachment: Attachment) -> StepExecutor:
        self._logged = None
        log.info(
            "attached to %s: epoch %d, at most %d requests per step",
            self._options.target,
            attachment.epoch,
            attachment.max_num_seqs,
        )
        executor = self._make_executor(attachment)
        await self._set_ready(True)
        return executor

    async def _set_ready(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            await self._on_ready(ready)

    def _log(self, end: End) -> None:
        """One line per change: a scheduler that stays away is not told every second."""
        if end == self._logged:
            return
        self._logged = end
        target, reason = self._options.target, end.reason
        if end.kind is EndKind.UNREACHABLE:
            log.warning("no scheduler at %s (%s); dialling until it answers", target, reason)
        elif end.kind is EndKind.REFUSED:
            log.error("the scheduler at %s refused this worker: %s; asking again", target, reason)
        elif end.kind is EndKind.LEFT:
            log.info("the scheduler at %s said goodbye: %s; dialling again", target, reason)
        else:
            level = logging.ERROR if end.kind is EndKind.BROKEN else logging.WARNING
            log.log(level, "%s: %s; attaching anew, with empty rows", end.kind.value, reason)


async def _sleep(seconds: float, stopping: asyncio.Event) -> None:
    """Sleeps, but not past `stopping`."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
