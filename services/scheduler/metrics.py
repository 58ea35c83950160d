"""Metrics of what happens in the scheduler: requests, their tokens, steps, workers.

Recorded as it happens: a request at its end, its first token when that comes, a step at its answer.
What the core shows of itself is in `load_metrics`. Labels are of bounded sets: classes, workers
attached, reasons; never a caller's text.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from services.chassis.metrics import (
    DURATION_S,
    GAP_S,
    LATENCY_S,
    STEP_S,
    LoopValue,
    Metrics,
    Point,
)
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    EndReason,
    Events,
    IntArray,
    NewRow,
    Refusal,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.link_timings import StepTimings
from services.scheduler.watching import Watching

TOKENS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000),
    *(200_000, 500_000, 1_000_000),
)
"""Bounds of token counts of a request; those of vLLM."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of tokens in one step; those of vLLM."""


REFUSALS = (
    *("CONTEXT_LENGTH", "EXCEEDS_KV_CAPACITY", "EXCEEDS_QUEUE", "VOCABULARY", "UNKNOWN_CLASS"),
    *("DEADLINE", "DUPLICATE", "QUEUE_REQUESTS", "QUEUE_TOKENS", "TENANT_REQUESTS"),
    *("TENANT_TOKENS", "TENANT_LIVE", "TTFT_TARGET"),
)
"""The reasons of a `Refusal`; each has its series from the start."""

_MARK_US = 1_000_000
_WINDOW_US = 30_000_000


@dataclass(frozen=True, slots=True)
class _State:
    """What is read from the event loop at once."""

    utilization: dict[str, float]
    throughput: dict[str, float]
    time_per_token_s: float


