"""The parts of a decoder layer: attention, MLP, rotary embedding. Objects over prepared weights.

They know the kernel set and the KV cache through `kernels.interface` alone, and nothing of files.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionBatch, KernelSet, KVCache
from kernels.linear import Linear
from services.worker.models.config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What every layer of one forward shares.

    Attributes:
        cos: float32 [tokens, head_dim / 2], of the tokens' positions.
        sin: float32 [tokens, head_dim / 2].
    """

    cache: KVCache
    batch: AttentionBatch
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention with fused projections.

    Attributes:
        layer: index in the KV cache.
        qkv: hidden_size to (num_heads + 2 * num_kv_heads) * head_dim; q, then k, then v.
        output: num_heads * head_dim to hidden_size.
        window: tokens a query sees; None sees all.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    qkv: Linear
    output: Linear
    kernels: KernelSet

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        """Stores the tokens' keys and values, and attends.

        Args:
            hidden: [tokens, hidden_size].
            step: the forward's shared values.

        Returns:
            [tokens, num_heads * head_dim], before the output projection.
        """
        rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv(hidden).view(-1, rotated + self.num_kv_heads, self.head_dim)
        query_key = self.kernels.rotary(heads[:, :rotated], step.cos, step.sin)
        self.kernels.write_kv(
            step.cache,
            self.layer,
            query_key[:, self.num_heads :],
            heads[:, rotated:],
            step.batch.slot_mapping,
        )
        attended = self.kernels.paged_attention(
            query_key[:, : self.num_heads],
            step.cache,
            self.layer,
            step.batch,
            scale=1.0 / math.sqrt(self.head_dim),
            window=self.window,
            soft_cap=None,
            sinks=None,
        )
        return attended.reshape(-1, self.num_heads * self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Gated MLP.

    Attributes:
        gate_up: hidden_size to 2 * intermediate_size; gate, then up.
        down: intermediate_size to hidden_size.
    """

    gate_up: Linear
    down: Linear
    kernels: KernelSet

    def __call__(self, hidden: Tensor) -> Tensor:
        """Maps [tokens, hidden_size] to the same shape."""
        return self.down(self.kernels.silu_mul(self.gate_up(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Pre-norm residual layer.

    Attributes:
        input_norm: [hidden_size], weight of the norm before attention.
        mlp_norm: [hidden_size], weight of the norm before the MLP.
    """

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp
    eps: float
    kernels: KernelSet

    def __call__(self, hidden: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """One layer.

        Args:
            hidden: [tokens, hidden_size]; overwritten.
            step: the forward's shared values.
            keep: int64, the tokens whose output is wanted; None: all. All tokens' keys and values
                are stored.

        Returns:
            [tokens or len(keep), hidden_size].
        """
        normed = self.kernels.rms_norm(hidden, self.input_norm, self.eps)
        attended = self.attention.attend(normed, step)
        if keep is not None:
            attended = attended.index_select(0, keep)
            hidden = hidden.index_select(0, keep)
        hidden += self.attention.output(attended)
        hidden += self.mlp(self.kernels.rms_norm(hidden, self.mlp_norm, self.eps))
        return hidden


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [tokens, head_dim / 2], of int64 positions [tokens]."""
    angles = torch.outer(positions.float(), frequencies)
    return angles.cos(), angles.sin()


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position.

    The "llama3" rule: wavelengths up to `original_max_positions / high_freq_factor` are kept, those
    above `original_max_positions / low_freq_factor` are stretched by `factor`, and between them the
    two are blended linearly in (original_max_positions / wavelength). Source: the Llama 3.1 models'
    published configuration.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.divisors:
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * plain / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return plain * (kept + (1 - kept) / rope.factor)
    return plain
