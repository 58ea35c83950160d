"""Values of flags that several commands of the simulation have."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from services.scheduler.simulate.step_model import InputError, is_unicode

DEFAULT_MODEL = "llama-70b-8xh100"
MOST = 1 << 31


def positive(text: str) -> int:
    """A whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST}, got {text}")
    return value


def whole(text: str) -> int:
    """A whole number from 0 on."""
    return 0 if text.strip() == "0" else positive(text)


def levels(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, comma separated."""
    return tuple(positive(part) for part in text.split(","))


def above_zero(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MOST}, got {text}")
    return value


def sigma(text: str) -> float:
    """The spread of a log-normal distribution."""
    value = _number(text)
    if not 0 <= value <= 4:
        raise argparse.ArgumentTypeError(f"must be from 0 to 4, got {text}")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def names(text: str) -> tuple[str, ...]:
    """Names, comma separated."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or not is_unicode(text):
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return found


def add_common_flags(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """Model, seed and JSON file."""
    if model:
        parser.add_argument(
            "--model",
            default=DEFAULT_MODEL,
            metavar="NAME|FILE",
            help="step model: one that is shipped or a YAML file (default: %(default)s)",
        )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of all that is drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def write_json(path: Path | None, content: Any) -> None:
    """Writes figures, if a file is given.

    Raises:
        InputError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value
