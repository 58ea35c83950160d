"""Whether a request may come in now: its class, its fit, its deadline, bounds, and its target.

Refuses with the true limit, and where it may pass by itself with the time to try again.
"""

from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.core import admission
from services.scheduler.core.admission import Backlog
from services.scheduler.core.config import Config
from services.scheduler.core.order import WaitingQueue
from services.scheduler.core.plan import AddRequest, Limits, Refusal, Refused
from services.scheduler.core.queue_model import QueueModel
from services.scheduler.core.request import Request
from services.scheduler.core.step_time import StepShape
from services.scheduler.core.worker_state import WorkerState


class Entrance:
    """Checks requests before they are queued.

    Args:
        config: in force; to be replaced when another one is.
        waiting: the queue.
        backlog: what is counted of it.
        queue_model: how fast it moves.
        workers: attached ones.
    """

    def __init__(
        self,
        config: Config,
        waiting: WaitingQueue,
        backlog: Backlog,
        queue_model: QueueModel,
        workers: Mapping[str, WorkerState],
    ) -> None:
        self.config = config
        self._waiting = waiting
        self._backlog = backlog
        self._queue_model = queue_model
        self._workers = workers

    def limit_of(
        self, spec: AddRequest, limits: Limits | None, live: Request | None, now: int
    ) -> int | None:
        """The most tokens in all that the request may reach; None while no worker can tell.

        Args:
            spec: the request.
            limits: of the attached workers.
            live: the request of the same id that is here already.
            now: microseconds.

        Raises:
            Refused: it cannot be taken, or not now.
        """
        if self._waiting.rank(spec.priority_class) is None:
            names = tuple(one.name for one in self.config.classes)
            field = "request.scheduling.priority_class"
            raise Refused(
                Refusal(field=field, reason="UNKNOWN_CLASS", limit=0, got=0, choices=names)
            )
        limit = None if limits is None else admission.token_limit(spec, limits)
        if spec.deadline is not None and spec.deadline <= now:
            field = "request.scheduling.deadline_ms"
            raise _refused(field, "DEADLINE", got=now - spec.deadline)
        if live is not None and spec.attempt <= live.spec.attempt:
            least = live.spec.attempt + 1
            raise _refused("request.attempt", "DUPLICATE", limit=least, got=spec.attempt)
        if live is None:
            self._check_bounds(spec, now)
        return limit

    def service_us(self, spec: AddRequest) -> int:
        """How long its prefill takes at the least, as far as is known; microseconds."""
        tokens = int(spec.prompt.size)
        shape = StepShape(tokens=tokens, rows=1, context=tokens)
        times = [worker.step_time.predict_us(shape) for worker in self._workers.values()]
        return min((time for time in times if time is not None), default=0)

    def _check_bounds(self, spec: AddRequest, now: int) -> None:
        workers = [worker.spec for worker in self._workers.values()]
        refusal = self._backlog.refusal(spec, workers) or self._late(spec)
        if refusal is None:
            return
        if refusal.reason == "EXCEEDS_QUEUE":
            raise Refused(refusal)
        excess = refusal.got - refusal.limit if "TOKENS" in refusal.reason else 0
        # Whoever is next has waited so long and waits on: the queue is no faster than that.
        waited = max((now - head.arrived for head in self._waiting.heads()), default=0)
        retry = self._queue_model.retry_after_us(max(excess, int(spec.prompt.size)), waited)
        raise Refused(replace(refusal, retry_after_us=retry))

    def _late(self, spec: AddRequest) -> Refusal | None:
        """The refusal of a request that asks for it where its TTFT target cannot be met."""
        rank = self._waiting.rank(spec.priority_class)
        assert rank is not None
        target = spec.ttft_target_us or self.config.classes[rank].ttft_target_us
        # The first token of one that returns is not the first one.
        if not spec.shed_late or target is None or spec.attempt:
            return None
        ahead = self._waiting.tokens_ahead(spec, rank)
        wait = self._queue_model.wait_us(ahead) if ahead else 0
        expected = (wait or 0) + self.service_us(spec)
        if expected <= target:
            return None
        return Refusal(
            field="request.scheduling.ttft_target_ms",
            reason="TTFT_TARGET",
            limit=target // 1000,
            got=expected // 1000,
        )


def _refused(field: str, reason: str, limit: int = 0, got: int = 0) -> Refused:
    return Refused(Refusal(field=field, reason=reason, limit=limit, got=got))
