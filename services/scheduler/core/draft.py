"""One step while it is put together: its rows, their blocks, the requests it carries whole.

Owns the columns of the step. Which rows go in is decided in `planning`. A row may still be dropped,
when its request gives way to another one later in the same step.
"""

import numpy as np

from services.scheduler.core.config import Config
from services.scheduler.core.plan import Counters, IntArray, Mask, NewRow, StepPlan
from services.scheduler.core.request import Request
from services.scheduler.core.worker_state import OpenStep, WorkerState

NO_INTS: IntArray = np.empty(0, np.int64)


class Draft:
    """The columns of one step of one worker.

    Args:
        worker: whose step; its rows advance when the draft is sealed.
    """

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self.carried_tokens = 0
        """Token ids of the requests it carries whole."""
        self._slots: list[IntArray] = []
        self._tokens: list[IntArray] = []
        self._num_blocks: list[IntArray] = []
        self._block_ids: list[IntArray] = []
        self._new_rows: dict[int, NewRow] = {}
        self._pending: list[bytes] = []
        self._copies: list[tuple[int, int]] = []
        self._single: set[int] = set()
        self._dropped: set[int] = set()

    @property
    def new_slots(self) -> list[int]:
        """Slots of the requests it carries whole."""
        return list(self._new_rows)

    def has_row(self, slot: int) -> bool:
        """Whether one of the rows added by itself is this one."""
        return slot in self._single

    def has_dropped(self, slot: int) -> bool:
        """Whether the row's request gave way in this step."""
        return slot in self._dropped

    def record(
        self, slots: IntArray, tokens: IntArray, num_blocks: IntArray, block_ids: IntArray
    ) -> None:
        """Adds rows, with the blocks appended to each back to back."""
        if slots.size == 1:
            self._single.add(int(slots[0]))
        self._slots.append(slots)
        self._tokens.append(tokens)
        self._num_blocks.append(num_blocks)
        self._block_ids.append(block_ids)
        if self._worker.caches_prefixes:
            for row in (tokens > 1).nonzero()[0].tolist():
                self._mark_pending(int(slots[row]), int(tokens[row]))

    def carry(self, slot: int, request: Request, computed: int) -> None:
        """Sends the request in this row whole."""
        token_ids = request.token_ids()
        self.carried_tokens += token_ids.size
        self._new_rows[slot] = NewRow(
            slot=slot,
            handle=request.spec.handle,
            token_ids=token_ids,
            prompt_len=request.prompt_len,
            num_computed=computed,
            sampling=request.spec.sampling,
            traceparent=request.spec.traceparent,
        )

    def copy(self, source: int, target: int) -> None:
        """Has the worker copy a block before the forward; the source is held, and let go by `seal`.

        A block that is copied must not be copied over in the same step.
        """
        self._copies.append((source, target))

    def drop(self, slot: int) -> None:
        """Takes a running request's row out, if it is in; it gave way."""
        self._dropped.add(slot)

    def seal(self, config: Config, counters: Counters) -> StepPlan | None:
        """The step, or None where there is nothing to compute and nothing to release."""
        worker, rows = self._worker, self._worker.rows
        for source, _ in self._copies:
            worker.pool.release(np.array([source], np.int64))
        if not self._slots and not worker.released:
            return None
        slots, tokens, num_blocks, block_ids = self._columns()
        before = rows.computed[slots]
        computed = before + tokens
        samples = computed == rows.length[slots]
        rows.computed[slots] = computed
        rows.length[slots] += samples
        released = np.array(worker.released, np.int64)
        worker.released.clear()
        self._count(counters, slots, before, computed, samples)
        step = OpenStep(
            step_id=worker.next_step_id,
            slots=slots,
            generations=rows.generation[slots],
            samples=samples,
            computed=computed,
            tokens=tokens,
            num_tokens=int(tokens.sum()),
            context=int(computed.sum()),
            overlapped=bool(worker.open),
            released=released,
            pending=tuple(self._pending),
        )
        worker.open.append(step)
        worker.next_step_id += 1
        copies = np.array(self._copies, np.int64).reshape(-1, 2)
        return StepPlan(
            epoch=worker.epoch,
            step_id=step.step_id,
            released_slots=released,
            new_rows=tuple(self._new_rows.values()),
            slots=slots,
            num_tokens=tokens,
            num_new_blocks=num_blocks,
            new_block_ids=block_ids,
            copied_from=copies[:, 0],
            copied_to=copies[:, 1],
            block_table_digest=worker.block_table_digest() if config.check_block_tables else None,
        )

    def _columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        slots, tokens = _joined(self._slots), _joined(self._tokens)
        num_blocks, block_ids = _joined(self._num_blocks), _joined(self._block_ids)
        if self._dropped:
            kept = ~np.isin(slots, sorted(self._dropped))
            block_ids = block_ids[np.repeat(kept, num_blocks)]
            slots, tokens, num_blocks = slots[kept], tokens[kept], num_blocks[kept]
        return slots, tokens, num_blocks, block_ids

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

    def _count(
        self,
        counters: Counters,
        slots: IntArray,
        before: IntArray,
        computed: IntArray,
        samples: Mask,
    ) -> None:
        prompt_len = self._worker.rows.prompt_len[slots]
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
    return np.concatenate(parts) if parts else NO_INTS
