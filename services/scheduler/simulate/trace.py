"""Arrival traces: one request a line, as JSON lines or CSV.

Fields, of which the first three must be there:
    at             seconds since the start; must not fall from line to line
    prompt_tokens  at least 1
    output_tokens  at least 1
    max_tokens     the bound the request carries, at least output_tokens
    class          priority class
    tenant         whom it is for
    session        requests of one session have the same beginning
    shared_tokens  how long it is; default: the whole prompt
"""

import csv
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from services.scheduler.simulate.load import Arrival
from services.scheduler.simulate.step_model import InputError, is_unicode, shown

_NEEDED = ("at", "prompt_tokens", "output_tokens")
_FIELDS = (*_NEEDED, "max_tokens", "class", "tenant", "session", "shared_tokens")
_MOST_TOKENS = 1 << 24
_MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a checked trace holds."""

    requests: int
    longest: int
    """Most tokens in all that one of its requests may reach."""


def check_trace(path: Path) -> Extent:
    """Reads all of a trace.

    Raises:
        InputError: it cannot be read, or a line is wrong; names file, line and field.
    """
    requests = longest = 0
    for arrival in trace(path):
        requests += 1
        output = arrival.max_tokens or arrival.output_tokens
        longest = max(longest, arrival.prompt_tokens + output)
    if not requests:
        raise InputError(f"{path}: holds no request")
    return Extent(requests=requests, longest=longest)


def trace(path: Path) -> Iterator[Arrival]:
    """The requests of a trace, read as they are taken.

    Raises:
        InputError: see `check_trace`.
    """
    before = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line, fields in _lines(path, file):
                arrival = _arrival(fields, f"{path}, line {line}")
                if arrival.at_us < before:
                    raise InputError(
                        f"{path}, line {line}: at: must not be before the line above "
                        f"({before / 1e6} s), got {arrival.at_us / 1e6}"
                    )
                before = arrival.at_us
                yield arrival
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and fields; a file whose first line begins with "{" is JSON lines."""
    first = file.readline()
    whole = itertools.chain([first], file)
    if not first.lstrip().startswith("{"):
        yield from _csv_lines(path, whole)
        return
    for number, line in enumerate(whole, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON: {error.msg}") from error
        except ValueError as error:
            raise InputError(f"{path}, line {number}: a number is too long") from error
        except RecursionError as error:
            raise InputError(f"{path}, line {number}: nested too deeply") from error
        if not isinstance(fields, dict):
            raise InputError(f"{path}, line {number}: must be an object")
        yield number, fields


def _csv_lines(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(lines, strict=True)
    reader = rows.reader  # counts a line that is wrong, too
    try:
        for row in rows:
            if None in row:
                raise InputError(f"{path}, line {reader.line_num}: more values than the header has")
            yield reader.line_num, {field: text for field, text in row.items() if text}
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error


def _arrival(fields: Mapping[str, Any], where: str) -> Arrival:
    for field in fields:
        if field not in _FIELDS:
            raise InputError(f"{where}: {field:.80}: no such field (known: {', '.join(_FIELDS)})")
    missing = [field for field in _NEEDED if fields.get(field) is None]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)}: missing")
    output = _count(fields, "output_tokens", where)
    most = _count(fields, "max_tokens", where)
    if most is not None and output is not None and most < output:
        raise InputError(f"{where}: max_tokens: must be at least output_tokens, {output}")
    return Arrival(
        at_us=_micros(fields["at"], where),
        prompt_tokens=_count(fields, "prompt_tokens", where) or 0,
        output_tokens=output or 0,
        max_tokens=most,
        priority_class=_text(fields, "class", where),
        tenant=_text(fields, "tenant", where),
        session=_text(fields, "session", where),
        shared_tokens=_count(fields, "shared_tokens", where),
    )


def _micros(value: Any, where: str) -> int:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise InputError(
            f"{where}: at: must be seconds from 0 to {_MOST_SECONDS:.0f}, got {shown(value)}"
        )
    return round(seconds * 1e6)


def _count(fields: Mapping[str, Any], field: str, where: str) -> int | None:
    value = fields.get(field)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    count = int(text) if text.isdecimal() and len(text) < 12 else 0
    if not 1 <= count <= _MOST_TOKENS:
        raise InputError(f"{where}: {field}: must be from 1 to {_MOST_TOKENS}, got {shown(value)}")
    return count


def _text(fields: Mapping[str, Any], field: str, where: str) -> str:
    value = fields.get(field, "")
    if not isinstance(value, str):
        raise InputError(f"{where}: {field}: must be a text, got {shown(value)}")
    if not is_unicode(value):
        raise InputError(f"{where}: {field}: is no Unicode text")
    return value
