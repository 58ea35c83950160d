"""What a kernel set offers and what it is handed: the only types the model and the kernels share.

A kernel set owns the layout and the allocation of the KV cache. Kernels know no service.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One step's rows, flattened: row `r` owns the query tokens from `query_start_loc[r]` on.

    The query tokens of a row are the last ones of its `seq_lens[r]` tokens. Tensors are made once
    per step and never changed while the step runs.

    Attributes:
        query_start_loc: int32 [rows + 1], starts at 0, ends at the number of query tokens.
        seq_lens: int32 [rows], tokens in the KV cache after this step.
        slot_mapping: int64 [tokens], `block_id * block_size + offset` of each query token.
        block_tables: int32 [rows, width], block ids of each row, padded with 0; width is at least
            the most blocks a row uses.
        num_decode_rows: leading rows that have exactly one query token.
        max_query_len: most query tokens of a row.
        max_seq_len: most tokens of a row.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Shape of the KV cache of a model.

    Attributes:
        block_size: tokens per block.
        dtype: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of keys and values of one block, all layers."""
        per_token = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * self.block_size * per_token


class KVCache(Protocol):
    """Keys and values of all layers; only the kernel set that allocated it knows the layout."""

    @property
    def spec(self) -> KVCacheSpec:
        """What it was allocated for."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that may be named in block tables and slots."""
        ...

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Makes whole blocks equal to others, in all layers. Call it before the step's `write_kv`.

        Tokens behind the first ones of a copy may be written as in any block.

        Args:
            sources: int64 [copies], blocks whose first token was written.
            targets: int64 [copies], all different, none of them among `sources`.
        """
        ...


class KernelSet(Protocol):
    """The operations of a decoder whose speed depends on the device."""

    @property
    def name(self) -> str:
        """For logs, e.g. "reference"."""
        ...

    def allocate_kv_cache(
        self, spec: KVCacheSpec, num_blocks: int, device: torch.device
    ) -> KVCache:
        """Allocates `num_blocks` blocks; their content is never read before it was written."""
        ...

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores the keys and values of a step's tokens. Call it before the layer's attention.

        The first token of a block must be written before or together with its others.

        Args:
            cache: from `allocate_kv_cache`.
            layer: index of the layer.
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, head_dim].
            slot_mapping: int64 [tokens].
        """
        ...

    def paged_attention(  # noqa: PLR0913 - attention has that many inputs; all but four are named
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
        """Causal attention of each query token over its row's tokens in the cache.

        Args:
            query: [tokens, heads, head_dim].
            cache: from `allocate_kv_cache`, with this step's keys and values written.
            layer: index of the layer.
            batch: the step's rows.
            scale: factor of the scores.
            window: most tokens a query sees, itself included; None sees all.
            soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, after `scale`.
            sinks: [heads], a score per head that takes part in the softmax and has no value.

        Returns:
            [tokens, heads, head_dim], in the dtype of `query`.
        """
        ...

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`hidden / sqrt(mean(hidden²) + eps) * weight` over the last dimension."""
        ...

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first half of each head against its second half.

        Args:
            heads: [tokens, heads, head_dim]; may be a strided view.
            cos: float32 [tokens, head_dim / 2].
            sin: float32 [tokens, head_dim / 2].

        Returns:
            [tokens, heads, head_dim], contiguous, in the dtype of `heads`.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up`, where gate and up are the halves of the last dimension.

        Args:
            gate_up: [tokens, 2 * width].

        Returns:
            [tokens, width].
        """
        ...
