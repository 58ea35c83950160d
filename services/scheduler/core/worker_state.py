"""All the core keeps about one attached worker: its rows, its block pool, its open steps.

Owns the moves that keep rows and pool in step with each other. Decides nothing.
"""

import hashlib
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.cache_log import CacheLog, Removed, Stored
from services.scheduler.core.chain import Hashing
from services.scheduler.core.config import Config
from services.scheduler.core.pacing import Pacing
from services.scheduler.core.plan import IntArray, TokenArray, WorkerSpec
from services.scheduler.core.request import Request, Status
from services.scheduler.core.rows import Rows
from services.scheduler.core.step_time import StepShape, StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """A step that was sent and not answered.

    Args:
        slots: int64 [rows].
        generations: int64 [rows], who held the slot when the step was planned.
        samples: bool [rows], rows that give a token.
        computed: int64 [rows], tokens computed once the step is done.
        tokens: int64 [rows], tokens the step computes of each.
        num_tokens: tokens the step computes.
        context: tokens computed of all its requests once it is done.
        overlapped: it was planned while another one was open.
        released: slots this step told the worker to release.
        pending: hashes of prompt blocks this step fills.
    """

    step_id: int
    slots: IntArray
    generations: npt.NDArray[np.int64]
    samples: npt.NDArray[np.bool_]
    computed: IntArray
    tokens: IntArray
    num_tokens: int
    context: int
    overlapped: bool
    released: IntArray
    pending: tuple[bytes, ...]


