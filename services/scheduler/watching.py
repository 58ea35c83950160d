"""What may watch the engine loop: a request's course, and each step of each worker.

Watchers decide nothing. They are called on the event loop, between two of its steps, and must be
quick. A fault of one ends its watching, and no request. All instants are microseconds on the clock
of the core.
"""

import logging
from typing import Any, Protocol

from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    Events,
    Refusal,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.link_timings import StepTimings

log = logging.getLogger(__name__)


class Watcher(Protocol):
    """One who watches; `Watching` does nothing, to begin with."""

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        """A request comes; what is given back goes into the core."""
        ...

    def refused(self, request: AddRequest, refusal: Refusal, now: int) -> None:
        """It was not taken: its end. Comes without `adding` where that was plain before."""
        ...

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        """A step was planned in `took_us`; what is given back goes to the worker."""
        ...

    def answered(
        self, worker_id: str, result: StepResult, timings: StepTimings, events: Events, now: int
    ) -> None:
        """The oldest open step of a worker was answered and applied; its ends follow."""
        ...

    def ended(self, end: Ended, now: int) -> None:
        """The terminal event of a request."""
        ...

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """A worker came."""
        ...

    def lost(self, worker_id: str, reason: str, now: int) -> None:
        """A worker went, and its open steps with it; its requests go back to the queue."""
        ...

    def closing(self, now: int) -> None:
        """The loop ends; what is live gets no terminal event."""
        ...


class Watching:
    """A watcher that does nothing; others override what they are for."""

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        """See Watcher."""
        del now
        return request

    def refused(self, request: AddRequest, refusal: Refusal, now: int) -> None:
        """See Watcher."""

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        """See Watcher."""
        del worker_id, now, took_us
        return step

    def answered(
        self, worker_id: str, result: StepResult, timings: StepTimings, events: Events, now: int
    ) -> None:
        """See Watcher."""

    def ended(self, end: Ended, now: int) -> None:
        """See Watcher."""

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """See Watcher."""

    def lost(self, worker_id: str, reason: str, now: int) -> None:
        """See Watcher."""

    def closing(self, now: int) -> None:
        """See Watcher."""


class Watchers(Watching):
    """Several of them as one, in the order in which they came."""

    def __init__(self) -> None:
        self._all: tuple[Watcher, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._all)

    def join(self, watcher: Watcher) -> None:
        """One more."""
        self._all = (*self._all, watcher)

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        """See Watcher."""
        for watcher in self._all:
            try:
                request = watcher.adding(request, now)
            except Exception as error:  # noqa: BLE001 - its fault ends its watching, no request
                self._leaves(watcher, error)
        return request

    def refused(self, request: AddRequest, refusal: Refusal, now: int) -> None:
        """See Watcher."""
        self._tell("refused", request, refusal, now)

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        """See Watcher."""
        for watcher in self._all:
            try:
                step = watcher.planned(worker_id, step, now, took_us)
            except Exception as error:  # noqa: BLE001 - its fault ends its watching, no request
                self._leaves(watcher, error)
        return step

    def answered(
        self, worker_id: str, result: StepResult, timings: StepTimings, events: Events, now: int
    ) -> None:
        """See Watcher."""
        self._tell("answered", worker_id, result, timings, events, now)

    def ended(self, end: Ended, now: int) -> None:
        """See Watcher."""
        self._tell("ended", end, now)

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """See Watcher."""
        self._tell("attached", spec, now)

    def lost(self, worker_id: str, reason: str, now: int) -> None:
        """See Watcher."""
        self._tell("lost", worker_id, reason, now)

    def closing(self, now: int) -> None:
        """See Watcher."""
        self._tell("closing", now)

    def _tell(self, what: str, *values: Any) -> None:
        for watcher in self._all:
            try:
                getattr(watcher, what)(*values)
            except Exception as error:  # noqa: BLE001 - its fault ends its watching, no request
                self._leaves(watcher, error)

    def _leaves(self, watcher: Watcher, error: Exception) -> None:
        name = type(watcher).__name__
        log.error("%s met a fault and tells nothing any more", name, exc_info=error)
        self._all = tuple(one for one in self._all if one is not watcher)
