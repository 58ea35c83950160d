"""The baseline "v0": static batching with the whole context reserved, behind the core's verbs.

A batch is formed of waiting requests in order of arrival, as many as the sequence cap and the KV
cache allow when each reserves its blocks for prompt and all output it may have. The batch is
prefilled in one step and decodes until its last request has ended; only then is the next one
formed. This is how servers worked before iteration-level scheduling (Yu et al., "Orca", OSDI 2022)
and paged KV caches (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, whose "Orca (Max)" reserves as `reserve_tokens` does with the longest
context, and "Orca (Oracle)" as the default does where bounds are exact).

In its favour: a request's tokens are delivered as they come, rows that have ended cost no computing
(no padding), a batch waits for nobody, and two steps are in flight as in the core.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from services.scheduler.core.admission import limits_of, token_limit
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    NO_TOKENS,
    AddRequest,
    Counters,
    Ended,
    EndReason,
    Events,
    IntArray,
    Limits,
    LinkFault,
    Loads,
    NewRow,
    StepPlan,
    StepResult,
    WorkerLoad,
    WorkerSpec,
)

_NO_INTS: IntArray = np.empty(0, np.int64)


@dataclass(slots=True)
class _Batch:
    """Requests that run together, in columns by slot."""

    requests: list[AddRequest]
    reserved: int
    known: IntArray
    length: IntArray
    limit: IntArray
    handles: IntArray
    ended: npt.NDArray[np.bool_]
    prefilled: bool = False


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    epoch: int
    batch: _Batch | None = None
    next_step_id: int = 1
    open: deque[tuple[int, IntArray]] = field(default_factory=deque)
    """Step id and slots of each step in flight."""
    released: list[int] = field(default_factory=list)


class StaticBatching:
    """The engine.

    Args:
        config: its `max_num_seqs` is honoured; a batch's prefill is one step of any size.
        reserve_tokens: each request reserves so many, as where the longest context of the model is
            reserved; None: its prompt and its own bound.
    """

    def __init__(self, config: Config, *, reserve_tokens: int | None = None) -> None:
        self._config = config
        self._reserve_tokens = reserve_tokens
        self._workers: dict[str, _Worker] = {}
        self._waiting: dict[int, AddRequest] = {}
        self._waiting_tokens = 0
        self._seats: dict[int, tuple[_Worker, int]] = {}
        self._limits: Limits | None = None
        self._counters = Counters()
        self._accepted = 0
        self._ended = 0

    def attach(self, announced: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        """See Scheduler."""
        del now
        most = self._config.max_num_seqs or announced.max_num_seqs
        spec = replace(announced, max_num_seqs=min(announced.max_num_seqs, most))
        worker = _Worker(spec, len(self._workers) + 1)
        self._workers[spec.worker_id] = worker
        self._limits = limits_of([other.spec for other in self._workers.values()], "")
        return spec, worker.epoch, NO_TOKENS

    def add(self, spec: AddRequest, now: int) -> Events:
        """See Scheduler; a worker must be attached.

        Raises:
            Refused: it can never fit.
        """
        del now
        assert self._limits is not None, "no worker is attached"
        token_limit(spec, self._limits)
        self._accepted += 1
        self._waiting[spec.handle] = spec
        self._waiting_tokens += spec.prompt.size
        return NO_TOKENS

    def abort(self, handle: int, now: int) -> Events:
        """See Scheduler."""
        del now
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            self._waiting_tokens -= waiting.prompt.size
            self._ended += 1
            return replace(NO_TOKENS, ended=(_ended(waiting, 0, EndReason.ABORT),))
        if handle not in self._seats:
            return NO_TOKENS
        worker, slot = self._seats[handle]
        return replace(NO_TOKENS, ended=(self._end(worker, slot, EndReason.ABORT),))

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        """See Scheduler."""
        del now
        worker = self._workers[worker_id]
        if len(worker.open) >= worker.spec.max_in_flight:
            return None
        new_rows: tuple[NewRow, ...] = ()
        if worker.batch is None and not worker.open:
            new_rows = self._form(worker)
        batch = worker.batch
        slots = tokens = _NO_INTS
        if batch is not None:
            slots = (~batch.ended & (batch.length < batch.limit)).nonzero()[0]
            tokens = np.ones(slots.size, np.int64) if batch.prefilled else batch.known[slots]
            batch.length[slots] += 1
            batch.prefilled = True
        if not slots.size and not worker.released:
            return None
        return self._seal(worker, slots, tokens, new_rows)

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        """See Scheduler.

        Raises:
            LinkFault: it is not the answer to the oldest open step.
        """
        del now
        worker = self._workers[worker_id]
        step_id, slots = worker.open.popleft()
        batch = worker.batch
        if result.step_id != step_id or int(result.counts.sum()) != slots.size:
            raise LinkFault("a result that does not belong to its step")
        if batch is None or not slots.size:
            self._close(worker)
            return NO_TOKENS
        live = ~batch.ended[slots]
        slots, tokens = slots[live], result.token_ids[live]
        batch.known[slots] += 1
        self._counters.generation_tokens += slots.size
        stopped = np.isin(tokens, worker.spec.eos_token_ids)
        complete = batch.known[slots] >= batch.limit[slots]
        ended: list[Ended] = []
        handles = batch.handles[slots]
        for place in (stopped | complete).nonzero()[0].tolist():
            slot = int(slots[place])
            if stopped[place] and not batch.requests[slot].ignore_eos:
                ended.append(self._end(worker, slot, EndReason.STOP))
            elif complete[place]:
                ended.append(self._end(worker, slot, EndReason.LENGTH))
        self._close(worker)
        return Events(handles=handles, token_ids=tokens, ended=tuple(ended))

    def expire(self, now: int) -> Events:
        """See Scheduler; nothing expires."""
        del now
        return NO_TOKENS

    def next_wakeup(self, now: int) -> int | None:
        """See Scheduler; there is none."""
        del now
        return None

    def loads(self) -> Loads:
        """See Scheduler; held blocks are the reserved ones of the batches."""
        workers = tuple(
            WorkerLoad(
                worker_id=worker_id,
                epoch=worker.epoch,
                running=0 if worker.batch is None else int((~worker.batch.ended).sum()),
                blocks_total=worker.spec.num_blocks,
                blocks_free=worker.spec.num_blocks
                - (0 if worker.batch is None else worker.batch.reserved),
                blocks_evictable=0,
                blocks_pinned=0,
                steps=worker.next_step_id - 1,
                steps_in_flight=len(worker.open),
                max_num_seqs=worker.spec.max_num_seqs,
                max_num_batched_tokens=worker.spec.max_num_batched_tokens,
                computed_tokens=0,  # the simulation keeps account of steps itself
                execute_us=0,
            )
            for worker_id, worker in self._workers.items()
        )
        return Loads(
            running=len(self._seats),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            accepted=self._accepted,
            ended=self._ended,
            workers=workers,
            classes=(),
            tenants=(),
            counters=replace(self._counters),
        )

    def _form(self, worker: _Worker) -> tuple[NewRow, ...]:
        """Takes a batch from the queue; the first that does not fit ends it."""
        taken: list[AddRequest] = []
        reserved = 0
        for spec in self._waiting.values():
            needed = self._reservation(spec, worker.spec)
            full = reserved + needed > worker.spec.num_blocks
            if full or len(taken) == worker.spec.max_num_seqs:
                break
            taken.append(spec)
            reserved += needed
        if not taken:
            return ()
        for slot, spec in enumerate(taken):
            del self._waiting[spec.handle]
            self._waiting_tokens -= spec.prompt.size
            self._seats[spec.handle] = (worker, slot)
        known = np.array([spec.prompt.size for spec in taken], np.int64)
        self._counters.prompt_tokens += int(known.sum())
        worker.batch = _Batch(
            requests=taken,
            reserved=reserved,
            known=known,
            length=known.copy(),
            limit=np.array([self._limit(spec, worker.spec) for spec in taken], np.int64),
            handles=np.array([spec.handle for spec in taken], np.int64),
            ended=np.zeros(len(taken), np.bool_),
        )
        return tuple(_new_row(slot, spec) for slot, spec in enumerate(taken))

    def _limit(self, spec: AddRequest, worker: WorkerSpec) -> int:
        most = min(worker.max_model_len, worker.num_blocks * worker.block_size)
        return most if spec.max_tokens is None else int(spec.prompt.size) + spec.max_tokens

    def _reservation(self, spec: AddRequest, worker: WorkerSpec) -> int:
        tokens = max(self._limit(spec, worker), self._reserve_tokens or 0)
        # More than the cache holds is reserved of all: such a request runs alone.
        return min(-(-tokens // worker.block_size), worker.num_blocks)

    def _seal(
        self, worker: _Worker, slots: IntArray, tokens: IntArray, new_rows: tuple[NewRow, ...]
    ) -> StepPlan:
        released = np.array(worker.released, np.int64)
        worker.released.clear()
        worker.open.append((worker.next_step_id, slots))
        worker.next_step_id += 1
        self._counters.steps += 1
        return StepPlan(
            epoch=worker.epoch,
            step_id=worker.next_step_id - 1,
            released_slots=released,
            new_rows=new_rows,
            slots=slots,
            num_tokens=tokens,
            num_new_blocks=np.zeros(slots.size, np.int64),
            new_block_ids=_NO_INTS,
            copied_from=_NO_INTS,
            copied_to=_NO_INTS,
            block_table_digest=None,
        )

    def _end(self, worker: _Worker, slot: int, reason: EndReason) -> Ended:
        """Ends a request of the batch; what it reserved stays so until the batch is over."""
        batch = worker.batch
        assert batch is not None
        spec = batch.requests[slot]
        batch.ended[slot] = True
        worker.released.append(slot)
        del self._seats[spec.handle]
        self._ended += 1
        return _ended(spec, int(batch.known[slot] - spec.prompt.size), reason)

    def _close(self, worker: _Worker) -> None:
        if worker.batch is not None and worker.batch.ended.all() and not worker.open:
            worker.batch = None


def _new_row(slot: int, spec: AddRequest) -> NewRow:
    return NewRow(
        slot=slot,
        handle=spec.handle,
        token_ids=spec.prompt,
        prompt_len=int(spec.prompt.size),
        num_computed=0,
        sampling=spec.sampling,
        traceparent="",
    )


def _ended(spec: AddRequest, completion_tokens: int, reason: EndReason) -> Ended:
    return Ended(
        handle=spec.handle,
        request_id=spec.request_id,
        reason=reason,
        prompt_tokens=int(spec.prompt.size),
        completion_tokens=completion_tokens,
        cached_tokens=0,
    )
