"""Spans of one attachment: traced steps, and the stays of sampled requests on this worker.

A span is made when it is over, from plans and timings, on the event loop: the model thread knows of
none, and what is kept in between is a row of numbers per slot. Holds neither tokens nor tensors.
"""

import time
from dataclasses import dataclass

import numpy as np
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from services.chassis.tracing import child_of
from services.worker.plan import (
    Attachment,
    Column,
    NewRow,
    StepPhases,
    StepPlan,
    StepTimings,
)

RELEASED = "released"
"""How a stay ends that the scheduler ends; else it is the end of the link that ends it."""


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Tokens that the rows of a step computed, in the order of its plan."""

    prefill: Column
    """[rows], known when the request came: its prompt, and output that is computed again."""
    decode: Column
    """[rows], sampled here before."""


@dataclass(frozen=True, slots=True)
class _Stay:
    """A sampled request in its slot."""

    traceparent: str
    began_ns: int
    first_step: int


class AttachmentSpans:
    """Makes the spans `worker_step` and `worker_request` of one attachment.

    Times are of `time.monotonic_ns`.

    Args:
        tracer: of the process.
        worker_id: this worker's name.
        attachment: how many slots there are.
    """

    def __init__(self, tracer: Tracer, worker_id: str, attachment: Attachment) -> None:
        slots = attachment.num_slots
        self._tracer = tracer
        self._worker_id = worker_id
        self._num_slots = slots
        self._stays: dict[int, _Stay] = {}
        self._failures: dict[int, str] = {}
        self._steps = np.zeros(slots, np.int64)
        self._last_step = np.zeros(slots, np.int64)
        self._prefill = np.zeros(slots, np.int64)
        self._decode = np.zeros(slots, np.int64)
        self._execute_us = np.zeros(slots, np.float64)

    def arrive(self, row: NewRow, plan: StepPlan, received_ns: int) -> None:
        """A request comes with a step, which may still turn out to break the contract."""
        slot = row.slot
        if not row.traceparent or slot >= self._num_slots or slot in self._stays:
            return
        self._stays[slot] = _Stay(row.traceparent, received_ns, plan.step_id)
        for column in (self._steps, self._last_step, self._prefill, self._decode):
            column[slot] = 0
        self._execute_us[slot] = 0.0

    def release(self, slots: Column, received_ns: int) -> None:
        """The scheduler takes requests away."""
        if not self._stays:
            return
        for slot in slots.tolist():
            if slot in self._stays:
                self._leave(slot, RELEASED, received_ns, error=None)

    def fail(self, slot: int, kind: str) -> None:
        """The request in `slot` cannot be computed any more."""
        if slot in self._stays:
            self._failures[slot] = kind

    def step(self, plan: StepPlan, tokens: TokenSplit, timings: StepTimings) -> None:
        """A step was executed: its time is shared among its rows by tokens."""
        if not self._stays:
            return
        slots, counts = plan.slots, tokens.prefill + tokens.decode
        self._steps[slots] += 1
        self._last_step[slots] = plan.step_id
        self._prefill[slots] += tokens.prefill
        self._decode[slots] += tokens.decode
        self._execute_us[slots] += counts * (timings.execute_us / max(1, int(counts.sum())))

    def traced_step(
        self,
        plan: StepPlan,
        received_ns: int,
        tokens: TokenSplit,
        timings: StepTimings,
        phases: StepPhases | None,
    ) -> None:
        """Makes the span of a step that was executed and has a trace context."""
        attributes = self._of_step(plan) | {
            "quire.step.prefill_tokens": int(tokens.prefill.sum()),
            "quire.step.decode_tokens": int(tokens.decode.sum()),
            "quire.step.wait_ms": timings.wait_us / 1000,
            "quire.step.execute_ms": timings.execute_us / 1000,
            "quire.step.idle_ms": timings.idle_us / 1000,
        }
        if phases is not None:
            attributes |= {
                "quire.step.batch_ms": phases.batch_us / 1000,
                "quire.step.forward_ms": phases.forward_us / 1000,
                "quire.step.sample_ms": phases.sample_us / 1000,
            }
        ended_ns = received_ns + 1000 * (timings.wait_us + timings.execute_us)
        self._make("worker_step", plan.traceparent, (received_ns, ended_ns), attributes, None)

    def failed_step(self, plan: StepPlan, received_ns: int, error: str) -> None:
        """Makes the span of a step that has a trace context and gave nothing."""
        span = (received_ns, time.monotonic_ns())
        self._make("worker_step", plan.traceparent, span, self._of_step(plan), error)

    def end(self, how: str, error: str | None) -> None:
        """The link has ended, and all stays with it.

        Args:
            how: it ended.
            error: why that is a failure, else None.
        """
        now_ns = time.monotonic_ns()
        for slot in list(self._stays):
            self._leave(slot, how, now_ns, error)

    def _leave(self, slot: int, how: str, ended_ns: int, error: str | None) -> None:
        stay = self._stays.pop(slot)
        attributes: dict[str, str | int | float] = {
            "quire.worker.id": self._worker_id,
            "quire.worker.end": how,
            "quire.steps": int(self._steps[slot]),
            "quire.first_step": stay.first_step,
            "quire.last_step": int(self._last_step[slot]) or stay.first_step,
            "quire.prefill_tokens": int(self._prefill[slot]),
            "quire.decode_tokens": int(self._decode[slot]),
            "quire.worker_ms": round(float(self._execute_us[slot]) / 1000, 3),
        }
        failure = self._failures.pop(slot, error)
        span = (stay.began_ns, ended_ns)
        self._make("worker_request", stay.traceparent, span, attributes, failure)

    def _of_step(self, plan: StepPlan) -> dict[str, str | int | float]:
        return {
            "quire.worker.id": self._worker_id,
            "quire.step.id": plan.step_id,
            "quire.step.num_seqs": len(plan.slots),
        }

    def _make(
        self,
        name: str,
        parent: str,
        from_to_ns: tuple[int, int],
        attributes: dict[str, str | int | float],
        error: str | None,
    ) -> None:
        wall_ns = time.time_ns() - time.monotonic_ns()
        began_ns, ended_ns = from_to_ns
        if error is not None:
            attributes["error.type"] = error
        span = self._tracer.start_span(
            name,
            child_of(parent),
            SpanKind.INTERNAL,
            attributes=attributes,
            start_time=wall_ns + began_ns,
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(wall_ns + ended_ns)
