"""Gauges and counters of the core, read from the event loop when somebody collects.

Owns nothing that is counted: all of it is what the core and the engine loop show of themselves.
Labels are of bounded sets: classes, and workers attached.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from services.chassis.metrics import LoopValue, Metrics, Point
from services.scheduler.core.plan import Limits, Loads, WorkerSpec
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.watching import Watching

_COUNTERS = (
    ("steps", "Steps planned."),
    ("mixed_steps", "Steps with at least one prefill row and one decode row."),
    ("chunked_prefills", "Prefill rows that did not reach the end of the prompt."),
    ("preemptions", "Requests that gave way and went back to the queue."),
    ("requeues", "Requests that went back to the queue since their worker was lost."),
    ("displaced", "Running requests that gave way to more important ones."),
    ("recomputed_tokens", "Tokens computed again after a preemption or a requeue."),
    ("prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "Tokens generated."),
    ("discarded_rows", "Rows computed for requests that had ended meanwhile."),
    ("deadline_exceeded", "Requests ended since their deadline passed."),
    ("shed", "Requests ended since they could no longer meet their time to first token."),
    ("evicted_blocks", "Cached blocks given up for others."),
    ("partial_hit_tokens", "Tokens found inside a block of which only the beginning is the same."),
    ("isolated_faults", "Requests ended since their data could not be scheduled."),
)
"""Fields of `Counters` that become counters of the same name."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is read from the event loop at once."""

    loads: Loads
    model: str
    limits: Limits | None
    """When a worker was attached last."""
    stalled_s: float
    serving: bool


class LoadMetrics(Watching):
    """See the module.

    Args:
        metrics: of the process.
        loop: the engine loop.
    """

    def __init__(self, metrics: Metrics, loop: EngineLoop) -> None:
        self._loop = loop
        self._model = ""
        self._limits: Limits | None = None
        self._state = LoopValue(asyncio.get_running_loop(), self._read, self._read())
        self._gauges(metrics)
        self._counters(metrics)

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """See Watcher."""
        del spec, now
        self._model, self._limits = self._loop.model, self._loop.limits

    def _gauges(self, metrics: Metrics) -> None:
        gauge = metrics.gauge
        gauge("quire.scheduler.info", "1; what is served, in the labels.", self._info)
        gauge("quire.scheduler.running", "Requests admitted to a worker.", self._running)
        gauge("quire.scheduler.waiting", "Requests queued.", self._waiting)
        gauge(
            "quire.scheduler.waiting_tokens",
            "Prompt tokens queued.",
            lambda: [(self._loads.waiting_tokens, {})],
        )
        gauge(
            "quire.scheduler.workers", "Workers attached.", lambda: [(len(self._loads.workers), {})]
        )
        gauge("quire.scheduler.kv_blocks", "KV blocks by what they hold.", self._blocks)
        gauge(
            "quire.scheduler.kv_usage",
            "Share of the KV blocks that requests hold, 0 to 1.",
            self._usage,
        )
        gauge(
            "quire.scheduler.class_weight",
            "Share of the tokens that a class has under backlog now, per mille.",
            lambda: [(one.weight, {"class": one.name}) for one in self._loads.classes],
        )
        gauge(
            "quire.scheduler.serving",
            "1 while requests can be served.",
            lambda: [(int(self._state.get().serving), {})],
        )
        gauge(
            "quire.scheduler.stalled",
            "For how long work has waited without any step completing; 0 while it moves.",
            lambda: [(self._state.get().stalled_s, {})],
            unit="s",
        )
        gauge(
            "quire.scheduler.prefix_cache_hit_rate",
            "Share of the tokens looked up in the prefix cache that were found, since start.",
            self._hit_rate,
        )

    def _counters(self, metrics: Metrics) -> None:
        counter = metrics.counter
        for name, text in _COUNTERS:
            counter(f"quire.scheduler.{name}", text, _Reader(self._state, name))
        counter(
            "quire.scheduler.prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            _Reader(self._state, "prefix_query_tokens"),
        )
        counter(
            "quire.scheduler.prefix_cache_hits",
            "Tokens found in the prefix cache.",
            _Reader(self._state, "prefix_hit_tokens"),
        )
        counter(
            "quire.scheduler.requests_accepted",
            "Requests accepted.",
            lambda: [(self._loads.accepted, {})],
        )
        counter("quire.scheduler.ttft_targets", "First tokens by their target.", self._ttft_targets)
        counter(
            "quire.scheduler.request_targets",
            "Requests with a target, by whether all of theirs were met: goodput.",
            self._request_targets,
        )

    # What the collecting thread reads

    def _read(self) -> _State:
        """On the event loop."""
        loop = self._loop
        stall = loop.stall()
        return _State(
            loads=loop.loads(),
            model=self._model,
            limits=self._limits,
            stalled_s=0.0 if stall is None else (loop.now() - stall.since) / 1e6,
            serving=loop.serving,
        )

    def _info(self) -> Iterable[Point]:
        state = self._state.get()
        labels = {"model": state.model, "block_size": "", "prefix_hash": ""}
        if state.limits is not None:
            labels["block_size"] = str(state.limits.block_size)
            labels["prefix_hash"] = state.limits.prefix_hash
        return [(1, labels)]

    @property
    def _loads(self) -> Loads:
        return self._state.get().loads

    def _running(self) -> Iterable[Point]:
        workers = self._loads.workers
        return [(one.running, {"worker": one.worker_id}) for one in workers]

    def _waiting(self) -> Iterable[Point]:
        return [(one.waiting, {"class": one.name}) for one in self._loads.classes]

    def _blocks(self) -> Iterable[Point]:
        for one in self._loads.workers:
            spare = one.blocks_free + one.blocks_evictable + one.blocks_pinned
            for state, count in (
                ("held", one.blocks_total - spare),
                ("cached", one.blocks_evictable),
                ("pinned", one.blocks_pinned),
                ("free", one.blocks_free),
            ):
                yield count, {"worker": one.worker_id, "state": state}

    def _usage(self) -> Iterable[Point]:
        for one in self._loads.workers:
            spare = one.blocks_free + one.blocks_evictable + one.blocks_pinned
            yield 1 - spare / one.blocks_total, {"worker": one.worker_id}

    def _hit_rate(self) -> Iterable[Point]:
        counters = self._loads.counters
        asked = counters.prefix_query_tokens
        return [(counters.prefix_hit_tokens / asked if asked else 0.0, {})]

    def _ttft_targets(self) -> Iterable[Point]:
        for one in self._loads.classes:
            yield one.ttft_met, {"class": one.name, "outcome": "met"}
            yield one.ttft_missed, {"class": one.name, "outcome": "missed"}

    def _request_targets(self) -> Iterable[Point]:
        for one in self._loads.classes:
            yield one.targets_met, {"class": one.name, "outcome": "met"}
            yield one.targets_missed, {"class": one.name, "outcome": "missed"}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one of the core's counters."""

    state: LoopValue[_State]
    name: str

    def __call__(self) -> Iterable[Point]:
        return [(getattr(self.state.get().loads.counters, self.name), {})]
