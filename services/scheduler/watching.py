"""What may watch the engine loop: a request's course, and each step of each worker.

Watchers decide nothing. They are called on the event loop, between two of its steps, and must be
quick. All instants are microseconds on the clock of the core.
"""

from typing import Protocol

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
