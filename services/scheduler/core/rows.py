"""Running requests of one worker in columns, one row per slot: a steady step walks no objects.

Owns every per-slot fact: tokens, lengths, block tables. Knows nothing of queues or budgets.
Lengths of a row, in tokens: `known` are those the core has seen; `length` adds those that open
steps are sampling, never beyond `limit`; `computed` advances when a step is planned, so a row has
work while `computed` < `length`.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import IntArray, Mask, TokenArray, WorkerSpec
from services.scheduler.core.request import Request

NO_TARGET = int(np.iinfo(np.int64).max)


class Rows:
    """The row table of one worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        slots = spec.num_slots
        width = -(-spec.max_model_len // spec.block_size)
        # Zeros come from untouched pages: memory is used only as far as rows are written.
        self.token_blocks: TokenArray = np.zeros((slots, width, spec.block_size), np.uint32)
        self.tokens: TokenArray = self.token_blocks.reshape(slots, width * spec.block_size)
        self.blocks: IntArray = np.zeros((slots, width), np.int64)
        self.num_blocks: IntArray = np.zeros(slots, np.int64)
        self.registered: IntArray = np.zeros(slots, np.int64)
        self.computed: IntArray = np.zeros(slots, np.int64)
        self.known: IntArray = np.zeros(slots, np.int64)
        self.length: IntArray = np.zeros(slots, np.int64)
        self.limit: IntArray = np.zeros(slots, np.int64)
        self.prompt_len: IntArray = np.zeros(slots, np.int64)
        self.ignore_eos: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.handle: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.arrival: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.arrived: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.rank: IntArray = np.zeros(slots, np.int64)
        self.flow: IntArray = np.zeros(slots, np.int64)
        self.tpot_target_us: IntArray = np.zeros(slots, np.int64)
        """Microseconds; NO_TARGET where the request has none."""
        self.worker_us: IntArray = np.zeros(slots, np.int64)
        """Share of the answered steps' computing time, microseconds."""
        self.generation: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self._requests: list[Request | None] = [None] * slots
        self.order: IntArray = np.empty(0, np.int64)
        """Slots in use, by arrival."""
        self.stops: IntArray = np.empty(0, np.int64)
        """The stop tokens of all rows in use, each as `slot << 32 | token`."""
        self._free: deque[int] = deque(range(slots))

    @property
    def num_free_slots(self) -> int:
        """Requests that can be given a slot."""
        return len(self._free)

    @property
    def has_free_slot(self) -> bool:
        """A request can be given a slot."""
        return bool(self._free)

    def occupy(self, request: Request, tokens: TokenArray, hits: IntArray, computed: int) -> int:
        """Gives a request a row.

        Args:
            request: who; its limit is set.
            tokens: uint64 [n], prompt and output so far.
            hits: blocks that hold its first `computed` tokens already.
            computed: tokens that need not be computed here.

        Returns:
            The slot.
        """
        assert request.limit is not None
        slot = self._free.popleft()
        size = tokens.size
        self.tokens[slot, :size] = tokens
        self.blocks[slot, : hits.size] = hits
        self.num_blocks[slot] = self.registered[slot] = hits.size
        self.computed[slot] = computed
        self.known[slot] = self.length[slot] = size
        self.limit[slot] = request.limit
        self.prompt_len[slot] = request.prompt_len
        self.ignore_eos[slot] = request.spec.ignore_eos
        if request.spec.stop_token_ids:
            keys = slot << 32 | np.array(request.spec.stop_token_ids, np.int64)
            self.stops = np.concatenate([self.stops, keys])
        self.handle[slot] = request.spec.handle
        self.arrival[slot] = request.arrival
        self.arrived[slot] = request.arrived
        self.worker_us[slot] = 0
        self._requests[slot] = request
        self.classify(slot)
        place = int(np.searchsorted(self.arrival[self.order], request.arrival))
        self.order = np.insert(self.order, place, slot).astype(np.int64)
        return slot

    def classify(self, slot: int) -> None:
        """Takes over how its request is ranked, which may have changed."""
        request = self.request(slot)
        self.rank[slot] = request.rank
        self.flow[slot] = request.flow
        target = request.spec.tpot_target_us
        self.tpot_target_us[slot] = NO_TARGET if target is None else target

    def request(self, slot: int) -> Request:
        """The request in a row that is in use."""
        request = self._requests[slot]
        assert request is not None, "a row without a request"
        return request

    def stopped(self, slots: IntArray, tokens: TokenArray) -> Mask:
        """Which of these rows have their token among their own stop tokens."""
        return np.isin(slots << 32 | tokens.astype(np.int64), self.stops)

    def append_blocks(self, slot: int, blocks: IntArray) -> None:
        """Extends a row's block table."""
        held = int(self.num_blocks[slot])
        self.blocks[slot, held : held + blocks.size] = blocks
        self.num_blocks[slot] = held + blocks.size

    def block_table(self, slot: int) -> IntArray:
        """The row's blocks in the order of its tokens."""
        return self.blocks[slot, : self.num_blocks[slot]].copy()

    def output(self, slot: int) -> list[int]:
        """The row's known output tokens."""
        output: list[int] = self.tokens[slot, self.prompt_len[slot] : self.known[slot]].tolist()
        return output

    def vacate(self, slots: list[int]) -> None:
        """Takes requests off their rows; the slots stay reserved until `recycle`."""
        self.order = self.order[~np.isin(self.order, slots)]
        if self.stops.size:
            self.stops = self.stops[~np.isin(self.stops >> 32, slots)]
        self.generation[slots] += 1
        self.num_blocks[slots] = 0
        for slot in slots:
            self._requests[slot] = None

    def recycle(self, slots: IntArray) -> None:
        """Makes vacated slots free again: the step that released them has been answered.

        They are given out before others, so that only so many rows of the tables are ever touched
        as were in use at one time: the first touch of a page costs more than writing it.
        """
        self._free.extendleft(slots.tolist())

    def unused_slots(self) -> list[int]:
        """Free slots, the next to be given first."""
        return list(self._free)