class WorkerState:
    """One attachment of one worker, from `attach` to `lost`.

    Args:
        spec: as announced; tables are sized by it.
        epoch: of the attachment.
        config: the caps, and the shape of the pool.
        hashing: of the prefix cache.
    """

    def __init__(self, spec: WorkerSpec, epoch: int, config: Config, hashing: Hashing) -> None:
        self.spec = spec
        self.epoch = epoch
        self._hashing = hashing if config.enable_prefix_caching else None
        self._partial = config.enable_prefix_caching and config.partial_block_reuse
        self.pool = BlockPool(
            spec.num_blocks,
            eviction=config.eviction,
            time_wheel_slots=config.time_wheel_slots,
            block_size=spec.block_size,
            partial_hash=hashing.block if self._partial else None,
        )
        self.step_time = StepTimeModel()
        self.configure(config)
        self.rows = Rows(spec)
        self.open: deque[OpenStep] = deque()
        self.next_step_id = 1
        self.computed_tokens = 0
        """In all answered steps."""
        self.execute_us = 0
        """What they took, microseconds."""
        self.released: list[int] = []
        """Slots vacated since the last step."""
        self.pending: dict[bytes, int] = {}
        """Hashes that open steps are filling, with how many blocks each."""
        self.orphans: dict[tuple[int, int], Request] = {}
        """Preempted requests with tokens in flight, by (slot, generation)."""
        self.is_eos: npt.NDArray[np.bool_] = np.zeros(spec.vocab_size, np.bool_)
        self.is_eos[list(spec.eos_token_ids)] = True
        self.due: int | None = None
        """When to plan the next step, microseconds; None: as soon as may be."""
        self.pacing = Pacing()
        self.steps_without_prefill = 0
        """In a row, while prompts waited for computation and decodes left no time."""
        self.ones: IntArray = np.ones(spec.max_num_seqs, np.int64)
        self.zeros: IntArray = np.zeros(spec.max_num_seqs, np.int64)

    def configure(self, config: Config) -> None:
        """Takes the caps; they can only lower what the worker announced."""
        spec = self.spec
        self.token_budget = min(
            spec.max_num_batched_tokens,
            config.max_num_batched_tokens or spec.max_num_batched_tokens,
        )
        """Most tokens in one step."""
        self.seat_cap = min(
            spec.max_num_seqs, config.max_num_seqs or spec.max_num_seqs, self.token_budget
        )
        """Most running requests."""
        self.pool.max_pinned = spec.num_blocks * config.max_pinned_share // 1000

    @property
    def caches_prefixes(self) -> bool:
        """Full blocks are hashed and reused."""
        return self._hashing is not None

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that the requests on it want computed now: of open steps, and not yet planned."""
        rows = self.rows
        unplanned = int((rows.length[rows.order] - rows.computed[rows.order]).sum())
        return unplanned + sum(step.num_tokens for step in self.open)

    def room_beyond_running(self) -> int:
        """Blocks left once every running request got those of its next `block_size` tokens."""
        rows, size = self.rows, self.spec.block_size
        order = rows.order
        # The last token up to the limit is sampled and never computed.
        ahead = -(-np.minimum(rows.length[order] + size, rows.limit[order] - 1) // size)
        reserved = np.maximum(ahead - rows.num_blocks[order], 0)
        return self.pool.available - int(reserved.sum())

    def blocks_freed_by(self, slot: int) -> int:
        """How much more room there is beyond running requests without this one."""
        rows, size = self.rows, self.spec.block_size
        table = rows.block_table(slot)
        ahead = -(-min(int(rows.length[slot]) + size, int(rows.limit[slot]) - 1) // size)
        return table.size - self.pool.shared(table) + max(0, ahead - table.size)

    def root(self, request: Request) -> bytes:
        """Parent of the hash of the request's first block."""
        assert self._hashing is not None
        return self._hashing.root(self.spec.model_digest, request.spec.salt)

    def extend_hashes(self, request: Request, slot_tokens: npt.NDArray[np.uint32]) -> None:
        """Completes the request's chain over the full blocks of its tokens so far."""
        assert self._hashing is not None
        size, chain = self.spec.block_size, request.chain
        parent = chain.last or self.root(request)
        data = slot_tokens[len(chain) * size :].astype("<u4", copy=False).tobytes()
        width = 4 * size
        for start in range(0, len(data) - width + 1, width):
            parent = self._hashing.block(parent, data[start : start + width])
            chain.append(parent)

    def register_filled(self, slots: IntArray, computed: IntArray) -> list[tuple[int, str]]:
        """Makes the rows' full blocks below these computed tokens findable; each has one at least.

        Returns:
            Rows whose blocks cannot be hashed, and why; nothing of them is registered.
        """
        rows, size = self.rows, self.spec.block_size
        firsts, ends = rows.registered[slots], computed // size
        # The tokens of each row's next block in one gather: in decode that is all there is to hash.
        data = rows.token_blocks[slots, firsts].astype("<u4", copy=False).tobytes()
        width = 4 * size
        digests: list[bytes] = []
        faulty: dict[int, str] = {}
        work = zip(slots.tolist(), firsts.tolist(), ends.tolist(), strict=True)
        for place, (slot, first, end) in enumerate(work):
            next_block = data[place * width : (place + 1) * width]
            try:
                digests.append(self._digests(slot, first, end, next_block))
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the step
                faulty[slot] = repr(error)
        if faulty:
            good = ~np.isin(slots, list(faulty))
            slots, firsts, ends = slots[good], firsts[good], ends[good]
        if slots.size:
            rows.registered[slots] = ends
            blocks, parents, tokens = self._filled(slots, firsts, ends)
            self.pool.register_all(blocks, b"".join(digests), parents=parents, tokens=tokens)
            if self.pool.log is not None:
                for slot, first, end in zip(
                    slots.tolist(), firsts.tolist(), ends.tolist(), strict=True
                ):
                    self._note(self.pool.log, slot, first, end)
        return list(faulty.items())

    def watch(self, log: CacheLog | None) -> None:
        """Notes there from now on what is cached, and what running requests have cached so far."""
        self.pool.log = log
        if log is None:
            return
        if len(self.pool.index):
            log.complete = False
        for slot in self.rows.order.tolist():
            if registered := int(self.rows.registered[slot]):
                self._note(log, slot, 0, registered)

    def note_loss(self) -> None:
        """Notes that all of it is gone."""
        if self.pool.log is not None:
            self.pool.log.notes.append(Removed(digests=self.pool.cached_hashes()))

    def _note(self, log: CacheLog, slot: int, first: int, end: int) -> None:
        request, size = self.rows.request(slot), self.spec.block_size
        parent = request.chain[first - 1] if first else b""
        if not log.complete and parent not in log.described:
            first, parent = 0, b""
        log.notes.append(
            Stored(
                salt=request.spec.salt,
                parent=parent,
                digests=request.chain.between(first, end),
                # A copy: the row is another request's some time.
                tokens=self.rows.tokens[slot, first * size : end * size].reshape(-1, size).copy(),
            )
        )

    def _digests(self, slot: int, first: int, end: int, next_block: bytes) -> bytes:
        """The digests of a row's blocks `first` to `end` - 1, made where they are not known.

        Args:
            slot: of the row.
            first: its first block to register.
            end: after its last one.
            next_block: the tokens of block `first`, little-endian uint32.
        """
        assert self._hashing is not None
        request = self.rows.request(slot)
        chain = request.chain
        known = len(chain)
        if known == first:
            digest = self._hashing.block(chain.last or self.root(request), next_block)
            chain.append(digest)
            if end == first + 1:
                return digest
        if known < end:
            self.extend_hashes(request, self.rows.tokens[slot, : end * self.spec.block_size])
        return chain.between(first, end)

    def _filled(
        self, slots: IntArray, firsts: IntArray, ends: IntArray
    ) -> tuple[IntArray, bytes, TokenArray | None]:
        """These rows' blocks; with partial reuse also their parents' digests and their tokens."""
        rows, size = self.rows, self.spec.block_size
        if not self._partial and not np.count_nonzero(ends - firsts - 1):
            return rows.blocks[slots, firsts], b"", None
        work = list(zip(slots.tolist(), firsts.tolist(), ends.tolist(), strict=True))
        blocks = np.concatenate([rows.blocks[slot, first:end] for slot, first, end in work])
        if not self._partial:
            return blocks, b"", None
        parents: list[bytes] = []
        for slot, first, end in work:
            request = rows.request(slot)
            if not first:
                parents.append(self.root(request))
            parents.append(request.chain.between(max(first - 1, 0), end - 1))
        tokens = [rows.tokens[slot, first * size : end * size] for slot, first, end in work]
        return blocks, b"".join(parents), np.concatenate(tokens).reshape(-1, size)

    def step_started(self, now: int) -> None:
        """The oldest open step starts about now; decides when the one after it is due."""
        self.due = None
        if self.spec.max_in_flight != 2:
            return  # a pipeline is kept full
        step = self.open[0]
        shape = StepShape(tokens=step.num_tokens, rows=step.slots.size, context=step.context)
        predicted = self.step_time.predict_us(shape)
        if predicted is not None:
            self.due = self.pacing.due(now, predicted)

    def step_answered(self, step: OpenStep, execute_us: int, idle_us: int, now: int) -> None:
        """Learns how long a step took; the next open one starts."""
        shape = StepShape(tokens=step.num_tokens, rows=step.slots.size, context=step.context)
        self.step_time.observe(shape, execute_us)
        self.computed_tokens += step.num_tokens
        self.execute_us += execute_us
        if execute_us > 0:
            self.pacing.answered(execute_us, idle_us, now, overlapped=step.overlapped)
        if self.open:
            self.step_started(now)

    def drop_pending(self, hashes: tuple[bytes, ...]) -> None:
        """An open step that was filling these blocks has been answered."""
        for digest in hashes:
            left = self.pending[digest] - 1
            if left:
                self.pending[digest] = left
            else:
                del self.pending[digest]

    def unseat(self, slots: list[int]) -> None:
        """Frees blocks and rows of requests that stop here; the next step tells the worker."""
        for slot in slots:
            self.pool.release(self.rows.block_table(slot))
        self.rows.vacate(slots)
        self.released.extend(slots)

    def requeue(self, slot: int, now: int) -> Request:
        """Takes a running request off the worker with all its tokens so far; it is WAITING after.

        Tokens of open steps still count for it; see `orphans`.
        """
        rows = self.rows
        request = rows.request(slot)
        request.output = rows.output(slot)
        request.in_flight = int(rows.length[slot] - rows.known[slot])
        request.computed_once = max(
            request.computed_once, min(int(rows.computed[slot]), int(rows.known[slot]))
        )
        request.status = Status.WAITING
        request.worker_us += int(rows.worker_us[slot])
        request.queued_since = now
        request.worker_id, request.slot = "", -1
        if request.in_flight:
            self.orphans[slot, int(rows.generation[slot])] = request
        self.unseat([slot])
        return request

    def block_table_digest(self) -> int:
        """Digest of all block tables; its form is part of the wire contract (worker.proto)."""
        digest = hashlib.sha256()
        for slot in np.sort(self.rows.order).tolist():
            table = self.rows.block_table(slot)
            digest.update(np.array([slot, table.size], "<u4").tobytes())
            digest.update(table.astype("<u4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little")

    def check_invariants(self) -> None:
        """Asserts that rows, pool, slots and open steps agree."""
        rows, spec = self.rows, self.spec
        order = rows.order
        tables = [rows.block_table(slot) for slot in order.tolist()]
        self.pool.check_invariants(np.concatenate([np.empty(0, np.int64), *tables]))
        in_limbo = [s for step in self.open for s in step.released.tolist()]
        every = sorted([*order.tolist(), *rows.unused_slots(), *self.released, *in_limbo])
        assert every == list(range(spec.num_slots)), "a slot is lost or in two states"
        assert (np.diff(rows.arrival[order]) > 0).all(), "running requests are out of order"
        computed, known, length = rows.computed[order], rows.known[order], rows.length[order]
        assert (computed <= length).all(), "computed beyond the row's length"
        assert (known <= length).all(), "known beyond the row's length"
        assert (length <= rows.limit[order]).all(), "length beyond the limit"
        assert (length - known <= len(self.open)).all(), "more tokens in flight than open steps"
        held = rows.num_blocks[order]
        assert (held == -(-computed // spec.block_size)).all(), "blocks differ from computed tokens"
        assert len(self.open) <= spec.max_in_flight, "too many open steps"
        pending = [digest for step in self.open for digest in step.pending]
        assert sum(self.pending.values()) == len(pending), "pending hashes are off"
        for slot in order.tolist():
            request = rows.request(slot)
            assert request.status is Status.RUNNING, "a running request with a wrong status"
            assert (request.worker_id, request.slot) == (spec.worker_id, slot), "wrong place"
