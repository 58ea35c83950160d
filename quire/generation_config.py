"""Sampling defaults of a model, from the `generation_config.json` in its folder.

The one place that says what the file means, so that all doors resolve a request alike. Standard
library only.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

GENERATION_CONFIG_FILE = "generation_config.json"

# Keys that change what is generated and that no request can set; their neutral values are harmless.
_NOT_BUILT: tuple[tuple[str, object], ...] = (
    ("repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0),
    ("min_p", 0.0),
    ("typical_p", 1.0),
    ("bad_words_ids", None),
    ("suppress_tokens", None),
)


class DamagedConfig(ValueError):
    """The file cannot be read, or a value is out of range; names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDefaults:
    """What the file says; None where it says nothing.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: in (0, 1].
        top_k: 0 is no limit.
        ignored: keys that would change what is generated, and that this version does not have.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignored: tuple[str, ...] = ()


def read_file_defaults(folder: Path) -> FileDefaults:
    """What absent sampling fields take where the file has the key.

    A file that says `do_sample: false` asks for greedy decoding, so temperature 0.

    Raises:
        DamagedConfig: the file is damaged, or a value is out of range.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.exists():
        return FileDefaults()
    config = _read(path)
    temperature = _number(path, config, "temperature")
    top_p = _number(path, config, "top_p")
    top_k = _number(path, config, "top_k")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise DamagedConfig(f"{path}: temperature must be finite and >= 0, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise DamagedConfig(f"{path}: top_p must be in (0, 1], got {top_p:g}")
    if top_k is not None and not (0 <= top_k < 2**32 and top_k == int(top_k)):
        raise DamagedConfig(f"{path}: top_k must be a whole number >= 0, got {top_k:g}")
    return FileDefaults(
        temperature=0.0 if config.get("do_sample") is False else temperature,
        top_p=top_p,
        top_k=None if top_k is None else int(top_k),
        ignored=tuple(key for key, neutral in _NOT_BUILT if config.get(key) not in (None, neutral)),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedConfig(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedConfig(f"{path}: is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise DamagedConfig(f"{path}: must hold a JSON object")
    return value


def _number(path: Path, config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DamagedConfig(f"{path}: {key} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused like every number that is too large
