"""From a path to a loaded model: finds the format, reads the description, builds the decoder."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.interface import KernelSet
from services.worker.models.config import (
    ModelConfig,
    ModelError,
    read_gguf_config,
    read_hf_config,
)
from services.worker.models.decoder import CausalLM, Decoder, expected_tensors
from services.worker.models.gguf import ROPE_DIVISORS, GgufFile, GgufWeights
from services.worker.models.weights import (
    SafetensorsWeights,
    files_digest,
    read_json_object,
    safetensors_header,
)

_SHOWN_FILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can compute.

    Attributes:
        config: its description.
        model: the model itself.
        digest: sha256, hex, over description and identity of the weight files; two models with the
            same digest give the same keys and values.
    """

    config: ModelConfig
    model: CausalLM
    digest: str


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    max_model_len: int | None,
    memory_bytes: int | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
        path: a model folder, or a GGUF file.
        dtype: of weights and computation.
        device: where it shall compute.
        kernels: its kernel set.
        max_model_len: longest prompt + output in tokens; None: what the model was made for.
        memory_bytes: free for the weights; None is not compared.

    Raises:
        ModelError: it cannot be loaded; one line that says why.
    """
    gguf = _gguf_file(path)
    if gguf is not None:
        return _load_gguf(
            gguf,
            dtype=dtype,
            device=device,
            kernels=kernels,
            max_model_len=max_model_len,
            memory_bytes=memory_bytes,
        )
    weights = SafetensorsWeights(path)
    raw = _read_json(path / "config.json", required=True)
    generation = _read_json(path / "generation_config.json", required=False)
    with _named(path):
        config = read_hf_config(raw, generation, dtype=dtype, max_model_len=max_model_len)
        _check_memory(config, memory_bytes)
    headers = {file: safetensors_header(file) for file in weights.files}
    return LoadedModel(
        config=config,
        model=Decoder(config, weights, device, kernels),
        digest=_digest(config, files_digest(weights.files, headers)),
    )


def _load_gguf(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    max_model_len: int | None,
    memory_bytes: int | None,
) -> LoadedModel:
    file = GgufFile(path)
    generation = _read_json(path.parent / "generation_config.json", required=False)
    with _named(path):
        config = read_gguf_config(
            file.metadata,
            generation,
            dtype=dtype,
            max_model_len=max_model_len,
            tied="output.weight" not in file.tensors,
        )
        _check_memory(config, memory_bytes)
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(file.tensor(ROPE_DIVISORS).float().flatten().tolist())
        if len(divisors) != config.head_dim // 2:
            raise ModelError(
                f"{path}: tensor {ROPE_DIVISORS} has {len(divisors)} values, "
                f"the head size asks for {config.head_dim // 2}"
            )
        config = replace(config, rope=replace(config.rope, divisors=divisors))
    paired = file.metadata["general.architecture"] == "llama"
    heads = (config.num_heads, config.num_kv_heads) if paired else None
    return LoadedModel(
        config=config,
        model=Decoder(config, GgufWeights(file, heads), device, kernels),
        digest=_digest(config, files_digest((path,), {path: file.header()})),
    )


def _check_memory(config: ModelConfig, memory_bytes: int | None) -> None:
    """Refuses what would end the process without a word."""
    numbers = sum(math.prod(shape) for shape in expected_tensors(config).values())
    needed = numbers * config.dtype.itemsize
    if memory_bytes is not None and needed > memory_bytes:
        raise ModelError(
            f"its weights need {needed >> 20} MiB in {str(config.dtype).removeprefix('torch.')}, "
            f"{memory_bytes >> 20} MiB are free"
        )


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file to load, if that is the format of the model."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir():
        raise ModelError(f"{path}: is no folder of a model and no GGUF file")
    found = sorted(path.glob("*.gguf"))
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:_SHOWN_FILES])
        raise ModelError(f"{path}: has {len(found)} GGUF files ({names}); leave exactly one")
    if any(path.glob("*.safetensors")):
        raise ModelError(f"{path}: has safetensors and GGUF weights; remove one of them")
    return found[0]


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Puts the model in front of what is wrong with its description."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _read_json(path: Path, *, required: bool) -> Mapping[str, Any]:
    return read_json_object(path) if required or path.exists() else {}


def _digest(config: ModelConfig, files: bytes) -> str:
    """Leaves out what does not change keys and values."""
    fields = asdict(replace(config, max_model_len=0, eos_token_ids=(), bos_token_id=None))
    description = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(description.encode() + files).hexdigest()
