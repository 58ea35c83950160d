"""Sampling defaults of a model, from the `generation_config.json` in its folder."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from services.chassis.process import StartupError
from services.tokenizer.domain import SamplingDefaults
from services.tokenizer.encoding import read_json

log = logging.getLogger(__name__)

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


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What absent sampling fields take: keys present in the file, else the contract's defaults.

    A file that says `do_sample: false` asks for greedy decoding, so temperature 0.

    Raises:
        StartupError: the file is damaged, or a value is out of range.
    """
    path = folder / GENERATION_CONFIG_FILE
    if not path.exists():
        return SamplingDefaults()
    config = read_json(path)
    ignored = [key for key, neutral in _NOT_BUILT if config.get(key) not in (None, neutral)]
    if ignored:
        log.warning("%s: not available in this version: %s", path, ", ".join(ignored))
    temperature = _number(path, config, "temperature", 1.0)
    top_p = _number(path, config, "top_p", 1.0)
    top_k = _number(path, config, "top_k", 0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise StartupError(f"{path}: temperature must be finite and >= 0, got {temperature:g}")
    if not 0 < top_p <= 1:
        raise StartupError(f"{path}: top_p must be in (0, 1], got {top_p:g}")
    if not (0 <= top_k < 2**32 and top_k == int(top_k)):
        raise StartupError(f"{path}: top_k must be a whole number >= 0, got {top_k:g}")
    if config.get("do_sample") is False:
        temperature = 0.0
    return SamplingDefaults(temperature=temperature, top_p=top_p, top_k=int(top_k))


def _number(path: Path, config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StartupError(f"{path}: {key} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused like every number that is too large
