"""The native decoder of the Llama shape, and how it is put together from named weights.

Owns which tensors such a model has and how they are fused. Names are those of Hugging Face
checkpoints; other formats translate theirs before they come here.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import AttentionBatch, KernelSet, KVCache
from kernels.linear import Linear, prepare_linear
from services.worker.models.config import ModelConfig
from services.worker.models.layers import (
    Attention,
    DecoderLayer,
    Mlp,
    Step,
    rotary_angles,
    rotary_frequencies,
)
from services.worker.models.weights import Weights

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


class CausalLM(Protocol):
    """A model that maps one step's tokens to logits."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        logits_rows: Tensor,
    ) -> Tensor:
        """Stores the keys and values of the tokens, and computes logits where asked.

        Args:
            input_ids: int64 [tokens].
            positions: int64 [tokens], of each token in its row.
            cache: KV cache of this model's kernel set.
            batch: the rows.
            logits_rows: int64 [samples], tokens whose next token is wanted.

        Returns:
            float32 [samples, vocab_size].
        """
        ...


class Decoder:
    """Llama-shaped causal language model.

    Args:
        config: its description.
        weights: its tensors; each is asked for once.
        device: where it shall compute.
        kernels: its kernel set.

    Raises:
        ModelError: a tensor is missing, surplus or of another shape, or cannot be read.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, kernels: KernelSet
    ) -> None:
        loader = _Loader(config, weights, device, kernels)
        self._config = config
        self._kernels = kernels
        self._embedding = loader.tensor(_EMBEDDING)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.tensor(_FINAL_NORM)
        self._head = loader.head(self._embedding)
        self._frequencies = rotary_frequencies(config.rope, config.head_dim).to(device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        logits_rows: Tensor,
    ) -> Tensor:
        """See CausalLM."""
        cos, sin = rotary_angles(positions, self._frequencies)
        step = Step(cache=cache, batch=batch, cos=cos, sin=sin)
        hidden = functional.embedding(input_ids, self._embedding)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, step, None)
        hidden = self._layers[-1](hidden, step, logits_rows)
        normed = self._kernels.rms_norm(hidden, self._norm, self._config.rms_norm_eps)
        return self._head(normed).float()


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this configuration must have."""
    hidden, vocab = config.hidden_size, config.vocab_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    expected: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocab, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        expected[_HEAD] = (vocab, hidden)
    attention = (
        ("q_proj", query, hidden, config.qkv_bias),
        ("k_proj", key, hidden, config.qkv_bias),
        ("v_proj", key, hidden, config.qkv_bias),
        ("o_proj", hidden, query, config.output_bias),
    )
    mlp = (
        ("gate_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("up_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("down_proj", hidden, config.intermediate_size, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.input_layernorm.weight"] = (hidden,)
        expected[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for block, projections in (("self_attn", attention), ("mlp", mlp)):
            for name, rows, columns, bias in projections:
                expected[f"{prefix}.{block}.{name}.weight"] = (rows, columns)
                if bias:
                    expected[f"{prefix}.{block}.{name}.bias"] = (rows,)
    return expected


class _Loader:
    """Turns named tensors into prepared parts, one at a time, so that none lies there twice."""

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, kernels: KernelSet
    ) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._kernels = kernels
        weights.check(expected_tensors(config), tied_head=_tied_head(config))

    def tensor(self, name: str) -> Tensor:
        """A tensor of its own, independent of the file that may be mapped into memory."""
        return self._stacked([name])

    def layer(self, index: int) -> DecoderLayer:
        config, kernels, prefix = self._config, self._kernels, f"model.layers.{index}"
        attention = Attention(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.windows[index],
            qkv=self._linear(
                [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], bias=config.qkv_bias
            ),
            output=self._linear([f"{prefix}.self_attn.o_proj"], bias=config.output_bias),
            kernels=kernels,
        )
        mlp = Mlp(
            gate_up=self._linear(
                [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], bias=config.mlp_bias
            ),
            down=self._linear([f"{prefix}.mlp.down_proj"], bias=config.mlp_bias),
            kernels=kernels,
        )
        return DecoderLayer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            attention=attention,
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            mlp=mlp,
            eps=config.rms_norm_eps,
            kernels=kernels,
        )

    def head(self, embedding: Tensor) -> Linear:
        if self._config.tie_word_embeddings:
            return prepare_linear(embedding)
        return prepare_linear(self.tensor(_HEAD))

    def _linear(self, names: list[str], *, bias: bool) -> Linear:
        """The projections `names`, stacked into one."""
        return prepare_linear(
            self._stacked([f"{name}.weight" for name in names]),
            self._stacked([f"{name}.bias" for name in names]) if bias else None,
        )

    def _stacked(self, names: list[str]) -> Tensor:
        return torch.cat([self._part(name) for name in names])

    def _part(self, name: str) -> Tensor:
        return self._weights.load(name).to(device=self._device, dtype=self._config.dtype)


def _tied_head(config: ModelConfig) -> tuple[str, str] | None:
    return (_HEAD, _EMBEDDING) if config.tie_word_embeddings else None