class _Window:
    """How much totals grew in the last half minute. Instants in microseconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, tuple[int, ...]]] = deque()  # a second apart or more

    def mark(self, now: int, totals: tuple[int, ...]) -> None:
        """Notes the totals of now; call it whenever they grew."""
        if not self._marks or now - self._marks[-1][0] >= _MARK_US:
            self._marks.append((now, totals))
        while now - self._marks[0][0] > _WINDOW_US:
            self._marks.popleft()

    def growth(self, now: int, totals: tuple[int, ...]) -> tuple[int, list[int]]:
        """Since when, microseconds ago, and by how much each grew since then."""
        self.mark(now, totals)
        since, before = self._marks[0]
        return now - since, [total - was for total, was in zip(totals, before, strict=True)]


@dataclass(slots=True)
class _Live:
    """A live request. Instants in microseconds.

    Args:
        arrived: when it came.
        class_name: its priority class.
        admitted: it was on a worker.
        seat: where it was put last; its last token's instant stands there as long as it is its own.
        last_token: that instant, where somebody else has its seat; 0: none yet.
    """

    arrived: int
    class_name: str
    admitted: bool = False
    seat: "tuple[_Lane, int] | None" = None
    last_token: int = 0


@dataclass(slots=True, eq=False)
class _Lane:
    """One attached worker: who has which slot, and when each had a token last. Microseconds."""

    spec: WorkerSpec
    handle: IntArray
    arrived: IntArray
    """When the request in the slot came, while it waits for its first token; else 0."""
    last_token: IntArray
    open: deque[IntArray] = field(default_factory=deque)
    """Slots of the steps that were sent."""
    sent: deque[int] = field(default_factory=deque)
    busy_us: int = 0
    idle_us: int = 0
    window: _Window = field(default_factory=_Window)

    def utilization(self, now: int) -> float:
        """Share of the last half minute that it computed, 0 to 1."""
        elapsed, (busy_us,) = self.window.growth(now, (self.busy_us,))
        return min(1.0, busy_us / elapsed) if elapsed else 0.0


class SchedulerMetrics(Watching):
    """See the module.

    Args:
        metrics: of the process.
        loop: the engine loop.
    """

    def __init__(self, metrics: Metrics, loop: EngineLoop) -> None:
        self._loop = loop
        self._lanes: dict[str, _Lane] = {}
        self._live: dict[int, _Live] = {}
        # Series that are there from the start can be told from ones that nobody counts, and a rate
        # sees their first increment.
        classes = tuple(one.name for one in loop.config.classes)
        self._ended = {(reason.value, name): 0 for reason in EndReason for name in classes}
        self._refused = dict.fromkeys(REFUSALS, 0)
        self._computed = {"prefill": 0, "decode": 0}
        self._admitted_tokens = {"computed": 0, "cached": 0}
        self._workers_lost = 0
        self._gaps = 0
        self._gaps_us = 0
        self._recent = _Window()
        self._state = LoopValue(asyncio.get_running_loop(), self._read, self._read())
        self._request_histograms(metrics)
        for by_class in (self._whole, self._queue, self._ttft, self._tpot):
            for name in classes:
                by_class.record(0.0, name, times=0)
        self._step_histograms(metrics)
        self._gauges(metrics)
        self._counters(metrics)

    # Watching

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        """See Watcher."""
        name = request.priority_class or self._loop.config.default_class
        self._live[request.handle] = _Live(now, name)
        if request.max_tokens is not None:
            self._max_tokens.record(request.max_tokens)
        return request

    def refused(self, request: AddRequest, refusal: Refusal, now: int) -> None:
        """See Watcher."""
        del now
        self._live.pop(request.handle, None)
        self._refused[refusal.reason] = self._refused.get(refusal.reason, 0) + 1

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """See Watcher."""
        del now
        handle, arrived, last = (np.zeros(spec.num_slots, np.int64) for _ in range(3))
        self._lanes[spec.worker_id] = _Lane(spec, handle, arrived, last)

    def lost(self, worker_id: str, reason: str, now: int) -> None:
        """See Watcher."""
        del reason, now
        del self._lanes[worker_id]
        self._workers_lost += 1

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        """See Watcher."""
        lane = self._lanes[worker_id]
        for row in step.new_rows:
            self._seat(lane, row)
        tokens = step.num_tokens
        total = int(tokens.sum())
        # A prefill that has one token left counts as a decode here; what a step costs is the same.
        decodes = int(np.count_nonzero(tokens == 1))
        self._computed["decode"] += decodes
        self._computed["prefill"] += total - decodes
        self._recent.mark(now, self._recent_totals())
        lane.open.append(step.slots)
        lane.sent.append(now)
        self._plan_time.record(took_us / 1e6)
        if total:
            self._step_tokens.record(total)
            self._step_rows.record(step.slots.size)
        return step

    def answered(
        self, worker_id: str, result: StepResult, timings: StepTimings, events: Events, now: int
    ) -> None:
        """See Watcher."""
        lane = self._lanes[worker_id]
        slots, sent = lane.open.popleft(), lane.sent.popleft()
        lane.busy_us += timings.execute_us
        lane.idle_us += timings.idle_us
        lane.window.mark(now, (lane.busy_us,))
        self._execute.record(timings.execute_us / 1e6)
        self._link.record(max(0, now - sent - timings.wait_us - timings.execute_us) / 1e6)
        sampled = slots[result.counts > 0]
        if sampled.size > events.handles.size:  # some had ended, or gave way, meanwhile
            sampled = sampled[np.isin(lane.handle[sampled], events.handles)]
        if sampled.size:
            self._tokens(lane, sampled, now)

    def ended(self, end: Ended, now: int) -> None:
        """See Watcher."""
        del now
        self._live.pop(end.handle, None)
        key = (end.reason.value, end.class_name)
        self._ended[key] = self._ended.get(key, 0) + 1
        self._whole.record((end.ended - end.arrived) / 1e6, end.class_name)
        self._prompt.record(end.prompt_tokens)
        self._generated.record(end.completion_tokens)
        if end.admitted is None:
            return
        self._queue.record((end.admitted - end.arrived) / 1e6, end.class_name)
        self._inference.record((end.ended - end.admitted) / 1e6)
        self._worker_time.record(end.worker_us / 1e6)
        self._computed_prompt.record(end.prompt_tokens - end.cached_tokens)
        if end.first_token is None:
            return
        self._prefill.record((end.first_token - end.admitted) / 1e6)
        decode_s = (end.ended - end.first_token) / 1e6
        self._decode.record(decode_s)
        if end.completion_tokens > 1:
            self._tpot.record(decode_s / (end.completion_tokens - 1), end.class_name)

    def _seat(self, lane: _Lane, row: NewRow) -> None:
        """A request comes to a worker, for the first time or again."""
        before = self._live.get(int(lane.handle[row.slot]))
        if before is not None and before.seat == (lane, row.slot):  # it gave way, and waits
            before.seat, before.last_token = None, int(lane.last_token[row.slot])
        live = self._live[row.handle]
        if live.seat is not None:
            old_lane, old_slot = live.seat
            live.last_token = int(old_lane.last_token[old_slot])
        if not live.admitted:
            live.admitted = True
            cached = min(row.num_computed, row.prompt_len)
            self._admitted_tokens["cached"] += cached
            self._admitted_tokens["computed"] += row.prompt_len - cached
        live.seat = lane, row.slot
        fresh = row.token_ids.size == row.prompt_len
        lane.handle[row.slot] = row.handle
        lane.arrived[row.slot] = live.arrived if fresh else 0
        lane.last_token[row.slot] = live.last_token

    def _tokens(self, lane: _Lane, slots: IntArray, now: int) -> None:
        """Records first tokens and gaps of rows that have a new token."""
        last = lane.last_token[slots]
        lane.last_token[slots] = now
        firsts = slots[(last == 0) & (lane.arrived[slots] > 0)]
        for slot in firsts.tolist():
            name = self._live[int(lane.handle[slot])].class_name
            self._ttft.record((now - int(lane.arrived[slot])) / 1e6, name)
        lane.arrived[firsts] = 0
        gaps = now - last[last > 0]
        if not gaps.size:
            return
        self._gaps += gaps.size
        self._gaps_us += int(gaps.sum())
        if (gaps == gaps[0]).all():  # nearly always: all of them were in the step before
            self._gap.record(int(gaps[0]) / 1e6, times=gaps.size)
            return
        for gap, count in zip(*np.unique(gaps, return_counts=True), strict=True):
            self._gap.record(int(gap) / 1e6, times=int(count))

    # Instruments

    def _request_histograms(self, metrics: Metrics) -> None:
        new = metrics.histogram
        by_class = ("class",)
        self._whole = new(
            "quire.request.duration",
            "Time from the arrival of a request to its end.",
            bounds=DURATION_S,
            labels=by_class,
        )
        self._queue = new(
            "quire.request.queue_time",
            "Scheduling latency: time from the arrival of a request to its first step.",
            bounds=DURATION_S,
            labels=by_class,
        )
        self._prefill = new(
            "quire.request.prefill_time",
            "Time from a request's first step to its first token.",
            bounds=DURATION_S,
        )
        self._decode = new(
            "quire.request.decode_time",
            "Time from a request's first token to its end.",
            bounds=DURATION_S,
        )
        self._inference = new(
            "quire.request.inference_time",
            "Time from a request's first step to its end.",
            bounds=DURATION_S,
        )
        self._worker_time = new(
            "quire.request.worker_time",
            "A request's share, by tokens, of the computing time of its steps.",
            bounds=DURATION_S,
        )
        self._ttft = new(
            "quire.request.time_to_first_token",
            "Time from the arrival of a request to its first token.",
            bounds=LATENCY_S,
            labels=by_class,
        )
        self._tpot = new(
            "quire.request.time_per_output_token",
            "A request's mean time per token after the first.",
            bounds=GAP_S,
            labels=by_class,
        )
        self._gap = new(
            "quire.request.inter_token_latency",
            "Time between two tokens of one request, in the queue or not.",
            bounds=GAP_S,
        )
        unit = "{token}"
        self._prompt = new(
            "quire.request.prompt_tokens", "Tokens of the prompt.", bounds=TOKENS, unit=unit
        )
        self._generated = new(
            "quire.request.generation_tokens", "Tokens generated.", bounds=TOKENS, unit=unit
        )
        self._computed_prompt = new(
            "quire.request.computed_prompt_tokens",
            "Prompt tokens not found in the prefix cache.",
            bounds=TOKENS,
            unit=unit,
        )
        self._max_tokens = new(
            "quire.request.max_tokens",
            "The max_tokens of requests that have one.",
            bounds=TOKENS,
            unit=unit,
        )

    def _step_histograms(self, metrics: Metrics) -> None:
        new = metrics.histogram
        self._plan_time = new(
            "quire.step.plan_time", "Time to plan a step.", bounds=(0.0001, 0.00025, *STEP_S)
        )
        self._execute = new(
            "quire.step.execute_time", "Time a step took on its worker.", bounds=STEP_S
        )
        self._link = new(
            "quire.step.link_time",
            "From sending a step to its result, less the worker's waiting and computing.",
            bounds=(0.0001, 0.00025, *STEP_S),
        )
        self._step_tokens = new(
            "quire.step.tokens", "Tokens in a step.", bounds=STEP_TOKENS, unit="{token}"
        )
        self._step_rows = new(
            "quire.step.rows", "Requests in a step.", bounds=STEP_TOKENS, unit="{row}"
        )

    def _gauges(self, metrics: Metrics) -> None:
        gauge = metrics.gauge
        gauge(
            "quire.scheduler.token_budget",
            "Most tokens in one step.",
            lambda: [
                (lane.spec.max_num_batched_tokens, {"worker": name})
                for name, lane in list(self._lanes.items())
            ],
        )
        gauge(
            "quire.scheduler.worker_utilization",
            "Share of the last half minute that a worker computed, 0 to 1.",
            self._utilization,
        )
        gauge(
            "quire.scheduler.throughput",
            "Tokens planned per second in the last half minute.",
            lambda: [(rate, {"kind": kind}) for kind, rate in self._state.get().throughput.items()],
        )
        gauge(
            "quire.scheduler.time_per_token",
            "Mean time between two tokens of one request in the last half minute; 0 without any.",
            lambda: [(self._state.get().time_per_token_s, {})],
            unit="s",
        )

    def _counters(self, metrics: Metrics) -> None:
        counter = metrics.counter
        counter(
            "quire.scheduler.workers_lost",
            "Workers that went.",
            lambda: [(self._workers_lost, {})],
        )
        counter(
            "quire.scheduler.requests_ended",
            "Requests that ended, by how.",
            lambda: [
                (count, {"reason": reason, "class": name})
                for (reason, name), count in list(self._ended.items())
            ],
        )
        counter(
            "quire.scheduler.requests_refused",
            "Requests that were not accepted, by why.",
            lambda: [(count, {"reason": why}) for why, count in list(self._refused.items())],
        )
        counter(
            "quire.scheduler.computed_tokens",
            "Tokens planned: prefill, and decode one by one.",
            lambda: [(count, {"kind": kind}) for kind, count in list(self._computed.items())],
        )
        counter(
            "quire.scheduler.admitted_prompt_tokens",
            "Prompt tokens of requests at their first step, by where they come from.",
            lambda: [(n, {"source": source}) for source, n in list(self._admitted_tokens.items())],
        )
        counter(
            "quire.scheduler.worker_busy_time",
            "Time a worker computed.",
            lambda: [
                (lane.busy_us / 1e6, {"worker": name}) for name, lane in list(self._lanes.items())
            ],
            unit="s",
        )
        counter(
            "quire.scheduler.worker_idle_time",
            "Time a worker had nothing to do between steps.",
            lambda: [
                (lane.idle_us / 1e6, {"worker": name}) for name, lane in list(self._lanes.items())
            ],
            unit="s",
        )

    # What the collecting thread reads

    def _read(self) -> _State:
        """On the event loop."""
        now = self._loop.now()
        elapsed, (prefill, decode, gaps, gaps_us) = self._recent.growth(now, self._recent_totals())
        elapsed_s = elapsed / 1e6
        return _State(
            throughput={
                "prefill": prefill / elapsed_s if elapsed else 0.0,
                "decode": decode / elapsed_s if elapsed else 0.0,
            },
            time_per_token_s=gaps_us / gaps / 1e6 if gaps else 0.0,
            utilization={name: lane.utilization(now) for name, lane in self._lanes.items()},
        )

    def _recent_totals(self) -> tuple[int, ...]:
        return self._computed["prefill"], self._computed["decode"], self._gaps, self._gaps_us

    def _utilization(self) -> Iterable[Point]:
        for name, share in self._state.get().utilization.items():
            yield share, {"worker": name}
