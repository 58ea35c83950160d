"""The core with a journal: every input is passed on, and noted with what the core decided.

Stands where the engine loop holds the core; without recording the loop holds the core itself. An
entry is made from what goes in and comes out, after the core has answered: a fault of the recording
ends the recording and no request.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from services.scheduler import journal_codec as codec
from services.scheduler import journal_digest as digest
from services.scheduler.core.cache_log import CacheLog
from services.scheduler.core.chain import Hashing
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    NO_TOKENS,
    AddRequest,
    Ended,
    Events,
    Limits,
    Loads,
    Pin,
    Stall,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.journal import Journal, clocks
from services.scheduler.journal_veil import Veil

log = logging.getLogger(__name__)

_MAX_HELD_BYTES = 64 << 20
"""Entries from before the first worker, of a recording without token ids."""


class Recording:
    """A recording of one scheduler process, from its start to its end.

    Args:
        path: of the journal; see Journal for files that exist.
        config: that the core begins with.
        hashing: of the core.
        hash_key: of that hash, b"" for one without.
        hash_only: token ids are left out.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self, path: Path, config: Config, hashing: Hashing, *, hash_key: bytes, hash_only: bool
    ) -> None:
        header = codec.header(
            config=config,
            prefix_hash=hashing.name,
            hash_key=hash_key,
            hash_only=hash_only,
            clocks=clocks(),
        )
        self._journal = Journal(path, header)
        self.hashing = hashing
        self.core = RecordingScheduler(config, hashing, self._journal, hash_only=hash_only)
        """What the engine loop is to hold."""
        kind = "block hashes only" if hash_only else "token ids included"
        log.info("recording to %s, %s", self._journal.path, kind)

    async def close(self) -> None:
        """Writes what is left; call it once the core takes no more inputs."""
        self.core.finish_recording()
        await asyncio.to_thread(self._journal.close)


Fill = Callable[[codec.Entry], None]
_Held = tuple[codec.Entry, digest.Answer, AddRequest | None]


