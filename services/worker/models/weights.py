"""Named tensors of a checkpoint: safetensors folders, and the checks that hold for every format.

Never pickle. Every tensor that is missing, surplus or of another shape is an error that names the
tensor and the file.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.models.config import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = ("F32", "F16", "BF16")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that old checkpoints carry although the configuration determines them."""

_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor is, and its shape."""

    shape: tuple[int, ...]
    file: Path


class Weights(Protocol):
    """The tensors of a model, under Hugging Face names."""

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, tied_head: tuple[str, str] | None
    ) -> None:
        """Compares what is there with what must be there.

        Args:
            expected: shape by name.
            tied_head: head and embedding, if they are one tensor; a head that is stored all the
                same must be equal to the embedding.

        Raises:
            ModelError: a tensor is missing, surplus or of another shape.
        """
        ...

    def load(self, name: str) -> Tensor:
        """A tensor on the CPU, in the dtype it is best read in.

        Raises:
            ModelError: it cannot be read.
        """
        ...


class SafetensorsWeights:
    """The safetensors files of a folder: those of the index, else the only one.

    Args:
        folder: of the model.

    Raises:
        ModelError: no usable file, or a file that is damaged or disagrees with the index.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX_FILE
        placed = _read_index(index) if index.is_file() else None
        self.files = _weight_files(folder, placed)
        self._open = {file: _opened(file) for file in self.files}
        self._infos: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, shape in _shapes(self._open[file], file):
                if placed is not None and placed.get(name) != file.name:
                    where = placed.get(name, "no file")
                    raise ModelError(f"{file}: has tensor {name}, which the index puts in {where}")
                self._infos[name] = TensorInfo(shape=shape, file=file)
        for name, file_name in (placed or {}).items():
            if name not in self._infos:
                raise ModelError(f"{folder / file_name}: tensor {name} of the index is missing")

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, tied_head: tuple[str, str] | None
    ) -> None:
        """See Weights."""
        there = {name: info for name, info in self._infos.items() if _DERIVED.search(name) is None}
        if tied_head is not None and tied_head[0] in there and tied_head[1] in there:
            head = there.pop(tied_head[0])
            if not torch.equal(self.load(tied_head[0]), self.load(tied_head[1])):
                raise ModelError(
                    f"{head.file}: tensor {tied_head[0]} differs from {tied_head[1]} although "
                    "config.json says tie_word_embeddings"
                )
        check_tensors(expected, there, self.files)

    def load(self, name: str) -> Tensor:
        """See Weights."""
        file = self._infos[name].file
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    there: Mapping[str, TensorInfo],
    files: tuple[Path, ...],
) -> None:
    """Compares names and shapes.

    Raises:
        ModelError: naming the first tensor that is wrong, its file, and how many more there are.
    """
    source = files[0] if len(files) == 1 else files[0].parent
    missing = [name for name in expected if name not in there]
    if missing:
        raise ModelError(f"{source}: tensor {missing[0]} is missing{_more(missing)}")
    surplus = [name for name in there if name not in expected]
    if surplus:
        file = there[surplus[0]].file
        raise ModelError(
            f"{file}: tensor {surplus[0]} does not belong to this architecture{_more(surplus)}"
        )
    wrong = [name for name, shape in expected.items() if there[name].shape != shape]
    if wrong:
        name, info = wrong[0], there[wrong[0]]
        raise ModelError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, "
            f"the configuration asks for {list(expected[name])}{_more(wrong)}"
        )


def files_digest(files: tuple[Path, ...], headers: Mapping[Path, bytes]) -> bytes:
    """Digest of the identity of weight files: names, sizes, headers, and samples of the content.

    The samples tell apart two models of one architecture, whose headers are the same.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        digest.update(hashlib.sha256(headers[path]).digest())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def safetensors_header(file: Path) -> bytes:
    """The JSON header of a safetensors file, as it stands."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return opened.read(length)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: the file is missing, unreadable, no JSON, or holds no object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON, or cut short: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return content


def _read_index(path: Path) -> dict[str, str]:
    content = read_json_object(path)
    placed = content.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{path}: has no weight_map")
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file or len(os.fsencode(file)) > 255:
            raise ModelError(
                f"{path}: tensor {name}: {shown(file)} is not the name of a file beside it"
            )
    return placed


def _weight_files(folder: Path, placed: Mapping[str, str] | None) -> tuple[Path, ...]:
    if placed is not None:
        files = tuple(folder / name for name in sorted(set(placed.values())))
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: named by {INDEX_FILE}, but not there")
        return files
    found = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_FILE in found:
        return (folder / SINGLE_FILE,)
    if len(found) > 1:
        raise ModelError(f"{folder}: has {len(found)} safetensors files, but no {INDEX_FILE}")
    if found:
        return (found[0],)
    pickled = sorted(file for pattern in _PICKLES for file in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{pickled[0]}: pickled weights can run code and are not read; convert the model to "
            "safetensors"
        )
    raise ModelError(f"{folder}: has no weights; *.safetensors or one *.gguf is needed")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file}: damaged or cut short: {error}") from error


def _shapes(opened: Any, file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in opened.keys():  # noqa: SIM118 - no mapping, has only keys()
        part = opened.get_slice(name)
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{file}: tensor {name} has type {part.get_dtype()}; supported are "
                + ", ".join(_DTYPES)
            )
        yield name, tuple(part.get_shape())
