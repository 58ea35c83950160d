"""The worker's permanent row per request slot: tokens, block table, sampling state.

Owns what the worker knows of each request, and the checks of every step against it: a step is
checked before anything is written with it, so a wrong slot or block id reaches no tensor. Knows
neither the model nor the wire. Lives as long as one attachment; preemption is release and add.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from services.worker.plan import (
    Attachment,
    Column,
    FailureKind,
    LinkProtocolError,
    NewRow,
    SlotFailure,
    StepLimits,
    StepPlan,
)


class RequestRows:
    """All rows of one attachment, column by column.

    Args:
        attachment: what the scheduler granted; slots are below its `num_slots`.
        limits: what the worker registered.
    """

    def __init__(self, attachment: Attachment, limits: StepLimits) -> None:
        slots = attachment.num_slots
        self._attachment = attachment
        self._limits = limits
        self._last_step_id = 0
        self._failures: dict[int, SlotFailure] = {}
        self._in_use = np.zeros(slots, dtype=np.bool_)
        self._failed = np.zeros(slots, dtype=np.bool_)
        self._mark = np.zeros(slots, dtype=np.int64)
        self.tokens = np.zeros((slots, limits.max_model_len), dtype=np.int32)
        """int32 [slots, max_model_len], prompt and output. Zero pages cost no memory until used."""
        self.known = np.zeros(slots, dtype=np.int64)
        """int64 [slots], tokens known."""
        self.computed = np.zeros(slots, dtype=np.int64)
        """int64 [slots], leading tokens whose keys and values are in the cache."""
        self.prompt_len = np.zeros(slots, dtype=np.int64)
        """int64 [slots], leading tokens that are the prompt."""
        self.block_table = np.zeros((slots, limits.max_blocks_per_row), dtype=np.int32)
        """int32 [slots, max blocks], block ids; zero past a row's blocks."""
        self.num_blocks = np.zeros(slots, dtype=np.int64)
        """int64 [slots], blocks in the row's table."""
        self.temperature = np.zeros(slots, dtype=np.float32)
        """float32 [slots]"""
        self.top_p = np.ones(slots, dtype=np.float32)
        """float32 [slots]"""
        self.top_k = np.zeros(slots, dtype=np.int64)
        """int64 [slots], 0 keeps all."""
        self.seed = np.zeros(slots, dtype=np.uint64)
        """uint64 [slots]"""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._limits.block_size

    def apply(self, plan: StepPlan) -> None:
        """Releases, adds and appends what `plan` says, and checks that its rows can be computed.

        Raises:
            LinkProtocolError: the step breaks the contract. The link must end with it, and these
                rows with the link.
        """
        self._check_order(plan)
        if plan.released_slots.size:
            self._release(plan.released_slots)
        self._check_slots("slots", plan.slots, limit=self._attachment.max_num_seqs)
        for row in plan.new_rows:
            self._add(row)
        self._check_in_use("slots", plan.slots)
        if plan.new_rows:
            self._check_planned(plan)
        if plan.new_block_ids.size:
            self._append_blocks(plan)
        if plan.copied_to.size:
            self._check_copies(plan)
        if self._attachment.check_block_tables:
            self._check_digest(plan.block_table_digest)
        self._check_tokens(plan)

    def failures(self, slots: Column) -> tuple[SlotFailure, ...]:
        """Those of `slots` [n] that cannot be computed any more, in order."""
        if not self._failures:
            return ()
        return tuple(self._failures[slot] for slot in slots[self._failed[slots]].tolist())

    def usable(self, slots: Column) -> npt.NDArray[np.bool_] | None:
        """Which of `slots` can be computed, bool [n]; None where all can, as almost always."""
        if not self._failures:
            return None
        return ~self._failed[slots]

    def advance(self, slots: Column, num_tokens: Column) -> None:
        """Counts `num_tokens` [n] more tokens of `slots` [n] as computed."""
        self.computed[slots] += num_tokens

    def append_tokens(self, slots: Column, token_ids: Column) -> None:
        """Appends one sampled token per row, both int64 [n]: the next step's input."""
        self.tokens[slots, self.known[slots]] = token_ids
        self.known[slots] += 1

    def fail(self, slot: int, kind: FailureKind, message: str) -> None:
        """Marks a row that cannot be computed any more; it stays so until it is released."""
        self._failed[slot] = True
        self._failures[slot] = SlotFailure(slot=slot, kind=kind, message=message)

    def block_table_digest(self) -> int:
        """Digest of all block tables, as `Step.block_table_digest` defines it."""
        digest = hashlib.sha256()
        for slot in np.flatnonzero(self._in_use):
            blocks = int(self.num_blocks[slot])
            digest.update(np.array([slot, blocks], dtype="<u4").tobytes())
            digest.update(self.block_table[slot, :blocks].astype("<u4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little")

    def _check_order(self, plan: StepPlan) -> None:
        if plan.epoch != self._attachment.epoch:
            raise LinkProtocolError(
                f"epoch: {plan.epoch}, this attachment is {self._attachment.epoch}"
            )
        if plan.step_id != self._last_step_id + 1:
            raise LinkProtocolError(f"step_id: {plan.step_id}, expected {self._last_step_id + 1}")
        self._last_step_id = plan.step_id

    def _release(self, slots: Column) -> None:
        self._check_slots("released_slots", slots, limit=self._attachment.num_slots)
        self._check_in_use("released_slots", slots)
        for slot in slots:
            self.block_table[slot, : self.num_blocks[slot]] = 0
            self._failures.pop(int(slot), None)
        self._in_use[slots] = False
        self._failed[slots] = False
        self.num_blocks[slots] = 0

    def _add(self, row: NewRow) -> None:
        slot, length = row.slot, len(row.token_ids)
        limits = self._limits
        field = f"new_requests[slot {slot}]"
        if slot >= self._attachment.num_slots:
            raise LinkProtocolError(f"{field}: slots are below {self._attachment.num_slots}")
        if self._in_use[slot]:
            raise LinkProtocolError(f"{field}: the slot is in use")
        if not 1 <= length <= limits.max_model_len:
            raise LinkProtocolError(
                f"{field}.token_ids: {length} tokens, must be 1 to {limits.max_model_len}"
            )
        if not 1 <= row.prompt_len <= length:
            raise LinkProtocolError(
                f"{field}.prompt_len: {row.prompt_len}, must be 1 to the {length} tokens given"
            )
        if row.num_computed >= length:
            raise LinkProtocolError(
                f"{field}.num_computed: {row.num_computed}, must leave one of {length} tokens"
            )
        self._in_use[slot] = True
        self.tokens[slot, :length] = row.token_ids
        self.known[slot] = length
        self.computed[slot] = row.num_computed
        self.prompt_len[slot] = row.prompt_len
        self.temperature[slot] = row.temperature
        self.top_p[slot] = row.top_p
        self.top_k[slot] = row.top_k
        self.seed[slot] = row.seed
        problem = _request_problem(row, limits.vocab_size)
        if problem is not None:
            self.fail(slot, FailureKind.BAD_REQUEST, problem)

    def _append_blocks(self, plan: StepPlan) -> None:
        ids, counts, slots = plan.new_block_ids, plan.num_new_blocks, plan.slots
        limits = self._limits
        highest = int(ids.max())
        if highest >= limits.num_blocks:
            raise LinkProtocolError(
                f"new_block_ids: {highest}, block ids are below {limits.num_blocks}"
            )
        held = self.num_blocks[slots]
        most = limits.max_blocks_per_row
        over = held + counts > most
        if over.any():
            _refuse_row(plan, over, lambda i: f"{held[i]} + {counts[i]} blocks, a row holds {most}")
        starts = np.cumsum(counts) - counts
        offsets = np.arange(len(ids)) + np.repeat(held - starts, counts)
        self.block_table[np.repeat(slots, counts), offsets] = ids
        self.num_blocks[slots] = held + counts

    def _check_copies(self, plan: StepPlan) -> None:
        for field, blocks in (("copied_from", plan.copied_from), ("copied_to", plan.copied_to)):
            highest = int(blocks.max())
            if highest >= self._limits.num_blocks:
                raise LinkProtocolError(
                    f"{field}: {highest}, block ids are below {self._limits.num_blocks}"
                )
        targets, counts = np.unique(plan.copied_to, return_counts=True)
        if (counts > 1).any():
            raise LinkProtocolError(f"copied_to: block {targets[counts > 1][0]} appears twice")
        both = np.isin(targets, plan.copied_from)
        if both.any():
            raise LinkProtocolError(f"copied_to: block {targets[both][0]} is in copied_from too")

    def _check_slots(self, field: str, slots: Column, *, limit: int) -> None:
        """At most `limit`, all in range, none twice."""
        if len(slots) > limit:
            raise LinkProtocolError(f"{field}: {len(slots)} slots, at most {limit}")
        if not slots.size:
            return
        highest = int(slots.max())
        if highest >= self._attachment.num_slots:
            raise LinkProtocolError(
                f"{field}: {highest}, slots are below {self._attachment.num_slots}"
            )
        order = np.arange(len(slots))
        self._mark[slots] = order  # the last of equal slots wins
        twice = self._mark[slots] != order
        if twice.any():
            raise LinkProtocolError(f"{field}: slot {slots[twice][0]} appears twice")

    def _check_in_use(self, field: str, slots: Column) -> None:
        used = self._in_use[slots]
        if not used.all():
            raise LinkProtocolError(f"{field}: slot {slots[~used][0]} is not in use")

    def _check_planned(self, plan: StepPlan) -> None:
        planned = set(plan.slots.tolist())
        for row in plan.new_rows:
            if row.slot not in planned:
                raise LinkProtocolError(
                    f"new_requests[slot {row.slot}]: a new request needs a row in its step"
                )

    def _check_digest(self, expected: int | None) -> None:
        if expected is None:
            raise LinkProtocolError("block_table_digest: absent, Registered announced it")
        if expected != self.block_table_digest():
            raise LinkProtocolError("block_table_digest: the block tables of both ends differ")

    def _check_tokens(self, plan: StepPlan) -> None:
        """Every row computes known tokens, in blocks it holds, and has room for what it samples."""
        counts, slots, limits = plan.num_tokens, plan.slots, self._limits
        if not counts.size:
            return
        total = int(counts.sum())
        if total > limits.max_num_batched_tokens:
            raise LinkProtocolError(
                f"num_tokens: {total} in all, at most {limits.max_num_batched_tokens}"
            )
        known = self.known[slots]
        ends = self.computed[slots] + counts
        room = self.num_blocks[slots] * limits.block_size
        bad = (counts < 1) | (ends > np.minimum(known, room))
        full = (ends == known) & (known >= limits.max_model_len)
        usable = self.usable(slots)
        if usable is not None:
            bad &= usable
            full &= usable
        if bad.any():
            _refuse_row(
                plan,
                bad,
                lambda i: (
                    f"{counts[i]} tokens up to position {ends[i]}, it has {known[i]} known tokens "
                    f"and blocks for {room[i]}"
                ),
            )
        if full.any():
            _refuse_row(plan, full, lambda i: f"no room for a token past {limits.max_model_len}")


def _refuse_row(plan: StepPlan, bad: npt.NDArray[np.bool_], describe: Callable[[int], str]) -> None:
    row = int(np.flatnonzero(bad)[0])
    raise LinkProtocolError(
        f"step {plan.step_id}, row {row} (slot {plan.slots[row]}): {describe(row)}"
    )


def _request_problem(row: NewRow, vocab_size: int) -> str | None:
    """What makes this one request impossible to compute: its own failure, not the link's."""
    highest = int(row.token_ids.max())
    if highest >= vocab_size:
        return f"token_ids: {highest}, ids are below {vocab_size}"
    if not (math.isfinite(row.temperature) and row.temperature >= 0):
        return f"temperature: must be finite and >= 0, got {row.temperature}"
    if not 0 < row.top_p <= 1:
        return f"top_p: must be in (0, 1], got {row.top_p}"
    return None
