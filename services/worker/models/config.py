"""What a model is: one frozen description, read from config.json or from GGUF metadata.

Whatever would change the numbers and is not built is refused by name; nothing is guessed.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ModelError(Exception):
    """The model cannot be used; one line that names the file or setting and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: "default", "linear" (positions divided by `factor`) or "llama3" (low frequencies
            divided by `factor`, high ones kept, those between blended).
        theta: base of the frequencies.
        factor: of "linear" and "llama3".
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3".
        original_max_positions: of "llama3", tokens.
        divisors: one per frequency, instead of a rule; empty: none.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape.

    Attributes:
        architecture: as in config.json, e.g. "LlamaForCausalLM".
        max_model_len: longest prompt + output, tokens.
        windows: one per layer: tokens a query sees, itself included; None sees all.
        qkv_bias: q, k and v projections have biases.
        output_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's projections have biases.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: tokens that end a generation.
        dtype: of weights and computation.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype


_MOST_LAYERS = 4096
"""More are a damaged file."""

_MOST_TOKENS = 2**24
"""Of a vocabulary, and of a context: as many as schedulers make tables for."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

_CHANGES_NUMBERS = re.compile(
    r"multiplier|soft_?cap|logit_scale|logits_scaling|scale_emb|scale_depth|dim_model_base"
    r"|qk_norm|qk_layernorm|rope_interleaved|no_rope|alibi|num_(local_)?experts"
)
"""Settings of related architectures that scale or replace something the decoder here does not."""


def read_hf_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    max_model_len: int | None,
) -> ModelConfig:
    """Reads a config.json.

    Args:
        raw: content of config.json.
        generation: content of generation_config.json, or empty. Its eos ids win.
        dtype: of weights and computation.
        max_model_len: limit in tokens; None: the model's own.

    Raises:
        ModelError: unsupported architecture or setting, missing or wrong value.
    """
    fields = _Fields(raw, "config.json")
    architecture = _architecture(raw)
    _refuse_unbuilt(raw, architecture)
    num_layers = fields.positive("num_hidden_layers", most=_MOST_LAYERS)
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    head_dim = fields.positive("head_dim", _head_dim(hidden_size, num_heads))
    positions = fields.positive("max_position_embeddings", most=_MOST_TOKENS)
    attention_bias = fields.get("attention_bias", bool, False)
    is_qwen = architecture == "Qwen2ForCausalLM"
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        vocab_size=fields.positive("vocab_size", most=_MOST_TOKENS),
        max_model_len=_limit(positions, max_model_len),
        rms_norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        rope=_rope(raw, positions),
        windows=_windows(raw, architecture, num_layers),
        qkv_bias=attention_bias or is_qwen,
        output_bias=attention_bias and not is_qwen,
        mlp_bias=fields.get("mlp_bias", bool, False),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_token_ids=_eos_ids(raw.get("eos_token_id"), generation, "config.json: eos_token_id"),
        bos_token_id=_bos_id(raw.get("bos_token_id"), "config.json: bos_token_id"),
        dtype=dtype,
    )
    return _checked(config)


def read_gguf_config(
    metadata: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    max_model_len: int | None,
    tied: bool,
) -> ModelConfig:
    """Reads the metadata of a GGUF file; arguments as for `read_hf_config`.

    Args:
        metadata: key-value pairs; the value of a long array may be its length alone.
        generation: content of a generation_config.json beside the file, or empty.
        dtype: of weights and computation.
        max_model_len: limit in tokens; None: the model's own.
        tied: the file has no head of its own.

    Raises:
        ModelError: unsupported architecture or setting, missing or wrong value.
    """
    arch = metadata.get("general.architecture")
    architecture = _GGUF_ARCHITECTURES.get(str(arch))
    if architecture is None:
        known = ", ".join(_GGUF_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {arch!r} is not supported; supported are {known}")
    fields = _Fields(metadata, "GGUF metadata")
    if fields.get(f"{arch}.expert_count", int, 0):
        raise ModelError(f"GGUF metadata: {arch}.expert_count: expert models are not supported")
    num_layers = fields.positive(f"{arch}.block_count", most=_MOST_LAYERS)
    num_heads = fields.positive(f"{arch}.attention.head_count")
    hidden_size = fields.positive(f"{arch}.embedding_length")
    head_dim = fields.positive(f"{arch}.attention.key_length", _head_dim(hidden_size, num_heads))
    rotated = fields.positive(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"GGUF metadata: {arch}.rope.dimension_count {rotated} differs from the head size "
            f"{head_dim}; partial rotation is not supported"
        )
    window = fields.get(f"{arch}.attention.sliding_window", int, 0) or None
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.positive(f"{arch}.feed_forward_length"),
        vocab_size=_gguf_vocab_size(metadata, fields, str(arch)),
        max_model_len=_limit(
            fields.positive(f"{arch}.context_length", most=_MOST_TOKENS), max_model_len
        ),
        rms_norm_eps=fields.epsilon(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, str(arch)),
        windows=(window,) * num_layers,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=tied,
        eos_token_ids=_eos_ids(_gguf_eos(metadata), generation, "GGUF metadata: eos and eot ids"),
        bos_token_id=_bos_id(
            metadata.get("tokenizer.ggml.bos_token_id"), "GGUF metadata: bos_token_id"
        ),
        dtype=dtype,
    )
    return _checked(config)


_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""Mistral files say "llama" too."""


_KINDS: Mapping[type, str] = MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
)


