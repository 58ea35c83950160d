"""Makers of small real model folders: configuration, weights, tokenizer.

A successor checkpoint says a fixed token after each token, on any server, with a large logit gap;
it does not look at the KV cache. A random checkpoint does, and `transformers` is its oracle.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.assets.byte_tokenizer import EOS_TOKEN_IDS, VOCAB_SIZE, make_byte_tokenizer
from tests.assets.tokenizers import write_folder

RANDOM_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_TOKEN_IDS[0],
    "bos_token_id": None,
    "torch_dtype": "float32",
}


def make_random_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    shards: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a two-layer random model, by default Llama with grouped queries (4 heads on 2).

    Args:
        folder: made if it is not there.
        seed: of the weights.
        changes: settings of config.json that differ from RANDOM_CONFIG.
        shards: files the weights are split into; 1 makes a model.safetensors without an index.
        dtype: of the stored weights.
    """
    config = {**RANDOM_CONFIG, **(changes or {})}
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()}
    make_byte_tokenizer(folder)
    write_config(folder, config)
    write_shards(folder, tensors, shards)
    return folder


def make_successor_checkpoint(
    folder: Path,
    *,
    successors: Mapping[int, int] | None = None,
    extra_tokens: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
    max_positions: int = 2048,
    config_eos: int = EOS_TOKEN_IDS[0],
    generation_eos: Sequence[int] = EOS_TOKEN_IDS,
) -> Path:
    """Writes a one-layer model whose greedy output is a chain of successors.

    The embedding is the identity and attention and MLP add nothing, so the logit of the successor
    is the square root of the vocabulary size (16 or more), and all others are 0.

    Args:
        folder: made if it is not there.
        successors: what follows a token; for all others it is the next id, and the first after the
            last.
        extra_tokens: see `make_byte_tokenizer`.
        tokenizer: written in place of the byte tokenizer.
        max_positions: longest prompt + output.
        config_eos: end token in config.json.
        generation_eos: end tokens in generation_config.json.
    """
    vocab = VOCAB_SIZE + len(extra_tokens)
    if tokenizer is not None:
        vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    config = {
        **RANDOM_CONFIG,
        "hidden_size": vocab,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "eos_token_id": config_eos,
    }
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        for name, shape in tensor_shapes(config).items()
    }
    tensors["model.embed_tokens.weight"] = torch.eye(vocab)
    for token in range(vocab):
        follower = (successors or {}).get(token, (token + 1) % vocab)
        tensors["lm_head.weight"][follower, token] = 1.0
    if tokenizer is None:
        make_byte_tokenizer(folder, extra_tokens=extra_tokens)
    else:
        write_folder(folder, tokenizer)
    write_config(folder, config, eos_token_ids=generation_eos)
    write_shards(folder, tensors, 1)
    return folder


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights whose logits spread by a few units, so that the two highest are rarely close."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + noise / 8
        elif name.endswith("bias"):
            tensors[name] = noise / 2
        elif name.startswith(("model.embed", "lm_head")):
            tensors[name] = noise * 3 / math.sqrt(shape[1])
        else:
            tensors[name] = noise * 1.5 / math.sqrt(shape[1])
    return tensors


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors that `transformers` asks for with this configuration."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    is_qwen = config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        projections = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            biased = config["mlp_bias"] if name.startswith("mlp") else config["attention_bias"]
            if biased or (is_qwen and name[-6:] in ("q_proj", "k_proj", "v_proj")):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_config(
    folder: Path, config: Mapping[str, Any], *, eos_token_ids: Sequence[int] = EOS_TOKEN_IDS
) -> None:
    """Writes config.json, and generation_config.json with all end tokens."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": list(eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


def write_shards(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Writes the tensors, dealt out in turn, and the index if there is more than one file."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    placed: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
