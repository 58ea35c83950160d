"""Reads GGUF files: header, metadata, and tensors dequantized under Hugging Face names.

The header is read here rather than by the `gguf` package, whose reader makes an object of every
token of the vocabulary (seconds); long arrays are skipped. Layouts and dequantization are those of
the package; the three commonest types have a faster twin here, equal to the bit.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.weights import TensorInfo, check_tensors

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` by the codes of the format."""

_KEPT_ARRAY = 64
"""Arrays longer than this are skipped: their value is their length."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: value by key; of arrays longer than 64 the length.
        tensors: shape, type and place by the file's own names.
        data_start: offset of the first tensor, bytes.

    Args:
        path: of the file.

    Raises:
        ModelError: the file is damaged, cut short, or of a kind this version does not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: damaged or cut short within its header") from error

    def header(self) -> bytes:
        """Everything before the tensors."""
        return self._bytes[: self.data_start]

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantized to float32 unless it is stored as a float type.

        Raises:
            ModelError: its type cannot be dequantized.
        """
        stored = self.tensors[name]
        # The mapping is private and writable in name only, which is what torch asks for.
        flat = torch.frombuffer(
            self._bytes, dtype=torch.uint8, count=stored.size, offset=stored.offset
        )
        try:
            return _dequantized(flat, stored).view(stored.shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {stored.kind.name}, which is not supported"
            ) from error

    def _read_header(self) -> None:
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; supported are 2 and 3")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment {alignment!r} is no number of bytes")
        self.data_start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, _Stored] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise ModelError(f"{self.path}: tensor {name} is there twice")
            self.tensors[name] = self._stored(name, shape, kind, offset)

    def _stored(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> _Stored:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {code}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name} has shape {list(shape)}, not in blocks")
        size = math.prod(shape) // block * block_bytes
        start = self.data_start + offset
        if start + size > len(self._bytes):
            raise ModelError(
                f"{self.path}: cut short: tensor {name} ends at byte {start + size}, "
                f"the file at {len(self._bytes)}"
            )
        return _Stored(shape=shape, kind=kind, offset=start, size=size)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, code: int) -> Any:
        if code in _SCALARS:
            return self._scalar(_SCALARS[code])
        if code == _STRING:
            return self._string()
        if code == _ARRAY:
            return self._array()
        raise ModelError(f"{self.path}: damaged: metadata of unknown type {code}")

    def _array(self) -> Any:
        code, length = self._scalar("I"), self._scalar("Q")
        if length <= _KEPT_ARRAY:
            return [self._value(code) for _ in range(length)]
        if code in _SCALARS:
            self._take(length * struct.calcsize("<" + _SCALARS[code]))
        elif code == _STRING:
            self._skip_strings(length)
        else:
            raise ModelError(f"{self.path}: damaged: array of unknown type {code}")
        return length

    def _skip_strings(self, count: int) -> None:
        at, read = self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + read(self._bytes, at)[0]
        self._at = at

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode()

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))
        return value

    def _take(self, count: int) -> bytes:
        if count > len(self._bytes) - self._at:
            raise ModelError(f"{self.path}: cut short within its header")
        taken = self._bytes[self._at : self._at + count]
        self._at += count
        return taken


class GgufWeights:
    """The tensors of a GGUF file under Hugging Face names.

    Args:
        file: the open file.
        heads: query heads and key heads, whose rows the file has in another order ("llama"); None:
            in the same order.
    """

    def __init__(self, file: GgufFile, heads: tuple[int, int] | None) -> None:
        self._file = file
        self._heads = heads
        self._own_names = {hf_name(name): name for name in file.tensors if name != ROPE_DIVISORS}

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, tied_head: tuple[str, str] | None
    ) -> None:
        """See Weights."""
        del tied_head  # a GGUF file has no tied head of its own: without one it is tied
        there = {
            name: TensorInfo(shape=self._file.tensors[own].shape, file=self._file.path)
            for name, own in self._own_names.items()
        }
        check_tensors(expected, there, (self._file.path,))

    def load(self, name: str) -> Tensor:
        """See Weights."""
        tensor = self._file.tensor(self._own_names[name])
        if self._heads is None:
            return tensor
        if ".q_proj." in name:
            return _halves_from_pairs(tensor, self._heads[0])
        if ".k_proj." in name:
            return _halves_from_pairs(tensor, self._heads[1])
        return tensor


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; its own name if there is none."""
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Undoes the order for rotation of neighbours: rows 0, 2, 4, … of a head, then 1, 3, 5, …"""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def _dequantized(flat: Tensor, stored: _Stored) -> Tensor:
    if stored.kind in _FLOATS:
        return flat.view(_FLOATS[stored.kind])
    block_bytes = GGML_QUANT_SIZES[stored.kind][1]
    blocks = flat.view(-1, block_bytes)
    if stored.kind in _DEQUANTIZERS:
        return _DEQUANTIZERS[stored.kind](blocks)
    rows: Any = blocks.numpy().reshape(-1, stored.size // math.prod(stored.shape[:-1]))
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(rows, stored.kind)))


def _q4_0(blocks: Tensor) -> Tensor:
    """Blocks of 32: scale (float16), then 4-bit values with an offset of 8."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(scale)


def _q4_1(blocks: Tensor) -> Tensor:
    """Blocks of 32: scale and minimum (float16), then 4-bit values."""
    scale_min = blocks[:, :4].contiguous().view(torch.float16).float()
    return _nibbles(blocks[:, 4:]).mul_(scale_min[:, :1]).add_(scale_min[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    """Blocks of 32: scale (float16), then signed bytes."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


def _nibbles(packed: Tensor) -> Tensor:
    """float32 [blocks, 32] from uint8 [blocks, 16]: the low halves first, then the high ones."""
    packed = packed.contiguous()
    return torch.stack((packed & 15, packed >> 4), dim=1).view(packed.shape[0], -1).float()


_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_DEQUANTIZERS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