class _Fields:
    """Typed look-ups that name the source in their errors."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        value = self._raw.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self._source}: {name} is missing")
            return default
        if kind is float and _is_whole(value) and abs(value) < 2**1023:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(
                f"{self._source}: {name} must be {_KINDS.get(kind, kind.__name__)}, "
                f"got {shown(value)}"
            )
        return value

    def positive(self, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.get(name, int, default)
        if not 1 <= value <= most:
            raise ModelError(f"{self._source}: {name} must be in 1..{most}, got {shown(value)}")
        return value

    def real(
        self, name: str, rule: str, holds: Callable[[float], bool], default: float | None = None
    ) -> float:
        value = self.get(name, float, default)
        if not (math.isfinite(value) and holds(value)):
            raise ModelError(
                f"{self._source}: {name} must be a finite number {rule}, got {value!r}"
            )
        return value

    def above_zero(self, name: str, default: float | None = None) -> float:
        return self.real(name, "> 0", lambda value: value > 0, default)

    def epsilon(self, name: str, default: float | None = None) -> float:
        return self.real(name, "in [0, 1)", lambda value: 0 <= value < 1, default)


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [raw.get("model_type")]
    first = named[0] if isinstance(named, list) and named else named
    if first in SUPPORTED_ARCHITECTURES:
        return str(first)
    raise ModelError(
        f"config.json: architecture {shown(first)} is not supported; supported are "
        + ", ".join(SUPPORTED_ARCHITECTURES)
    )


def _refuse_unbuilt(raw: Mapping[str, Any], architecture: str) -> None:
    if raw.get("quantization_config"):
        raise ModelError(
            "config.json: quantization_config: quantized safetensors are not supported; use the "
            "unquantized checkpoint or a GGUF file"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {shown(raw['hidden_act'])} is not supported")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    for name, value in raw.items():
        neutral = value is None or value is False or (value == 1 and value is not True)
        if _CHANGES_NUMBERS.search(name) and not neutral:
            raise ModelError(f"config.json: {name} is not supported for {architecture}")


def _head_dim(hidden_size: int, num_heads: int) -> int | None:
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _limit(positions: int, asked: int | None) -> int:
    if asked is None:
        return positions
    if asked < 1 or asked > positions:
        raise ModelError(
            f"--max-model-len: must be in 1..{positions}, the positions of the model, got {asked}"
        )
    return asked


def _rope(raw: Mapping[str, Any], positions: int) -> RopeConfig:
    """Understands `rope_scaling` with `type` or `rope_type`, and `rope_parameters`."""
    given = {name: raw.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"config.json: {name} must be an object, got {shown(value)}")
    scaling = given["rope_parameters"] or given["rope_scaling"] or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields = _Fields({"rope_theta": theta, **scaling}, "config.json: rope")
    theta = fields.above_zero("rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=fields.above_zero("factor"))
    if kind == "llama3":
        low = fields.above_zero("low_freq_factor")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=fields.above_zero("factor"),
            low_freq_factor=low,
            # The blend divides by the difference.
            high_freq_factor=fields.real(
                "high_freq_factor", f"> low_freq_factor {low:g}", lambda value: value > low
            ),
            original_max_positions=fields.positive("original_max_position_embeddings", positions),
        )
    raise ModelError(
        f"config.json: rope type {shown(kind)} is not supported; supported are default, linear, "
        "llama3"
    )


def _gguf_rope(fields: _Fields, arch: str) -> RopeConfig:
    theta = fields.above_zero(f"{arch}.rope.freq_base", 10000.0)
    kind = fields.get(f"{arch}.rope.scaling.type", str, "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = fields.above_zero(f"{arch}.rope.scaling.factor")
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    raise ModelError(
        f"GGUF metadata: rope scaling {kind!r} is not supported; supported are none, linear"
    )


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The defaults are those of the architectures' own configuration classes."""
    full = (None,) * num_layers
    fields = _Fields(raw, "config.json")
    is_qwen = architecture == "Qwen2ForCausalLM"
    unused = is_qwen and not fields.get("use_sliding_window", bool, False)
    if architecture == "LlamaForCausalLM" or raw.get("sliding_window", 4096) is None or unused:
        return full
    window = fields.positive("sliding_window", 4096)
    first = fields.get("max_window_layers", int, 28) if is_qwen else 0
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(None if layer < first else window for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(isinstance(kind, str) and kind in known for kind in kinds)
    ):
        raise ModelError(f"config.json: layer_types must name {num_layers} of {sorted(known)}")
    return tuple(known[kind] for kind in kinds)


def _eos_ids(own: Any, generation: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Those of generation_config.json where it has any, else the model's own."""
    value = generation.get("eos_token_id")
    if value is None:
        return _token_ids(own, source)
    return _token_ids(value, "generation_config.json: eos_token_id")


def _token_ids(value: Any, source: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(_is_whole(one) and one >= 0 for one in ids):
        raise ModelError(f"{source} must be whole numbers >= 0, got {shown(value)}")
    return tuple(dict.fromkeys(ids))


def _bos_id(value: Any, source: str) -> int | None:
    return next(iter(_token_ids(value, source)), None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _gguf_eos(metadata: Mapping[str, Any]) -> list[int]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return [one for one in found if one is not None]


def _gguf_vocab_size(metadata: Mapping[str, Any], fields: _Fields, arch: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else tokens
    return fields.positive(f"{arch}.vocab_size", count, most=_MOST_TOKENS)


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"head size {config.head_dim} is odd; rotary embedding needs pairs")
    ends = [("eos", one) for one in config.eos_token_ids]
    begin = [] if config.bos_token_id is None else [("bos", config.bos_token_id)]
    for name, one in [*ends, *begin]:
        if one >= config.vocab_size:
            raise ModelError(
                f"{name} id {shown(one)} is not below the vocabulary size {config.vocab_size}"
            )
    return config
