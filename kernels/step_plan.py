"""Where a step's attention finds its keys and values: index tensors that every layer uses.

Rows with one query token are put in groups of similar length, so that a group is one batched
product and little of it is padding. Other rows stand alone. Knows block tables, not values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionBatch

_MAX_GROUP_BYTES = 6 * 2**20
"""Keys fetched at once: few enough that the copy is still in a processor cache when used."""

_MAX_PADDED_BYTES = 2**19
"""Padding of a group that costs about as much as one more group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows with one query token, padded to the longest of them.

    Attributes:
        tokens: int64 [rows], their query tokens.
        gather: int64 [rows * kv_heads * blocks], into the cache seen as one row per head and block.
        mask: float32 [rows * kv_heads, 1, blocks * block_size], 0 or -inf.
    """

    tokens: Tensor
    gather: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """One row with any number of query tokens.

    Attributes:
        start: its first query token.
        stop: behind its last query token.
        gather: int64 [kv_heads * blocks], as in DecodeGroup.
        context: tokens in the gathered blocks, from the first one on, that exist.
        mask: float32 [stop - start, context], 0 or -inf; None where plain causality says it all
            (as many queries as keys, no window).
    """

    start: int
    stop: int
    gather: Tensor
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All rows of a step, each in exactly one place."""

    groups: tuple[DecodeGroup, ...]
    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a plan must know of the cache.

    Attributes:
        block_size: tokens per block.
        block_bytes: of the keys of one block, all heads, one layer.
        stride: blocks per head.
        null_block: a block of zeros.
    """

    num_kv_heads: int
    block_size: int
    block_bytes: int
    stride: int
    null_block: int


def plan_step(batch: AttentionBatch, window: int | None, shape: CacheShape) -> StepPlan:
    """Makes the plan of a step for layers with this window (None: no window)."""
    planner = _Planner(batch, window, shape)
    decodes = batch.num_decode_rows
    rows = range(decodes, len(planner.seq_lens))
    return StepPlan(
        groups=tuple(planner.group(members) for members in planner.grouped(decodes)),
        rows=tuple(planner.row(row) for row in rows if planner.queries(row)),
    )


def causal_mask(queries: int, context: int, window: int | None) -> Tensor:
    """float32 [queries, context]: 0 where a query sees a key, else -inf; both end together."""
    query_at = torch.arange(context - queries, context)[:, None]
    key_at = torch.arange(context)
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    return _additive(hidden)


def _additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class _Planner:
    """The step's rows as Python numbers, and the index arithmetic over them."""

    def __init__(self, batch: AttentionBatch, window: int | None, shape: CacheShape) -> None:
        self.seq_lens: list[int] = batch.seq_lens.tolist()
        self._starts: list[int] = batch.query_start_loc.tolist()
        self._tables = batch.block_tables.to(device="cpu", dtype=torch.int64)
        self._device = batch.block_tables.device
        self._window = window
        self._shape = shape
        # Distance between the same block of neighbouring heads, [kv_heads, 1].
        self._heads = torch.arange(shape.num_kv_heads)[:, None] * shape.stride

    def queries(self, row: int) -> int:
        return self._starts[row + 1] - self._starts[row]

    def grouped(self, decodes: int) -> list[list[int]]:
        """Puts the leading rows of similar length together, each group in batch order."""
        widths = [self._end_block(row) - self._first_block(row) for row in range(decodes)]
        most_blocks = _MAX_GROUP_BYTES // self._shape.block_bytes
        most_padding = _MAX_PADDED_BYTES // self._shape.block_bytes
        groups: list[list[int]] = []
        width = padded = 0
        for row in sorted(range(decodes), key=lambda row: (-widths[row], row)):
            missing = width - widths[row]
            size = (len(groups[-1]) + 1) * width if groups else 0
            if groups and size <= most_blocks and padded + missing <= most_padding:
                groups[-1].append(row)
                padded += missing
            else:
                groups.append([row])
                width, padded = widths[row], 0
        return [sorted(group) for group in groups]

    def group(self, members: list[int]) -> DecodeGroup:
        block_size = self._shape.block_size
        firsts = [self._first_block(row) for row in members]
        ends = [self._end_block(row) for row in members]
        width = max(end - first for first, end in zip(firsts, ends, strict=True))
        blocks = torch.full((len(members), 1, width), self._shape.null_block)
        for place, (row, first, end) in enumerate(zip(members, firsts, ends, strict=True)):
            blocks[place, 0, : end - first] = self._tables[row, first:end]
        lengths = torch.tensor([self.seq_lens[row] for row in members])[:, None]
        positions = torch.tensor(firsts)[:, None] * block_size + torch.arange(width * block_size)
        hidden = positions >= lengths
        if self._window is not None:
            hidden |= positions < lengths - self._window
        mask = _additive(hidden).repeat_interleave(self._shape.num_kv_heads, dim=0)
        return DecodeGroup(
            tokens=torch.tensor([self._starts[row] for row in members], device=self._device),
            gather=(blocks + self._heads).reshape(-1).to(self._device),
            mask=mask[:, None, :].to(self._device),
        )

    def row(self, row: int) -> PrefillRow:
        first = self._first_block(row)
        blocks = self._tables[row, first : self._end_block(row)]
        context = self.seq_lens[row] - first * self._shape.block_size
        mask = None
        if self.queries(row) != context or (self._window or context) < context:
            mask = causal_mask(self.queries(row), context, self._window).to(self._device)
        return PrefillRow(
            start=self._starts[row],
            stop=self._starts[row + 1],
            gather=(blocks + self._heads).reshape(-1).to(self._device),
            context=context,
            mask=mask,
        )

    def _first_block(self, row: int) -> int:
        """The first block that any query of the row sees."""
        if self._window is None:
            return 0
        first_query = self.seq_lens[row] - self.queries(row)
        return max(0, first_query + 1 - self._window) // self._shape.block_size

    def _end_block(self, row: int) -> int:
        return -(-self.seq_lens[row] // self._shape.block_size)
