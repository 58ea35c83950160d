"""Spans of the scheduler: one tree per traced request, and a span of its own for some steps.

    llm_request                    from arrival to end, below the caller's span
    ├── queue                      each time it waits: on arrival, after a preemption or a loss
    ├── prefill                    each chunk, from the plan of its step to the result
    └── decode                     each stay on a worker, from the first such step to the last

    batch_step                     a trace of its own that links to the traced requests in it

A request's children are made when they are over, with the times that were noted. A step becomes a
span where it prefills a traced request, and every fiftieth time otherwise: a long answer would have
thousands of links. Its worker is told, and adds its own span below.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, StatusCode, Tracer

from services.chassis.tracing import below, child_of, written
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    EndReason,
    Events,
    Mask,
    Refusal,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.link_timings import StepTimings
from services.scheduler.watching import Watching

_EVERY = 50
"""Decode steps of which one becomes a span."""

_MOST_LINKS = 128
"""What OpenTelemetry keeps by default."""

_MOST_CHUNKS = 256
"""Chunks of one request that become spans; a longer prefill tells of the first ones and counts."""

_CALLERS_DOING = frozenset({EndReason.ABORT, EndReason.REPLACED})
_WELL = frozenset({EndReason.STOP, EndReason.LENGTH})


@dataclass(slots=True)
class _Course:
    """A traced request, between its arrival and its end. Instants in microseconds."""

    span: Span
    request: AddRequest
    waits_since: int
    waits_for: str = "arrival"
    worker_id: str = ""
    slot: int = -1
    computed: int = 0
    known: int = 0
    """Tokens it had when it came to the worker; what is computed below that is prefill."""
    chunks: int = 0
    first_step: int = 0
    last_step: int = 0
    decodes_since: int | None = None
    decode_steps: int = 0
    decoded_to: int = 0


@dataclass(slots=True)
class _Step:
    """A step that was sent. Chunks are the traced requests that prefill in it, with the tokens."""

    step_id: int
    sent: int
    span: Span | None
    chunks: list[tuple[_Course, int]]
    decodes: list[_Course]


@dataclass(slots=True)
class _Lane:
    """One attached worker: which of its slots have a traced request."""

    traced: Mask
    by_slot: dict[int, _Course] = field(default_factory=dict)
    steps: deque[_Step] = field(default_factory=deque)
    """At most as many as the worker takes at a time."""
    unseen: int = 0
    """Steps with traced requests since the last one that became a span."""


class Traces(Watching):
    """See the module.

    Args:
        tracer: makes the spans of requests.
        step_tracer: makes those of steps; keeps all of them.
    """

    def __init__(self, tracer: Tracer, step_tracer: Tracer) -> None:
        self._tracer = tracer
        self._step_tracer = step_tracer
        self._offset_ns = 0
        self._live: dict[int, _Course] = {}
        self._lanes: dict[str, _Lane] = {}

    # Requests

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        """See Watcher."""
        # From the clock of the core to that of the world; anew each time, since they drift apart.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            "llm_request",
            child_of(request.traceparent),
            start_time=self._ns(now),
            attributes={
                "gen_ai.request.id": request.request_id,
                "gen_ai.usage.input_tokens": int(request.prompt.size),
                "quire.priority_class": request.priority_class,
                "quire.attempt": request.attempt,
            },
        )
        if span.is_recording():
            self._live[request.handle] = _Course(span, request, now)
        return replace(request, traceparent=written(span.get_span_context()))

    def refused(self, request: AddRequest, refusal: Refusal, now: int) -> None:
        """See Watcher."""
        course = self._live.pop(request.handle, None)
        if course is not None:
            course.span.set_attribute("quire.error.reason", refusal.reason)
            course.span.set_attribute("error.type", "refused")
            course.span.set_status(StatusCode.ERROR, refusal.reason)
            course.span.end(self._ns(now))

    def ended(self, end: Ended, now: int) -> None:
        """See Watcher."""
        course = self._live.pop(end.handle, None)
        if course is None:
            return
        if course.worker_id:
            self._leave(course)
        else:
            self._waited(course, now, at="")
        span = course.span
        span.set_attributes(_account(end))
        span.set_attribute("quire.first_step", course.first_step)
        span.set_attribute("quire.last_step", course.last_step)
        if end.first_token is not None:
            span.add_event("first_token", timestamp=self._ns(end.first_token))
        if end.reason in _CALLERS_DOING:
            span.set_attribute("error.type", end.reason.value)
        elif end.reason not in _WELL:
            span.set_attribute("error.type", end.reason.value)
            span.set_status(StatusCode.ERROR, end.reason.value)
        span.end(self._ns(now))

    def closing(self, now: int) -> None:
        """See Watcher."""
        for course in self._live.values():
            course.span.set_attribute("error.type", "scheduler_stopped")
            course.span.set_status(StatusCode.ERROR, "the scheduler stopped")
            course.span.end(self._ns(now))
        self._live.clear()
        for lane in self._lanes.values():
            self._drop_steps(lane, "the scheduler stopped", now)

    # Workers and steps

    def attached(self, spec: WorkerSpec, now: int) -> None:
        """See Watcher."""
        del now
        self._lanes[spec.worker_id] = _Lane(np.zeros(spec.num_slots, np.bool_))

    def lost(self, worker_id: str, reason: str, now: int) -> None:
        """See Watcher."""
        lane = self._lanes.pop(worker_id)
        self._drop_steps(lane, reason, now)
        for course in list(lane.by_slot.values()):
            self._end_decode(course)
            course.span.add_event("requeued", {"quire.worker.id": worker_id}, self._ns(now))
            self._wait(course, "loss", now)

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        """See Watcher."""
        lane = self._lanes[worker_id]
        preempted = self._release(lane, step, now) if lane.by_slot else 0
        if self._live:
            self._seat(lane, worker_id, step, now)
        if not lane.by_slot:
            lane.steps.append(_Step(step.step_id, now, None, [], []))
            return step
        return self._follow(lane, worker_id, step, now, took_us, preempted)

    def answered(
        self, worker_id: str, result: StepResult, timings: StepTimings, events: Events, now: int
    ) -> None:
        """See Watcher."""
        del events
        step = self._lanes[worker_id].steps.popleft()
        for course, tokens in step.chunks:
            self._chunk(course, worker_id, step, tokens, now)
        for course in step.decodes:
            course.decoded_to = now
        if step.span is not None:
            step.span.set_attribute("quire.step.execute_ms", timings.execute_us / 1000)
            step.span.set_attribute("quire.step.failed_rows", len(result.failures))
            step.span.end(self._ns(now))

    # Parts

    def _seat(self, lane: _Lane, worker_id: str, step: StepPlan, now: int) -> None:
        """Notes which of the requests that come to the worker are traced."""
        for row in step.new_rows:
            course = self._live.get(row.handle)
            if course is None:
                continue
            if course.waits_for != "arrival":
                course.span.add_event("resumed", {"quire.worker.id": worker_id}, self._ns(now))
            self._waited(course, now, at=worker_id)
            course.worker_id, course.slot = worker_id, row.slot
            course.computed, course.known = row.num_computed, int(row.token_ids.size)
            if not course.first_step or course.waits_for == "loss":  # another worker's numbers
                course.first_step = step.step_id
            lane.by_slot[row.slot] = course
            lane.traced[row.slot] = True

    def _release(self, lane: _Lane, step: StepPlan, now: int) -> int:
        """Notes who gave way: released without having ended. How many did."""
        preempted = 0
        for slot in step.released_slots[lane.traced[step.released_slots]].tolist():
            course = lane.by_slot[slot]
            self._leave(course)
            course.span.add_event("preempted", {"quire.step.id": step.step_id}, self._ns(now))
            self._wait(course, "preemption", now)
            preempted += 1
        return preempted

    def _follow(
        self, lane: _Lane, worker_id: str, step: StepPlan, now: int, took_us: int, preempted: int
    ) -> StepPlan:
        """Notes what the step does for its traced requests; makes a span of it where it is due."""
        sent = _Step(step.step_id, now, None, [], [])
        lane.steps.append(sent)
        for place in lane.traced[step.slots].nonzero()[0].tolist():
            course = lane.by_slot[int(step.slots[place])]
            tokens = int(step.num_tokens[place])
            if course.computed < course.known:
                sent.chunks.append((course, tokens))
            else:
                sent.decodes.append(course)
                if course.decodes_since is None:
                    course.decodes_since = now
                course.decode_steps += 1
            course.computed += tokens
            course.last_step = step.step_id
        if not sent.chunks and not sent.decodes:
            return step
        lane.unseen += 1
        if not (sent.chunks or preempted or lane.unseen >= _EVERY):
            return step
        lane.unseen = 0
        sent.span = self._begin_step(worker_id, step, sent, took_us, preempted)
        return replace(step, traceparent=written(sent.span.get_span_context()))

    def _begin_step(
        self, worker_id: str, step: StepPlan, sent: _Step, took_us: int, preempted: int
    ) -> Span:
        roles = [(course, "prefill") for course, _ in sent.chunks]
        roles += [(course, "decode") for course in sent.decodes]
        links = [
            Link(
                course.span.get_span_context(),
                {"gen_ai.request.id": course.request.request_id, "quire.step.role": role},
            )
            for course, role in roles[:_MOST_LINKS]
        ]
        tokens = int(step.num_tokens.sum())
        decodes = int(np.count_nonzero(step.num_tokens == 1))
        return self._step_tracer.start_span(
            "batch_step",
            Context(),
            links=links,
            start_time=self._ns(sent.sent),
            attributes={
                "quire.worker.id": worker_id,
                "quire.step.id": step.step_id,
                "quire.step.num_seqs": int(step.slots.size),
                "quire.step.tokens": tokens,
                "quire.step.single_token_rows": decodes,
                "quire.step.new_requests": len(step.new_rows),
                "quire.step.preempted": preempted,
                "quire.step.plan_ms": took_us / 1000,
            },
        )

    def _chunk(self, course: _Course, worker_id: str, step: _Step, tokens: int, now: int) -> None:
        course.chunks += 1
        if course.decodes_since is not None:  # planned while this chunk was on its way
            course.decodes_since = now
        if course.chunks > _MOST_CHUNKS or course.request.handle not in self._live:
            return
        self._child(
            course,
            "prefill",
            step.sent,
            now,
            {"quire.step.id": step.step_id, "quire.worker.id": worker_id, "quire.tokens": tokens},
            None if step.span is None else [Link(step.span.get_span_context())],
        )

    def _leave(self, course: _Course) -> None:
        """It is off its worker."""
        lane = self._lanes[course.worker_id]
        del lane.by_slot[course.slot]
        lane.traced[course.slot] = False
        self._end_decode(course)

    def _end_decode(self, course: _Course) -> None:
        if course.decodes_since is not None:
            self._child(
                course,
                "decode",
                course.decodes_since,
                max(course.decodes_since, course.decoded_to),
                {"quire.worker.id": course.worker_id, "quire.steps": course.decode_steps},
            )
        course.decodes_since, course.decode_steps = None, 0

    def _wait(self, course: _Course, why: str, now: int) -> None:
        course.worker_id, course.slot = "", -1
        course.waits_since, course.waits_for = now, why

    def _waited(self, course: _Course, now: int, *, at: str) -> None:
        """It has waited until now, for the worker `at`, or in vain."""
        attributes = {"quire.queue.reason": course.waits_for}
        if at:
            attributes["quire.worker.id"] = at
        self._child(course, "queue", course.waits_since, now, attributes)

    def _drop_steps(self, lane: _Lane, reason: str, now: int) -> None:
        for step in lane.steps:
            if step.span is not None:
                step.span.set_attribute("error.type", "worker_lost")
                step.span.set_status(StatusCode.ERROR, reason)
                step.span.end(self._ns(now))
        lane.steps.clear()

    def _child(
        self,
        course: _Course,
        name: str,
        begin: int,
        end: int,
        attributes: Mapping[str, str | int],
        links: Sequence[Link] | None = None,
    ) -> None:
        self._tracer.start_span(
            name,
            below(course.span),
            start_time=self._ns(begin),
            attributes=attributes,
            links=links,
        ).end(self._ns(end))

    def _ns(self, instant: int) -> int:
        return instant * 1000 + self._offset_ns


def _account(end: Ended) -> dict[str, str | int | float]:
    """What a request's span says of its end. The names of latencies are those of vLLM, seconds."""
    admitted = end.ended if end.admitted is None else end.admitted
    found: dict[str, str | int | float] = {
        "quire.end.reason": end.reason.value,
        "quire.priority_class": end.class_name,
        "gen_ai.usage.output_tokens": end.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
        "gen_ai.latency.time_in_queue": (admitted - end.arrived) / 1e6,
        "gen_ai.latency.e2e": (end.ended - end.arrived) / 1e6,
        "quire.recomputed_tokens": end.recomputed_tokens,
        "quire.preemptions": end.preemptions,
        "quire.requeues": end.requeues,
        "quire.requeued_ms": end.requeued_us / 1000,
        "quire.worker_ms": end.worker_us / 1000,
    }
    if end.worker_id:
        found["quire.worker.id"] = end.worker_id
        found["gen_ai.latency.time_in_model_inference"] = (end.ended - admitted) / 1e6
    if end.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = (end.first_token - end.arrived) / 1e6
        found["gen_ai.latency.time_in_model_prefill"] = (end.first_token - admitted) / 1e6
        found["gen_ai.latency.time_in_model_decode"] = (end.ended - end.first_token) / 1e6
    return found
