"""The taking in of one result: tokens appended, ends found, filled blocks made findable.

Owns a result while it is applied; the caller owns the requests and gives the way to end one. The
result is matched through the scheduler's own list for its step, so rows of requests that ended or
were preempted meanwhile are told apart by the generation of their slot.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from services.scheduler.core.plan import (
    Counters,
    Ended,
    EndReason,
    Events,
    IntArray,
    LinkFault,
    Mask,
    StepResult,
    TokenArray,
)
from services.scheduler.core.request import Request, Status
from services.scheduler.core.worker_state import OpenStep, WorkerState

EndRequest = Callable[[Request, EndReason], Ended]
"""Ends a live request and makes its terminal event."""

FirstToken = Callable[[Request], None]
"""Told that a request has its first token."""


def close_step(worker: WorkerState, result: StepResult) -> OpenStep:
    """Takes the oldest open step off the worker: its slots and pending hashes are free again.

    Raises:
        LinkFault: the result does not answer that step; nothing has changed.
    """
    if not worker.open:
        raise LinkFault("a result without an open step")
    step = worker.open[0]
    if (result.epoch, result.step_id) != (worker.epoch, step.step_id):
        raise LinkFault(
            f"result of step {result.epoch}/{result.step_id}, "
            f"expected {worker.epoch}/{step.step_id}"
        )
    expected = step.samples
    if result.failures:
        slots = [failure.slot for failure in result.failures]
        if not np.isin(slots, step.slots).all():
            raise LinkFault("a failure of a slot that is not in the step")
        expected = expected & ~np.isin(step.slots, slots)
    if result.counts.size != expected.size or (result.counts != expected).any():
        raise LinkFault("token counts differ from the rows that sample")
    tokens = result.token_ids
    if tokens.size != np.count_nonzero(expected):
        raise LinkFault("number of tokens differs from their counts")
    if tokens.size and int(tokens.max()) >= worker.spec.vocab_size:
        raise LinkFault("a token outside the vocabulary")
    worker.open.popleft()
    worker.rows.recycle(step.released)
    worker.drop_pending(step.pending)
    return step


class Application:
    """One result while it is applied.

    Args:
        worker: whose step it was.
        step: as it was planned.
        result: matches the step.
        counters: counted up.
        end: ends a live request.
        first_token: told of first tokens.
    """

    def __init__(
        self,
        worker: WorkerState,
        step: OpenStep,
        result: StepResult,
        counters: Counters,
        *,
        end: EndRequest,
        first_token: FirstToken,
    ) -> None:
        self._worker = worker
        self._step = step
        self._result = result
        self._counters = counters
        self._end = end
        self._first_token = first_token
        self._faulty: list[tuple[Request, str]] = []
        self._failed = {failure.slot: failure.message for failure in result.failures}

    def events(self) -> Events:
        """Applies the result."""
        events = self._apply()
        if not self._faulty:
            return events
        faults = [
            replace(self._end(request, EndReason.FAULT), message=message)
            for request, message in self._faulty
            if request.status is not Status.ENDED
        ]
        self._counters.isolated_faults += len(faults)
        return replace(events, ended=(*events.ended, *faults))

    def _apply(self) -> Events:
        worker, step, tokens = self._worker, self._step, self._result.token_ids
        live = worker.rows.generation[step.slots] == step.generations
        if not self._failed and live.all():
            self._register_filled(step.slots, step.computed)
            return self._append(step.slots[step.samples], tokens)
        good = ~np.isin(step.slots, list(self._failed))
        confirmed = live & good
        self._register_filled(step.slots[confirmed], step.computed[confirmed])
        sampled = step.samples & good
        events = self._append(step.slots[sampled & live], tokens[live[sampled]])
        failures = [
            self._fail(self._worker.rows.request(slot), slot)
            for slot in step.slots[live & ~good].tolist()
        ]
        late = self._append_orphans(live)
        return Events(
            handles=np.concatenate([events.handles, late.handles]),
            token_ids=np.concatenate([events.token_ids, late.token_ids]),
            ended=(*events.ended, *failures, *late.ended),
        )

    def _register_filled(self, slots: IntArray, computed: IntArray) -> None:
        """Makes blocks findable whose content the result has confirmed."""
        worker = self._worker
        if not worker.caches_prefixes:
            return
        size = worker.spec.block_size
        beyond = computed - worker.rows.registered[slots] * size
        full = (beyond >= size).nonzero()[0]
        if full.size:
            for slot, message in worker.register_filled(slots[full], computed[full]):
                self._faulty.append((worker.rows.request(slot), message))

    def _append(self, slots: IntArray, tokens: TokenArray) -> Events:
        """Appends one token to each of these running rows; ends those that are complete."""
        rows = self._worker.rows
        known = rows.known[slots]
        rows.tokens[slots, known] = tokens
        known = known + 1
        rows.known[slots] = known
        handles = rows.handle[slots]
        for place in (known == rows.prompt_len[slots] + 1).nonzero()[0].tolist():
            self._first_token(rows.request(int(slots[place])))
        self._counters.generation_tokens += slots.size
        stopped = self._worker.is_eos[tokens] & ~rows.ignore_eos[slots]
        if rows.stops.size:
            stopped |= rows.stopped(slots, tokens)
        ended: list[Ended] = []
        for place in (stopped | (known >= rows.limit[slots])).nonzero()[0].tolist():
            request = rows.request(int(slots[place]))
            if stopped[place]:
                end = self._end(request, EndReason.STOP)
                ended.append(replace(end, stop_token_id=int(tokens[place])))
            else:
                ended.append(self._end(request, EndReason.LENGTH))
        return Events(handles=handles, token_ids=tokens, ended=tuple(ended))

    def _append_orphans(self, live: Mask) -> Events:
        """Appends tokens of requests preempted after the step was planned; drops ended ones'."""
        step, result, orphans = self._step, self._result, self._worker.orphans
        places = np.cumsum(result.counts > 0) - 1
        handles: list[int] = []
        tokens: list[int] = []
        ended: list[Ended] = []
        for row in (~live).nonzero()[0].tolist():
            slot = int(step.slots[row])
            key = (slot, int(step.generations[row]))
            request = orphans.get(key)
            if request is None or request.status is Status.ENDED:
                orphans.pop(key, None)
                self._counters.discarded_rows += 1
                continue
            if not step.samples[row]:
                continue
            request.in_flight -= 1
            if not request.in_flight:
                del orphans[key]
            if slot in self._failed:
                ended.append(self._fail(request, slot))
                continue
            token = int(result.token_ids[places[row]])
            if not request.output:
                self._first_token(request)
            request.output.append(token)
            handles.append(request.spec.handle)
            tokens.append(token)
            self._counters.generation_tokens += 1
            ended.extend(end_if_complete(request, self._worker.spec.eos_token_ids, self._end))
        return Events(
            handles=np.array(handles, np.int64),
            token_ids=np.array(tokens, np.uint32),
            ended=tuple(ended),
        )

    def _fail(self, request: Request, slot: int) -> Ended:
        return replace(self._end(request, EndReason.FAILED), message=self._failed[slot])


def end_if_complete(
    request: Request, eos_token_ids: tuple[int, ...], end: EndRequest
) -> list[Ended]:
    """Ends a waiting request whose tokens so far end it; its limit is known."""
    assert request.limit is not None
    last = request.output[-1] if request.output else None
    is_eos = last in eos_token_ids and not request.spec.ignore_eos
    if is_eos or last in request.spec.stop_token_ids:
        return [replace(end(request, EndReason.STOP), stop_token_id=last)]
    if request.num_tokens >= request.limit:
        return [end(request, EndReason.LENGTH)]
    return []
