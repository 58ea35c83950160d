"""Accounts of one attachment, for metrics and spans: which tokens its steps computed, and for whom.

Runs on the event loop and sees plans and results only, in the order of the link. Decides nothing.
"""

from collections import deque
from types import MappingProxyType

import numpy as np

from services.worker.metrics import WorkerMetrics, error_type
from services.worker.plan import Attachment, StepPlan, StepResult, StepTimings
from services.worker.spans import AttachmentSpans, TokenSplit
from services.worker.stream import EndKind

_WORDS = MappingProxyType(
    {
        EndKind.UNREACHABLE: "unreachable",
        EndKind.LOST: "link_lost",
        EndKind.REFUSED: "refused",
        EndKind.LEFT: "scheduler_left",
        EndKind.BROKEN: "link_broken",
        EndKind.STOPPED: "worker_stopped",
    }
)
_ORDERLY = (EndKind.LEFT, EndKind.STOPPED)


class AttachmentObserver:
    """Watches one attachment.

    Args:
        attachment: its terms.
        metrics: where it is counted, or None.
        spans: of this attachment, or None.
    """

    def __init__(
        self,
        attachment: Attachment,
        *,
        metrics: WorkerMetrics | None,
        spans: AttachmentSpans | None,
    ) -> None:
        self._metrics = metrics
        self._spans = spans
        self._unanswered: deque[tuple[StepPlan, int]] = deque()
        # Per slot: tokens known when the request came and not computed yet.
        self._to_prefill = np.zeros(attachment.num_slots, np.int64)
        self._failed: set[int] = set()
        self._rows = 0
        if metrics is not None:
            metrics.is_attached = True

    def received(self, plan: StepPlan, received_ns: int) -> None:
        """A step came, at this time of `time.monotonic_ns`; the link bounds how many wait."""
        self._unanswered.append((plan, received_ns))

    def answered(self, result: StepResult, timings: StepTimings) -> None:
        """The oldest step was executed."""
        plan, received_ns = self._unanswered.popleft()
        self._change_rows(plan, received_ns)
        self._note_failures(result)
        tokens = self._split(plan)
        if self._metrics is not None:
            self._metrics.rows_in_use = self._rows
            self._metrics.step(
                timings, prefill=int(tokens.prefill.sum()), decode=int(tokens.decode.sum())
            )
        if self._spans is not None:
            self._spans.step(plan, tokens, timings)
            if plan.traceparent:
                self._spans.traced_step(plan, received_ns, tokens, timings, result.phases)

    def failed(self, error: Exception) -> None:
        """The oldest step failed, and the attachment with it."""
        plan, received_ns = self._unanswered.popleft()
        reason = error_type(error)
        if self._metrics is not None:
            self._metrics.step_failed(reason)
        if self._spans is not None:
            self._lose(self._spans, plan, received_ns, reason)

    def ended(self, kind: EndKind) -> None:
        """The attachment is over; steps without an answer have none any more."""
        word = _WORDS[kind]
        if self._spans is not None:
            for plan, received_ns in self._unanswered:
                self._lose(self._spans, plan, received_ns, word)
            self._spans.end(word, None if kind in _ORDERLY else word)
        self._unanswered.clear()
        if self._metrics is not None:
            self._metrics.link_ended(word)

    def _change_rows(self, plan: StepPlan, received_ns: int) -> None:
        if plan.released_slots.size:
            self._rows -= len(plan.released_slots)
            self._failed.difference_update(plan.released_slots.tolist())
            if self._spans is not None:
                self._spans.release(plan.released_slots, received_ns)
        for row in plan.new_rows:
            self._rows += 1
            self._to_prefill[row.slot] = len(row.token_ids) - row.num_computed
            if self._spans is not None:
                self._spans.arrive(row, plan, received_ns)

    def _note_failures(self, result: StepResult) -> None:
        for failure in result.failures:
            if failure.slot in self._failed:
                continue  # told in every step until its slot is released
            self._failed.add(failure.slot)
            if self._metrics is not None:
                self._metrics.row_failed(failure.kind.value)
            if self._spans is not None:
                self._spans.fail(failure.slot, failure.kind.value)

    def _split(self, plan: StepPlan) -> TokenSplit:
        """Counts the tokens of a step; those of failed rows do not count."""
        slots, counts = plan.slots, plan.num_tokens
        if self._failed:
            counts = np.where(np.isin(slots, list(self._failed)), 0, counts)
        left = self._to_prefill[slots]
        prefill = np.minimum(left, counts)
        self._to_prefill[slots] = left - prefill
        return TokenSplit(prefill, counts - prefill)

    @staticmethod
    def _lose(spans: AttachmentSpans, plan: StepPlan, received_ns: int, reason: str) -> None:
        """A step gave nothing: nothing of it was checked, but its requests were here."""
        spans.release(plan.released_slots, received_ns)
        for row in plan.new_rows:
            spans.arrive(row, plan, received_ns)
        if plan.traceparent:
            spans.failed_step(plan, received_ns, reason)
