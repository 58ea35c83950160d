"""Facts about the model that lie in its folder, for clients that render and tokenize themselves.

Owns which files a tokenizer is made of. Reads them at start; understands no tokenizer.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.generation_config import DamagedConfig, FileDefaults, read_file_defaults
from quire.models import ModelNotFound, locate_model
from services.chassis.process import StartupError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_PATTERNS = ("*.jinja", "*.tiktoken", "*.model")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest time that a zip can hold: the same files give the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What the folder says.

    Args:
        tokenizer_zip: the tokenizer's files.
        sha256: of the zip, hexadecimal.
        sampling: defaults of absent sampling fields.
        model_type: as in config.json; "" without one.
        architectures: the same.
        bos_token_id: of config.json or generation_config.json; None where neither has one.
        pad_token_id: the same.
    """

    tokenizer_zip: bytes
    sha256: str
    sampling: FileDefaults
    model_type: str
    architectures: tuple[str, ...]
    bos_token_id: int | None
    pad_token_id: int | None


def read_model_folder(model: str) -> ModelFolder:
    """Finds a model on this machine and reads what is told of it.

    Args:
        model: an alias, a folder, or a hub id that was pulled.

    Raises:
        StartupError: there is no such model, no tokenizer in its folder, or a file is damaged.
    """
    try:
        folder = locate_model(model).path
    except ModelNotFound as error:
        raise StartupError(f"--tokenizer: {error}") from error
    files = list(_tokenizer_files(folder))
    if not files:
        raise StartupError(f"--tokenizer: {folder} holds no tokenizer")
    try:
        sampling = read_file_defaults(folder)
        packed = _zipped(files)
        config, generation = _object(folder / "config.json"), _object(folder / _FILES[3])
    except DamagedConfig as error:
        raise StartupError(f"--tokenizer: {error}") from error
    except OSError as error:
        raise StartupError(f"--tokenizer: {error.filename}: {error.strerror}") from error
    architectures = config.get("architectures")
    return ModelFolder(
        tokenizer_zip=packed,
        sha256=hashlib.sha256(packed).hexdigest(),
        sampling=sampling,
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        bos_token_id=_token("bos_token_id", config, generation),
        pad_token_id=_token("pad_token_id", config, generation),
    )


def _tokenizer_files(folder: Path) -> Iterator[Path]:
    named = [folder / name for name in _FILES]
    if not any(path.is_file() for path in named if path.name.startswith(("tokenizer", "vocab"))):
        return
    yield from (path for path in named if path.is_file())
    for pattern in _PATTERNS:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _zipped(files: list[Path]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.name, _EPOCH)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedConfig(f"{path}: is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise DamagedConfig(f"{path}: must hold a JSON object")
    return value


def _token(name: str, *configs: dict[str, Any]) -> int | None:
    found = [config.get(name) for config in configs]
    ids = [value for value in found if isinstance(value, int) and 0 <= value < 2**31]
    return ids[0] if ids else None
