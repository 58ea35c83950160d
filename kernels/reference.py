"""The plain PyTorch kernel set: right on every device, the oracle of the others, and fast on CPUs.

Keys and values lie as [kv_heads, blocks, block_size, head_dim] per layer, so that fetching the
blocks of a row copies long contiguous runs, and the copy is a batch of matrices as it stands. It
goes into scratch memory that is kept: fresh memory of this size costs more in page faults than the
copy itself.

Attention never meets what nobody wrote: block tables are padded with a block of zeros, and a block
is zeroed when its first token is written, because a NaN times a weight of 0 is still a NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import AttentionBatch, KVCache, KVCacheSpec
from kernels.step_plan import CacheShape, DecodeGroup, PrefillRow, StepPlan, causal_mask, plan_step


class ReferenceKVCache:
    """Keys and values, and what the current step has already worked out about them.

    Args:
        spec: shape of the cache.
        num_blocks: blocks callers may name; one more, of zeros, is added behind them.
        device: where it lies.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_kv_heads, num_blocks + 1, spec.block_size, spec.head_dim)
        # Not zeroed: pages that no request reaches are never touched, and start-up stays short.
        self.keys = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in self._layers()]
        self.values = [torch.empty(shape, dtype=spec.dtype, device=device) for _ in self._layers()]
        for table in (*self.keys, *self.values):
            table[:, num_blocks] = 0
        self._scratch = [torch.empty(0, dtype=spec.dtype, device=device) for _ in range(2)]
        self._planned_batch: AttentionBatch | None = None
        self._plans: dict[int | None, StepPlan] = {}
        self._planned_slots: Tensor | None = None
        self._fresh_blocks = torch.empty(0, dtype=torch.int64, device=device)

    def _layers(self) -> range:
        return range(self.spec.num_layers)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """See KVCache."""
        for table in (*self.keys, *self.values):
            table.index_copy_(1, targets, table.index_select(1, sources))

    def plan(self, batch: AttentionBatch, layer: int, window: int | None) -> StepPlan:
        """The plan of the step, made when its first layer asks and kept for the others."""
        if layer == 0 or self._planned_batch is not batch:
            self._planned_batch = batch
            self._plans = {}
        plan = self._plans.get(window)
        if plan is None:
            shape = CacheShape(
                num_kv_heads=self.spec.num_kv_heads,
                block_size=self.spec.block_size,
                block_bytes=self.spec.bytes_per_block // (2 * self.spec.num_layers),
                stride=self.num_blocks + 1,
                null_block=self.num_blocks,
            )
            plan = self._plans[window] = plan_step(batch, window, shape)
        return plan

    def fresh_blocks(self, slot_mapping: Tensor, layer: int) -> Tensor:
        """int64 ids of the blocks whose first token is among these slots; kept over the layers."""
        if layer == 0 or self._planned_slots is not slot_mapping:
            self._planned_slots = slot_mapping
            firsts = slot_mapping[slot_mapping % self.spec.block_size == 0]
            self._fresh_blocks = firsts // self.spec.block_size
        return self._fresh_blocks

    def fetch(self, layer: int, gather: Tensor) -> tuple[Tensor, Tensor]:
        """Copies cache rows (one per head and block) into scratch memory.

        Returns:
            Keys and values, [len(gather), block_size * head_dim], good until the next call.
        """
        width = self.spec.block_size * self.spec.head_dim
        size = gather.numel() * width
        if self._scratch[0].numel() < size:
            with torch.inference_mode(False):  # so that calls in and outside of it may mix
                self._scratch = [buffer.new_empty(size) for buffer in self._scratch]
        keys, values = (buffer[:size].view(-1, width) for buffer in self._scratch)
        torch.index_select(self.keys[layer].view(-1, width), 0, gather, out=keys)
        torch.index_select(self.values[layer].view(-1, width), 0, gather, out=values)
        return keys, values


