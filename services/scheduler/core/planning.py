"""The making of one step: decodes first, then admitted prefills, then waiting requests.

There is no prefill phase and no decode phase: each request has `computed` chasing `length`, and a
step is a map request -> tokens whose sum stays within the token budget (the unified budget of the
vLLM V1 scheduler). Owns a step while it is drafted; the caller owns queues and workers.
"""

import enum
from collections.abc import Sequence

import numpy as np

from services.scheduler.core.admission import fits
from services.scheduler.core.config import Config
from services.scheduler.core.order import WaitingQueue, victim_for
from services.scheduler.core.placement import belongs_elsewhere
from services.scheduler.core.plan import Counters, IntArray, Mask, NewRow, StepPlan
from services.scheduler.core.request import Request, Status
from services.scheduler.core.worker_state import OpenStep, WorkerState

_MAX_PASSED_OVER = 256
"""Waiting requests looked at and left in one step; bounds the time of `plan`."""

_NO_INTS: IntArray = np.empty(0, np.int64)


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    PASS_OVER = enum.auto()
    STOP = enum.auto()


class Draft:
    """One step of one worker while it is being planned.

    Args:
        worker: whose step; its rows and pool change as the draft grows.
        others: the other attached workers, which may be the better place for a request.
        waiting: the global queue; preempted requests go back to it, admitted ones leave it.
        config: chunk size and caps.
        counters: counted up.
    """

    def __init__(
        self,
        worker: WorkerState,
        others: Sequence[WorkerState],
        waiting: WaitingQueue,
        config: Config,
        counters: Counters,
    ) -> None:
        self._worker = worker
        self._others = others
        self._waiting = waiting
        self._config = config
        self._counters = counters
        self._budget = worker.spec.max_num_batched_tokens
        self._slots: list[IntArray] = []
        self._tokens: list[IntArray] = []
        self._num_blocks: list[IntArray] = []
        self._block_ids: list[IntArray] = []
        self._new_rows: list[NewRow] = []
        self._pending: list[bytes] = []
        self._preempted = False

    def make(self) -> StepPlan | None:
        """The step, or None where there is nothing to compute and nothing to release."""
        self._schedule_running()
        if len(self._waiting) and not self._preempted:
            self._admit_waiting()
        if not self._slots and not self._worker.released:
            return None
        return self._seal()

    # Running requests

    def _schedule_running(self) -> None:
        rows = self._worker.rows
        order = rows.order
        if not order.size:
            return
        length = rows.length[order]
        want = length - rows.computed[order]
        # The last token a request may have is being sampled: nothing is left to compute.
        want *= length < rows.limit[order]
        steady = order[want == 1]
        slots, tokens = steady, self._worker.ones[: steady.size]
        self._budget -= steady.size
        if steady.size < np.count_nonzero(want):
            chunked, chunks = self._chunks(order[want > 1], want[want > 1])
            slots = np.concatenate([slots, chunked])
            tokens = np.concatenate([tokens, chunks])
        if not slots.size:
            return
        held = rows.num_blocks[slots]
        missing = rows.computed[slots] + tokens - held * self._worker.spec.block_size
        owners = (missing > 0).nonzero()[0]
        if not owners.size:
            self._record(slots, tokens, self._worker.zeros[: slots.size], _NO_INTS)
            return
        needed = np.zeros(slots.size, np.int64)
        needed[owners] = -(-missing[owners] // self._worker.spec.block_size)
        if int(needed.sum()) > self._worker.pool.available:
            self._append_preempting(slots.tolist(), tokens.tolist())
        else:
            self._append(slots, tokens, needed, owners)

    def _chunks(self, slots: IntArray, want: IntArray) -> tuple[IntArray, IntArray]:
        taken: list[int] = []
        for tokens in want.tolist():
            chunk = min(tokens, self._config.prefill_chunk_size, self._budget)
            if not chunk:
                break
            self._budget -= chunk
            taken.append(chunk)
        return slots[: len(taken)], np.array(taken, np.int64)

    def _append(
        self, slots: IntArray, tokens: IntArray, needed: IntArray, owners: IntArray
    ) -> None:
        rows = self._worker.rows
        blocks = self._worker.pool.allocate(int(needed.sum()))
        if blocks.size == owners.size:
            takers = slots[owners]
            rows.blocks[takers, rows.num_blocks[takers]] = blocks
            rows.num_blocks[takers] += 1
        else:
            ends = np.cumsum(needed)
            for row in owners.tolist():
                rows.append_blocks(int(slots[row]), blocks[ends[row] - needed[row] : ends[row]])
        self._record(slots, tokens, needed, blocks)

    def _append_preempting(self, slots: list[int], tokens: list[int]) -> None:
        """Gives rows their blocks in turn, taking them from the latest arrivals."""
        worker = self._worker
        taken: dict[int, tuple[int, IntArray]] = {}
        gone: set[int] = set()
        for slot, chunk in zip(slots, tokens, strict=True):
            if slot in gone:
                self._budget += chunk
                continue
            target = int(worker.rows.computed[slot]) + chunk
            needed = -(-target // worker.spec.block_size) - int(worker.rows.num_blocks[slot])
            while slot not in gone and needed > worker.pool.available:
                victim = victim_for(slot, worker.rows.order, worker.rows.arrival)
                gone.add(victim)
                if victim in taken:
                    self._budget += taken.pop(victim)[0]
                self._preempt(victim)
            if slot in gone:
                self._budget += chunk
                continue
            blocks = worker.pool.allocate(needed)
            worker.rows.append_blocks(slot, blocks)
            taken[slot] = (chunk, blocks)
        if taken:
            self._record(
                np.array(list(taken), np.int64),
                np.array([chunk for chunk, _ in taken.values()], np.int64),
                np.array([blocks.size for _, blocks in taken.values()], np.int64),
                np.concatenate([blocks for _, blocks in taken.values()]),
            )

    def _preempt(self, slot: int) -> None:
        self._preempted = True
        self._counters.preemptions += 1
        self._waiting.push(self._worker.requeue(slot))

    # Waiting requests

    def _admit_waiting(self) -> None:
        worker = self._worker
        left: list[Request] = []
        room = worker.room_beyond_running()
        while (
            self._budget > 0
            and worker.rows.order.size < worker.spec.max_num_seqs
            and worker.rows.has_free_slot
            and len(left) < _MAX_PASSED_OVER
        ):
            request = self._waiting.pop()
            if request is None:
                break
            verdict, room = self._try_admit(request, room)
            if verdict is not _Verdict.ADMITTED:
                left.append(request)
            if verdict is _Verdict.STOP:
                break
        self._waiting.push_back(left)

    def _try_admit(self, request: Request, room: int) -> tuple[_Verdict, int]:
        worker, rows, pool = self._worker, self._worker.rows, self._worker.pool
        size = worker.spec.block_size
        assert request.limit is not None
        # Tokens of a preempted request that are still being sampled must come home first.
        if request.in_flight or not fits(request.limit, worker.spec):
            return _Verdict.PASS_OVER, room
        total = request.num_tokens
        carried = sum(row.token_ids.size for row in self._new_rows)
        if self._new_rows and carried + total > self._config.max_new_tokens_per_step:
            return _Verdict.STOP, room
        hits, pending = self._lookup(request, total)
        if pending:
            return _Verdict.PASS_OVER, room
        computed = int(hits.size) * size
        chunk = min(total - computed, self._config.prefill_chunk_size, self._budget)
        idle_hits = pool.unreferenced(hits)
        ahead = -(-min(total + size, request.limit - 1) // size) - hits.size
        # A gate, not a reservation. A lone request needs none: it fits the whole pool.
        if rows.order.size and ahead + idle_hits > room:
            return _Verdict.STOP, room
        if self._others and belongs_elsewhere(request, computed, worker, self._others):
            return _Verdict.PASS_OVER, room
        pool.hold(hits)
        blocks = pool.allocate(-(-(computed + chunk) // size) - hits.size)
        self._seat(request, hits, blocks, chunk)
        return _Verdict.ADMITTED, room - ahead - idle_hits

    def _lookup(self, request: Request, total: int) -> tuple[IntArray, bool]:
        """The cached prefix, and whether an open step is filling the block after it."""
        worker = self._worker
        if not worker.caches_prefixes:
            return _NO_INTS, False
        if len(request.chain) < total // worker.spec.block_size:
            worker.extend_hashes(request, request.token_ids())
        # At least one token is computed, for there must be something to sample from.
        most = (total - 1) // worker.spec.block_size
        hits = worker.pool.match(request.chain, most)
        return hits, hits.size < most and request.chain[hits.size] in worker.pending

    def _seat(self, request: Request, hits: IntArray, blocks: IntArray, chunk: int) -> None:
        worker, counters = self._worker, self._counters
        tokens = request.token_ids()
        computed = int(hits.size) * worker.spec.block_size
        slot = worker.rows.occupy(request, tokens, hits, computed)
        worker.rows.append_blocks(slot, blocks)
        request.status = Status.RUNNING
        request.deferrals = 0
        request.worker_id, request.slot = worker.spec.worker_id, slot
        if request.cached_tokens is None:
            request.cached_tokens = min(computed, request.prompt_len)
        if worker.caches_prefixes:
            counters.prefix_query_tokens += tokens.size
            counters.prefix_hit_tokens += computed
        counters.recomputed_tokens += max(0, request.computed_once - computed)
        self._budget -= chunk
        self._new_rows.append(
            NewRow(
                slot=slot,
                token_ids=tokens,
                prompt_len=request.prompt_len,
                num_computed=computed,
                sampling=request.spec.sampling,
                traceparent=request.spec.traceparent,
            )
        )
        self._record(
            np.array([slot], np.int64),
            np.array([chunk], np.int64),
            np.array([hits.size + blocks.size], np.int64),
            np.concatenate([hits, blocks]),
        )

    # The finished step

    def _record(
        self, slots: IntArray, tokens: IntArray, num_blocks: IntArray, block_ids: IntArray
    ) -> None:
        self._slots.append(slots)
        self._tokens.append(tokens)
        self._num_blocks.append(num_blocks)
        self._block_ids.append(block_ids)
        if self._worker.caches_prefixes:
            for row in (tokens > 1).nonzero()[0].tolist():
                self._mark_pending(int(slots[row]), int(tokens[row]))

    def _mark_pending(self, slot: int, tokens: int) -> None:
        """Notes which known blocks this step fills, so that equal requests wait for them."""
        worker = self._worker
        request = worker.rows.request(slot)
        size = worker.spec.block_size
        before = int(worker.rows.computed[slot])
        known = min((before + tokens) // size, len(request.chain))
        for block in range(before // size, known):
            digest = request.chain[block]
            worker.pending[digest] = worker.pending.get(digest, 0) + 1
            self._pending.append(digest)

    def _seal(self) -> StepPlan:
        worker, rows = self._worker, self._worker.rows
        slots, tokens = _joined(self._slots), _joined(self._tokens)
        before = rows.computed[slots]
        computed = before + tokens
        samples = computed == rows.length[slots]
        rows.computed[slots] = computed
        rows.length[slots] += samples
        released = np.array(worker.released, np.int64)
        worker.released.clear()
        self._count(slots, before, computed, samples)
        step = OpenStep(
            step_id=worker.next_step_id,
            slots=slots,
            generations=rows.generation[slots],
            samples=samples,
            computed=computed,
            num_tokens=int(tokens.sum()),
            released=released,
            pending=tuple(self._pending),
        )
        worker.open.append(step)
        worker.next_step_id += 1
        return StepPlan(
            epoch=worker.epoch,
            step_id=step.step_id,
            released_slots=released,
            new_rows=tuple(self._new_rows),
            slots=slots,
            num_tokens=tokens,
            num_new_blocks=_joined(self._num_blocks),
            new_block_ids=_joined(self._block_ids),
            copied_from=_NO_INTS,
            copied_to=_NO_INTS,
            block_table_digest=(
                worker.block_table_digest() if self._config.check_block_tables else None
            ),
        )

    def _count(self, slots: IntArray, before: IntArray, computed: IntArray, samples: Mask) -> None:
        counters, prompt_len = self._counters, self._worker.rows.prompt_len[slots]
        counters.steps += 1
        prefills = before < prompt_len
        if prefills.any():
            counters.mixed_steps += int(not prefills.all())
            counters.chunked_prefills += int(np.count_nonzero(~samples))
            in_prompt = np.minimum(computed, prompt_len)[prefills] - before[prefills]
            counters.prompt_tokens += int(in_prompt.sum())


def _joined(parts: list[IntArray]) -> IntArray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NO_INTS
