"""Writes a GGUF twin of a safetensors folder, as converters do."""

import json
import re
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def make_gguf_checkpoint(
    source: Path,
    file: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Writes `file` with the model of folder `source`.

    Args:
        source: a folder made by `make_random_checkpoint` (Llama or Qwen2).
        file: its folder is made if it is not there.
        kind: of the matrices; vectors stay float32.
        extra_tensors: more tensors, by GGUF name.
    """
    config = json.loads((source / "config.json").read_text())
    arch = config["model_type"]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token{number}" for number in range(config["vocab_size"])])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(config["eos_token_id"] - 1)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in _tensors(source).items():
        turned = re.search(r"\.([qk])_proj\.", name)
        if turned and arch == "llama":
            _add(writer, _gguf_name(name), _pairs_from_halves(tensor, heads[turned[1]]), kind)
        else:
            _add(writer, _gguf_name(name), tensor, kind)
    for name, tensor in (extra_tensors or {}).items():
        _add(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(source: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _gguf_name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def _pairs_from_halves(tensor: Tensor, heads: int) -> Tensor:
    """Puts the rows a head rotates against each other side by side."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    kind = kind if tensor.dim() == 2 else GGMLQuantizationType.F32
    data = gguf.quantize(tensor.float().contiguous().numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