class ReferenceKernels:
    """The PyTorch kernel set; see `kernels.interface.KernelSet`."""

    name = "reference"

    def allocate_kv_cache(
        self, spec: KVCacheSpec, num_blocks: int, device: torch.device
    ) -> ReferenceKVCache:
        """See KernelSet."""
        return ReferenceKVCache(spec, num_blocks, device)

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """See KernelSet."""
        assert isinstance(cache, ReferenceKVCache)
        fresh = cache.fresh_blocks(slot_mapping, layer)
        for table, new in ((cache.keys[layer], key), (cache.values[layer], value)):
            if fresh.numel():
                table.index_fill_(1, fresh, 0)
            slots = table.view(table.shape[0], -1, table.shape[3])
            slots.index_copy_(1, slot_mapping, new.transpose(0, 1))

    def paged_attention(  # noqa: PLR0913 - the signature of KernelSet
        self,
        query: Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See KernelSet."""
        assert isinstance(cache, ReferenceKVCache)
        plan = cache.plan(batch, layer, window)
        kv_heads = cache.spec.num_kv_heads
        scoring = _Scoring(
            num_kv_heads=kv_heads,
            scale=scale,
            soft_cap=soft_cap,
            sinks=None if sinks is None else sinks.float().view(kv_heads, -1),
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in plan.groups:
            keys, values = cache.fetch(layer, group.gather)
            attended = _decode(query.index_select(0, group.tokens), keys, values, group, scoring)
            out.index_copy_(0, group.tokens, attended)
        for row in plan.rows:
            keys, values = cache.fetch(layer, row.gather)
            out[row.start : row.stop] = _prefill(
                query[row.start : row.stop], keys, values, row, scoring
            )
        return out

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See KernelSet."""
        return functional.rms_norm(hidden, weight.shape, weight, eps)

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See KernelSet."""
        exact = heads.float()
        first, second = exact.chunk(2, dim=-1)
        out = torch.empty(exact.shape, dtype=exact.dtype, device=exact.device)
        new_first, new_second = out.chunk(2, dim=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        torch.mul(first, cos, out=new_first)
        new_first.addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=new_second)
        new_second.addcmul_(first, sin)
        return out.to(heads.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See KernelSet."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """How scores become weights; the same for all rows of a call.

    Attributes:
        sinks: float32 [kv_heads, group], where query heads of one key head are neighbours.
    """

    num_kv_heads: int
    scale: float
    soft_cap: float | None
    sinks: Tensor | None


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scoring: _Scoring
) -> Tensor:
    """Attention of rows with one query token each: [rows, heads, head_dim] both ways."""
    rows, heads, head_dim = query.shape
    batch, _, context = group.mask.shape
    sinks = None
    if scoring.sinks is not None:
        sinks = scoring.sinks.repeat(rows, 1)[:, :, None]
    attended = _attend(
        query.view(batch, -1, head_dim),
        keys.view(batch, context, head_dim),
        values.view(batch, context, head_dim),
        group.mask,
        scoring,
        sinks,
    )
    return attended.view(rows, heads, head_dim).to(query.dtype)


def _prefill(
    query: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scoring: _Scoring
) -> Tensor:
    """Attention of one row's query tokens: [queries, heads, head_dim] both ways."""
    queries, heads, head_dim = query.shape
    kv_heads, group = scoring.num_kv_heads, heads // scoring.num_kv_heads
    keys = keys.view(kv_heads, -1, head_dim)[:, : row.context]
    values = values.view(kv_heads, -1, head_dim)[:, : row.context]
    by_head = query.view(queries, kv_heads, group, head_dim).permute(2, 1, 0, 3)
    if scoring.soft_cap is None and scoring.sinks is None:
        attended = functional.scaled_dot_product_attention(
            by_head,
            keys.expand(group, -1, -1, -1),
            values.expand(group, -1, -1, -1),
            attn_mask=None if row.mask is None else row.mask.to(query.dtype),
            is_causal=row.mask is None,
            scale=scoring.scale,
        )
        return attended.permute(2, 1, 0, 3).reshape(queries, heads, head_dim)
    mask = causal_mask(queries, row.context, None) if row.mask is None else row.mask
    sinks = None
    if scoring.sinks is not None:
        sinks = scoring.sinks.repeat_interleave(queries, dim=1)[:, :, None]
    attended = _attend(
        by_head.transpose(0, 1).reshape(kv_heads, group * queries, head_dim),
        keys,
        values,
        mask.to(query.device).repeat(group, 1)[None],
        scoring,
        sinks,
    )
    attended = attended.view(kv_heads, group, queries, head_dim).permute(2, 0, 1, 3)
    return attended.reshape(queries, heads, head_dim).to(query.dtype)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scoring: _Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with the scores written out, float32 inside.

    Args:
        query: [batch, queries, head_dim].
        keys: [batch, context, head_dim].
        values: [batch, context, head_dim].
        mask: float32, broadcastable to [batch, queries, context].
        scoring: scale and soft cap.
        sinks: float32 [batch, queries, 1].

    Returns:
        float32 [batch, queries, head_dim].
    """
    query, keys, values = query.float(), keys.float(), values.float()
    if scoring.soft_cap is None:
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scoring.scale)
    else:
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(scoring.scale / scoring.soft_cap)
        scores = scores.tanh_().mul_(scoring.soft_cap).add_(mask)
    if sinks is None:
        return torch.bmm(scores.softmax(-1), values)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)
    return torch.bmm(weights[..., :-1], values)
