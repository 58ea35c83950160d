"""How long a worker computes a step, and what it holds: a small YAML file, and its frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from quire.cli.command import CommandError
from services.scheduler.core.plan import WORKER_LIMITS, WorkerSpec

SHIPPED = Path(__file__).parent / "models"
"""Folder of the models that come with the package."""

EOS_TOKEN = 2
VOCAB_SIZE = 32_000

_TIMES = ("base_us", "per_token_us", "per_row_us", "per_context_us")
_MOST_US = 1 << 31
_MOST_BITS_SHOWN = 256
_MOST_SHOWN = 80
_SIZES = MappingProxyType(
    {
        "blocks": WORKER_LIMITS["num_blocks"],
        **{
            name: WORKER_LIMITS[name]
            for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        },
    }
)
_FIELDS = ("name", *_TIMES, *_SIZES, "sources")


class InputError(CommandError):
    """A file or flag cannot be used; names it, the field in it, and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """One kind of worker: a step takes

        base + per_token * tokens + per_row * rows + per_context * context   [microseconds]

    where `context` is the sum, over the rows of the step, of the tokens whose keys and values a row
    reads: all it has computed once the step is done.

    Args:
        name: for people.
        base_us: of every step that computes something: the reading of the weights, launches.
        per_token_us: for each token computed.
        per_row_us: for each request in the step.
        per_context_us: for each token of context.
        blocks: of the KV cache.
        block_size: tokens per block.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: longest context, prompt and output.
        sources: where the figures come from, one text each.
    """

    name: str
    base_us: float
    per_token_us: float
    per_row_us: float
    per_context_us: float
    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    sources: tuple[str, ...] = ()

    def step_us(self, tokens: int, rows: int, context: int) -> int:
        """Microseconds of a step, at least 1; one that computes nothing takes 1."""
        if not tokens:
            return 1
        micros = (
            self.base_us
            + self.per_token_us * tokens
            + self.per_row_us * rows
            + self.per_context_us * context
        )
        return max(1, round(micros))

    def spec(self, worker_id: str) -> WorkerSpec:
        """What a worker of this kind announces."""
        return WorkerSpec(
            worker_id=worker_id,
            num_blocks=self.blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_TOKEN,),
            max_in_flight=2,
            model_digest=b"simulated",
        )


def load_model(name: str) -> StepModel:
    """The model of a file, or one of those that come with the package by its name.

    Raises:
        InputError: there is none, or a field of it is wrong; names file and field.
    """
    shipped = SHIPPED / f"{name}.yaml"
    path = shipped if "/" not in name and shipped.is_file() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"--model {name}: {reason} (shipped: {known}; or a YAML file)") from error
    try:
        content = yaml.safe_load(text)
    except RecursionError as error:
        raise InputError(f"{path}: not YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        # The last two: of a date or a number that there is not.
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError, TypeError) as error:
        # What the constructors of tagged values raise, e.g. of `!!bool maybe`.
        raise InputError(f"{path}: not YAML: a value is not what its tag says") from error
    if not isinstance(content, Mapping):
        raise InputError(f"{path}: must be a mapping of fields, got {type(content).__name__}")
    return model_from(content, str(path))


def model_from(content: Mapping[str, Any], where: str) -> StepModel:
    """The model of a mapping; `where` is named in errors.

    Raises:
        InputError: names the field.
    """
    for field in content:
        if field not in _FIELDS:
            name = f"{field:.80}" if isinstance(field, str) else shown(field)
            raise InputError(f"{where}: {name}: no such field (known: {', '.join(_FIELDS)})")
    missing = [field for field in _FIELDS if field not in content and field != "sources"]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)}: missing")
    if not isinstance(content["name"], str) or not content["name"]:
        raise InputError(f"{where}: name: must be a text, got {shown(content['name'])}")
    if not is_unicode(content["name"]):
        raise InputError(f"{where}: name: is no Unicode text")
    sources = content.get("sources") or []
    if not isinstance(sources, list) or not all(isinstance(text, str) for text in sources):
        raise InputError(f"{where}: sources: must be a list of texts")
    values: dict[str, Any] = {
        **{field: _time(content[field], f"{where}: {field}") for field in _TIMES},
        **{name: _size(content[name], most, f"{where}: {name}") for name, most in _SIZES.items()},
    }
    if not any(values[field] for field in _TIMES):
        raise InputError(f"{where}: {', '.join(_TIMES)}: one of them must be above 0")
    return StepModel(name=content["name"], **values, sources=tuple(sources))


def write_model(model: StepModel, path: Path) -> None:
    """Writes the file that `load_model` reads.

    Raises:
        InputError: it cannot be written.
    """
    content = {field: getattr(model, field) for field in _FIELDS if field != "sources"}
    content["sources"] = list(model.sources)
    try:
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=96), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _time(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: must be a number of microseconds, got {shown(value)}")
    if not 0 <= value <= _MOST_US:
        raise InputError(f"{where}: must be between 0 and {_MOST_US}, got {shown(value)}")
    return float(value)


def _size(value: Any, most: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}: must be a whole number, got {shown(value)}")
    if not 1 <= value <= most:
        raise InputError(f"{where}: must be between 1 and {most}, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value of a file for a message: in short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
