"""What the core decided, as canonical bytes and their digest, and as a few numbers for people.

Recorder and replay both call this, so that equal digests mean equal decisions: every column of a
step, every new row, copy, token and end. `veiled`: token ids are left out, their number stays.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.scheduler.core.plan import Events, NewRow, Refused, StepPlan

STEP_NUMBERS = ("rows", "tokens", "new rows", "new blocks", "copied blocks", "released slots")
"""What the numbers of a step's summary are."""

EVENT_NUMBERS = ("tokens", "ends")
"""What the numbers of the events' summary are."""

_STEP = struct.Struct("<8qq")
_ROW = struct.Struct("<5qddqQ")
_SIZE = struct.Struct("<q")
_VEILED_STOP = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """What the core answered to one input, as it is kept and compared.

    Args:
        digest: 0 where it decided nothing.
        summary: see STEP_NUMBERS and EVENT_NUMBERS.
        error: what it raised, "" for nothing.
    """

    digest: int
    summary: tuple[int, ...] = ()
    error: str = ""


class Answer(NamedTuple):
    """What the core answered, not yet hashed: that is left to whoever has time.

    Args:
        canonical: equal bytes mean equal answers; b"" where it decided nothing.
        summary: as in Decision.
        error: as in Decision.
    """

    canonical: bytes
    summary: tuple[int, ...] = ()
    error: str = ""

    def decision(self) -> Decision:
        """The answer as it is kept."""
        return Decision(digest_of(self.canonical), self.summary, self.error)


NOTHING = Answer(b"")


def digest_of(canonical: bytes) -> int:
    """64 bits of the sha256 of an answer, never 0; 0 of none."""
    if not canonical:
        return 0
    return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") or 1


def of_step(step: StepPlan | None, *, veiled: bool) -> Answer:
    """Of what `plan` gave."""
    if step is None:
        return NOTHING
    numbers = (
        step.slots.size,
        int(step.num_tokens.sum()),
        len(step.new_rows),
        step.new_block_ids.size,
        step.copied_from.size,
        step.released_slots.size,
    )
    digest = step.block_table_digest
    parts = [
        _STEP.pack(step.epoch, step.step_id, *numbers, -1 if digest is None else 0),
        step.slots.tobytes(),
        step.num_tokens.tobytes(),
        step.num_new_blocks.tobytes(),
        step.new_block_ids.tobytes(),
        step.copied_from.tobytes(),
        step.copied_to.tobytes(),
        step.released_slots.tobytes(),
    ]
    if digest is not None:
        parts.append(digest.to_bytes(8, "little"))
    for row in step.new_rows:
        parts.append(_row(row, veiled=veiled))  # noqa: PERF401 - an append, since mostly there is no row
    return Answer(b"".join(parts), numbers)


def of_events(events: Events, *, veiled: bool, prefix: bytes = b"") -> Answer:
    """Of what an input gave that answers with events.

    Args:
        events: what happened.
        veiled: leave token ids out.
        prefix: canonical bytes of what else it gave.
    """
    size = events.handles.size
    if not (size or events.ended or prefix):
        return NOTHING
    parts = [prefix, _SIZE.pack(size), events.handles.tobytes()]
    if not veiled:
        parts.append(events.token_ids.tobytes())
    for end in events.ended:
        if veiled and end.stop_token_id is not None:
            end = replace(end, stop_token_id=_VEILED_STOP)  # noqa: PLW2901 - it stays the same end, with its token veiled
        parts.append(repr(end).encode())
    return Answer(b"".join(parts), (size, len(events.ended)))


def of_value(value: object) -> Answer:
    """Of a plain answer."""
    return Answer(repr(value).encode())


def of_error(error: Exception) -> Answer:
    """Of an input that the core refused, or that it failed at."""
    text = repr(error.refusal) if isinstance(error, Refused) else str(error)
    text = f"{type(error).__name__}: {text}"
    return Answer(text.encode(), (), text)


def _row(row: NewRow, *, veiled: bool) -> bytes:
    sampling = row.sampling
    numbers = _ROW.pack(
        row.slot,
        row.token_ids.size,
        row.prompt_len,
        row.num_computed,
        len(row.traceparent),
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    )
    ids = b"" if veiled else row.token_ids.tobytes()
    return b"".join((numbers, row.traceparent.encode(), ids))
