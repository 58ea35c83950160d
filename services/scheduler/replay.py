"""A journal executed again by the real core, without a worker: the same inputs, the same answers.

Every input is given to the core with its recorded time; what the core answers is compared with what
it answered then, by the digest of canonical bytes (`journal_digest`). Of a recording without token
ids the block hashes come from the file, in the order in which they were made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.scheduler import journal_codec as codec
from services.scheduler import journal_digest as digest
from services.scheduler.core.chain import DIGEST_BYTES, Hashing
from services.scheduler.core.plan import (
    AddRequest,
    Events,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import hashing_for
from services.scheduler.journal_file import JournalFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One entry, and what the core made of it now.

    Args:
        number: of the entry, from 1.
        now: the recorded time, microseconds.
        kind: name of the input in `journal.proto`.
        worker_id: whom it is about, or "".
        recorded: the decision then.
        decided: the decision now.
        request: of `add`.
        spec: of `attach`; None where it was refused.
        result: of `apply`.
        step: what `plan` gave.
        events: what else gave.
    """

    number: int
    now: int
    kind: str
    worker_id: str = ""
    recorded: digest.Decision
    decided: digest.Decision
    request: AddRequest | None = None
    spec: WorkerSpec | None = None
    result: StepResult | None = None
    step: StepPlan | None = None
    events: Events | None = None

    @property
    def is_same(self) -> bool:
        """Whether the core decided as it did then."""
        return self.decided == self.recorded


class Replay:
    """One execution of a journal.

    Args:
        file: just opened.

    Raises:
        JournalError: this version does not know its configuration or its hash.
    """

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._veiled = codec.is_hash_only(file.header)
        self._digests = _RecordedDigests()
        hashing = self._digests.hashing(file.header.prefix_hash)
        if not self._veiled:
            hashing = hashing_of(file)
        self.core = Scheduler(codec.config_of(file.header), hashing)

    def entries(self) -> Iterator[Played]:
        """Executes entry by entry; what comes after a difference means little.

        Raises:
            JournalError: the file is damaged.
        """
        for number, entry in enumerate(self._file.entries(), 1):
            played = self._play(number, entry)
            if self._veiled and played.is_same and not self._digests.matched:
                played = replace(
                    played, decided=digest.Decision(0, error="other blocks were hashed")
                )
            yield played

    def _play(self, number: int, entry: codec.Entry) -> Played:
        self._digests.begin(entry.block_hashes)
        kind = entry.WhichOneof("input") or "nothing"
        played = Played(
            number=number,
            now=entry.now,
            kind=kind,
            recorded=codec.decision_of(entry),
            decided=digest.NOTHING.decision(),
        )
        act = getattr(self, f"_{kind}", None)
        if act is None:
            raise codec.JournalError(f"entry {number} is of a kind that this version does not know")
        try:
            played = act(played, entry)
        except codec.JournalError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever the core raised then, it may now
            played = replace(played, decided=digest.of_error(error).decision())
        return played

    def _add(self, played: Played, entry: codec.Entry) -> Played:
        request = codec.parse_add(entry.add)
        played = replace(played, request=request)
        try:
            events = self.core.add(request, played.now)
        except Exception as error:  # noqa: BLE001  # see `_play`
            return replace(played, decided=digest.of_error(error).decision())
        return self._with(played, events)

    def _abort(self, played: Played, entry: codec.Entry) -> Played:
        return self._with(played, self.core.abort(entry.abort, played.now))

    def _finish(self, played: Played, entry: codec.Entry) -> Played:
        finish = entry.finish
        return self._with(played, self.core.finish(finish.handle, finish.kept_tokens, played.now))

    def _attach(self, played: Played, entry: codec.Entry) -> Played:
        spec = codec.parse_attach(entry.attach)
        played = replace(played, worker_id=spec.worker_id)
        if entry.attach.refused:  # for want of memory, on that machine: nothing had changed
            return replace(played, decided=played.recorded)
        lowered, epoch, events = self.core.attach(spec, played.now)
        decided = digest.of_events(
            events, veiled=self._veiled, prefix=repr((lowered, epoch)).encode()
        ).decision()
        return replace(played, spec=lowered, events=events, decided=decided)

    def _lost(self, played: Played, entry: codec.Entry) -> Played:
        self.core.lost(entry.lost, played.now)
        return replace(played, worker_id=entry.lost)

    def _configure_json(self, played: Played, entry: codec.Entry) -> Played:
        config = codec.read_config(entry.configure_json)
        return self._with(played, self.core.configure(config, played.now))

    def _pin(self, played: Played, entry: codec.Entry) -> Played:
        kept = self.core.pin(codec.parse_pin(entry.pin), played.now)
        return replace(played, decided=digest.of_value(kept).decision())

    def _unpin(self, played: Played, entry: codec.Entry) -> Played:
        was = self.core.unpin(entry.unpin, played.now)
        return replace(played, decided=digest.of_value(int(was)).decision())

    def _flush(self, played: Played, entry: codec.Entry) -> Played:
        del entry
        return replace(played, decided=digest.of_value(self.core.flush(played.now)).decision())

    def _expire(self, played: Played, entry: codec.Entry) -> Played:
        del entry
        return self._with(played, self.core.expire(played.now))

    def _plan(self, played: Played, entry: codec.Entry) -> Played:
        step = self.core.plan(entry.plan, played.now)
        decided = digest.of_step(step, veiled=self._veiled).decision()
        return replace(played, worker_id=entry.plan, step=step, decided=decided)

    def _apply(self, played: Played, entry: codec.Entry) -> Played:
        worker_id, result = entry.apply.worker_id, codec.parse_apply(entry.apply)
        played = replace(played, worker_id=worker_id, result=result)
        return self._with(played, self.core.apply(worker_id, result, played.now))

    def _with(self, played: Played, events: Events) -> Played:
        decided = digest.of_events(events, veiled=self._veiled).decision()
        return replace(played, events=events, decided=decided)


def hashing_of(file: JournalFile) -> Hashing:
    """The hash functions that the recorded core had.

    Raises:
        JournalError: this version has no such hash.
    """
    try:
        return hashing_for(file.header.prefix_hash, file.header.hash_key)
    except ValueError as error:
        raise codec.JournalError(str(error)) from error


class _RecordedDigests:
    """Gives the digests of an entry in the order in which they were made."""

    def __init__(self) -> None:
        self._digests = b""
        self._next = 0
        self._short = False

    def begin(self, digests: bytes) -> None:
        self._digests, self._next, self._short = digests, 0, False

    @property
    def matched(self) -> bool:
        """Whether as many were asked for as were made."""
        return not self._short and self._next == len(self._digests)

    def hashing(self, name: str) -> Hashing:
        return Hashing(name=name, root=self._take, block=self._take)

    def _take(self, parent: bytes, data: bytes) -> bytes:
        del parent, data
        taken = self._digests[self._next : self._next + DIGEST_BYTES]
        self._next += DIGEST_BYTES
        self._short |= not taken
        return taken or bytes(DIGEST_BYTES)