class RecordingScheduler:
    """A Scheduler that is recorded; see there for what each method does.

    Args:
        config: of the core.
        hashing: of the core.
        journal: open; whoever made it closes it, after `finish_recording`.
        hash_only: token ids are left out.
    """

    def __init__(
        self, config: Config, hashing: Hashing, journal: Journal, *, hash_only: bool
    ) -> None:
        self._journal = journal
        self._veil = Veil() if hash_only else None
        self._digests: list[bytes] = []
        self._core = Scheduler(config, self._noted(hashing) if hash_only else hashing)
        # Which ids are special, only a worker tells: until then requests wait here to be encoded.
        self._held: list[_Held] | None = [] if hash_only else None
        self._held_bytes = 0

    def finish_recording(self) -> None:
        """Hands over what waits for a first worker. The journal is closed next."""
        self._release()

    # Inputs

    def add(self, spec: AddRequest, now: int) -> Events:
        """See Scheduler.add."""
        try:
            events = self._core.add(spec, now)
        except Exception as error:
            self._note_add(spec, now, digest.of_error(error), ())
            raise
        self._note_add(spec, now, self._answer(events), events.ended)
        return events

    def abort(self, handle: int, now: int) -> Events:
        """See Scheduler.abort."""

        def fill(entry: codec.Entry) -> None:
            entry.abort = handle

        return self._events(now, lambda: self._core.abort(handle, now), fill)

    def finish(self, handle: int, kept_tokens: int, now: int) -> Events:
        """See Scheduler.finish."""

        def fill(entry: codec.Entry) -> None:
            entry.finish.handle = handle
            entry.finish.kept_tokens = kept_tokens

        return self._events(now, lambda: self._core.finish(handle, kept_tokens, now), fill)

    def attach(self, spec: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        """See Scheduler.attach."""
        try:
            taken, epoch, events = self._core.attach(spec, now)
        except Exception as error:
            refused = isinstance(error, MemoryError)
            self._note(
                now,
                digest.of_error(error),
                lambda entry: codec.fill_attach(entry, spec, refused=refused),
            )
            raise
        if self._veil is not None:
            self._veil.learn(spec)
            self._release()
        self._note(
            now,
            self._answer(events, prefix=repr((taken, epoch)).encode()),
            lambda entry: codec.fill_attach(entry, spec, refused=False),
            events.ended,
        )
        return taken, epoch, events

    def lost(self, worker_id: str, now: int) -> None:
        """See Scheduler.lost."""

        def fill(entry: codec.Entry) -> None:
            entry.lost = worker_id

        def act() -> Events:
            self._core.lost(worker_id, now)
            return NO_TOKENS

        self._events(now, act, fill)

    def configure(self, config: Config, now: int) -> Events:
        """See Scheduler.configure."""
        return self._events(
            now,
            lambda: self._core.configure(config, now),
            lambda entry: codec.fill_configure(entry, config),
        )

    def pin(self, pin: Pin, now: int) -> int:
        """See Scheduler.pin."""
        return self._value(
            now, lambda: self._core.pin(pin, now), lambda entry: codec.fill_pin(entry, pin)
        )

    def unpin(self, name: str, now: int) -> bool:
        """See Scheduler.unpin."""

        def fill(entry: codec.Entry) -> None:
            entry.unpin = name

        return bool(self._value(now, lambda: int(self._core.unpin(name, now)), fill))

    def flush(self, now: int) -> int:
        """See Scheduler.flush."""
        return self._value(now, lambda: self._core.flush(now), _fill_flush)

    def expire(self, now: int) -> Events:
        """See Scheduler.expire."""
        events = self._core.expire(now)
        if self._journal.is_open:
            self._note(now, self._answer(events), _fill_expire, events.ended)
        return events

    # Verbs

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        """See Scheduler.plan."""
        step = self._core.plan(worker_id, now)
        if self._journal.is_open:
            try:
                answer = digest.of_step(step, veiled=self._veil is not None)
                entry = codec.entry(now)
                entry.plan = worker_id
                self._put(entry, answer)
            except Exception as error:  # noqa: BLE001  # the recording ends, not the request
                self._broken(error)
        return step

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        """See Scheduler.apply."""
        return self._events(
            now,
            lambda: self._core.apply(worker_id, result, now),
            lambda entry: codec.fill_apply(entry, worker_id, result, self._veil),
        )

    # Views

    @property
    def config(self) -> Config:
        """See Scheduler.config."""
        return self._core.config

    @property
    def limits(self) -> Limits | None:
        """See Scheduler.limits."""
        return self._core.limits

    @property
    def is_idle(self) -> bool:
        """See Scheduler.is_idle."""
        return self._core.is_idle

    def next_wakeup(self, now: int) -> int | None:
        """See Scheduler.next_wakeup."""
        return self._core.next_wakeup(now)

    def loads(self) -> Loads:
        """See Scheduler.loads."""
        return self._core.loads()

    def stall(self, now: int) -> Stall | None:
        """See Scheduler.stall."""
        return self._core.stall(now)

    def compatible(self, spec: WorkerSpec) -> bool:
        """See Scheduler.compatible."""
        return self._core.compatible(spec)

    def pins(self) -> tuple[Pin, ...]:
        """See Scheduler.pins."""
        return self._core.pins()

    def broken(self, worker_id: str) -> str | None:
        """See Scheduler.broken."""
        return self._core.broken(worker_id)

    def cached_blocks(self, hashes: bytes) -> int:
        """See Scheduler.cached_blocks."""
        return self._core.cached_blocks(hashes)

    def cached_hashes(self) -> bytes:
        """See Scheduler.cached_hashes."""
        return self._core.cached_hashes()

    def watch_cache(self, log: CacheLog | None) -> None:
        """See Scheduler.watch_cache."""
        self._core.watch_cache(log)

    def check_invariants(self) -> None:
        """See Scheduler.check_invariants."""
        self._core.check_invariants()

    # Entries

    def _events(self, now: int, act: Callable[[], Events], fill: Fill) -> Events:
        try:
            events = act()
        except Exception as error:
            self._note(now, digest.of_error(error), fill)
            raise
        if self._journal.is_open:
            self._note(now, self._answer(events), fill, events.ended)
        return events

    def _value(self, now: int, act: Callable[[], int], fill: Fill) -> int:
        try:
            value = act()
        except Exception as error:
            self._note(now, digest.of_error(error), fill)
            raise
        self._note(now, digest.of_value(value), fill)
        return value

    def _answer(self, events: Events, prefix: bytes = b"") -> digest.Answer:
        return digest.of_events(events, veiled=self._veil is not None, prefix=prefix)

    def _note(
        self, now: int, answer: digest.Answer, fill: Fill, ended: tuple[Ended, ...] = ()
    ) -> None:
        if not self._journal.is_open:
            return
        try:
            entry = codec.entry(now, ended)
            fill(entry)
            self._put(entry, answer)
        except Exception as error:  # noqa: BLE001  # the recording ends, not the request
            self._broken(error)

    def _note_add(
        self, spec: AddRequest, now: int, answer: digest.Answer, ended: tuple[Ended, ...]
    ) -> None:
        if not self._journal.is_open:
            return
        try:
            entry = codec.entry(now, ended)
            if self._held is None:
                codec.fill_add(entry, spec, self._veil)
                self._put(entry, answer, entry.ByteSize())
            else:
                self._hold(entry, answer, spec)
        except Exception as error:  # noqa: BLE001  # the recording ends, not the request
            self._broken(error)

    def _put(self, entry: codec.Entry, answer: digest.Answer, payload: int = 0) -> None:
        if self._digests:
            entry.block_hashes = b"".join(self._digests)
            payload += len(entry.block_hashes)
            self._digests.clear()
        if self._held is None:
            self._journal.put(entry, answer, payload)
        else:
            self._hold(entry, answer, None)

    def _hold(self, entry: codec.Entry, answer: digest.Answer, request: AddRequest | None) -> None:
        assert self._held is not None
        self._held.append((entry, answer, request))
        prompt = 0 if request is None else request.prompt.nbytes
        self._held_bytes += entry.ByteSize() + len(answer.canonical) + prompt
        if self._held_bytes > _MAX_HELD_BYTES:
            self._journal.fail("too much came before the first worker")
            self._held = None

    def _release(self) -> None:
        held, self._held = self._held, None
        try:
            for entry, answer, request in held or ():
                if request is not None:
                    codec.fill_add(entry, request, self._veil)
                self._journal.put(entry, answer, entry.ByteSize())
        except Exception as error:  # noqa: BLE001  # the recording ends, not the request
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        log.error("an entry could not be made", exc_info=error)
        self._journal.fail(f"an entry could not be made: {error!r}")

    def _noted(self, hashing: Hashing) -> Hashing:
        """The same functions; what they give is noted."""
        journal = self._journal

        def note(made: bytes) -> None:
            if journal.is_open:
                self._digests.append(made)

        def root(model_digest: bytes, salt: bytes) -> bytes:
            made = hashing.root(model_digest, salt)
            note(made)
            return made

        def block(parent: bytes, tokens: bytes) -> bytes:
            made = hashing.block(parent, tokens)
            note(made)
            return made

        return Hashing(name=hashing.name, root=root, block=block)


def _fill_flush(entry: codec.Entry) -> None:
    entry.flush.SetInParent()


def _fill_expire(entry: codec.Entry) -> None:
    entry.expire.SetInParent()
