"""What is cached now and every change of it, as numbered batches for subscribers.

Owns the book of cached blocks (hash, parent, tokens) while somebody subscribes, the numbers of the
batches, and each subscriber's queue. With several workers a block is cached as long as one of them
has it. Nothing is noted, and nothing costs time, while nobody has subscribed for `LINGER_S`.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import numpy as np

from services.chassis.errors import Internal, Overloaded, ServiceError
from services.scheduler.core.cache_log import CacheLog, Removed, Stored
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import TokenArray
from services.scheduler.engine_loop import EngineLoop

log = logging.getLogger(__name__)

LINGER_S = 60.0
"""How long the book is kept after the last subscriber went, for one that comes back, seconds."""

MAX_WAITING = 4096
"""Batches that may wait for one subscriber; one that falls behind further is given up."""

BATCH_BLOCKS = 1024
"""Most blocks in one batch, about 100 KB on the wire."""

_HISTORY = 256
"""Batches kept for subscribers that come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Blocks that follow each other can be found.

    Args:
        salt: as in AddRequest.
        parent: digest of the block before the first one; b"": there is none before it.
        digests: theirs, back to back.
        tokens: uint32 [blocks, block_size].
    """

    salt: bytes
    parent: bytes
    digests: bytes
    tokens: TokenArray

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Blocks that no worker has any more.

    Args:
        digests: theirs, back to back.
    """

    digests: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block is cached any more."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The place of a batch in a snapshot.

    Args:
        index: of this batch, from 0.
        count: of batches in the snapshot.
        blocks: in all of it, at most.
        complete: False: more blocks are cached, from before anybody subscribed.
    """

    index: int
    count: int
    blocks: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBatch:
    """Changes that belong together.

    Args:
        number: one more than that of the batch before, also over snapshot and changes.
        at: when they were noted, seconds since 1970.
        events: in order.
        snapshot: where it is part of one.
    """

    number: int
    at: float
    events: tuple[KvEvent, ...]
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    parent: bytes
    salt: bytes
    tokens: TokenArray


class KvEvents:
    """The cache of one scheduler as seen by subscribers.

    Args:
        loop: the engine loop; its `after_turn` is used while there is a book.
        linger_s: see LINGER_S.
    """

    def __init__(self, loop: EngineLoop, *, linger_s: float = LINGER_S) -> None:
        self._loop = loop
        self._linger_s = linger_s
        self._book: dict[bytes, _Block] = {}
        self._log: CacheLog | None = None
        # Numbers of a later process are larger, so that nobody takes its batches for known ones.
        self._number = time.time_ns() // 1000
        self._history: deque[KvBatch] = deque(maxlen=_HISTORY)
        self._subscribers: set[_Subscriber] = set()
        self._ending: asyncio.TimerHandle | None = None

    @property
    def is_watching(self) -> bool:
        """Whether there is a book."""
        return self._log is not None

    async def subscribe(self, start: int) -> AsyncGenerator[KvBatch, None]:
        """What is cached, or what has changed since batch `start`, then all changes.

        Args:
            start: number of the first batch wanted. Where batches since then are not all known any
                more, or for 0, a snapshot comes in their place.

        Raises:
            Overloaded: the subscriber has fallen too far behind.
        """
        with self._subscribed() as subscriber:
            oldest = self._history[0].number if self._history else self._number + 1
            if start and oldest <= start <= self._number + 1:
                for batch in [one for one in self._history if one.number >= start]:
                    yield batch
            else:
                for batch in self._snapshot():
                    yield batch
            while True:
                yield await subscriber.take()

    @contextlib.contextmanager
    def _subscribed(self) -> Iterator["_Subscriber"]:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._log is None:
            self._begin()
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._ending = asyncio.get_running_loop().call_later(self._linger_s, self._end)

    def _begin(self) -> None:
        self._number += 1  # what happened since the last watch is not told: its numbers end there
        self._log = CacheLog(self._book)
        self._loop.watch_cache(self._log)
        self._loop.after_turn = self._publish
        self._publish()

    def _end(self) -> None:
        self._ending = self._log = None
        self._loop.watch_cache(None)
        self._loop.after_turn = None
        self._book.clear()
        self._history.clear()

    def _publish(self) -> None:
        """Makes batches of what was noted since the last turn; a fault ends the watch alone."""
        try:
            self._read_log()
        except Exception as error:
            log.error("what is cached cannot be told", exc_info=error)
            for subscriber in self._subscribers:
                subscriber.fail(Internal("what is cached cannot be told"))
            self._subscribers.clear()
            self._end()

    def _read_log(self) -> None:
        assert self._log is not None
        if not self._log.notes:
            return
        events: list[KvEvent] = []
        for note in self._log.notes:
            events.extend(self._removed(note) if isinstance(note, Removed) else self._stored(note))
        self._log.notes.clear()
        if events and not self._book:
            events = [CacheCleared()]
        now = time.time()
        for event in events:
            self._number += 1
            batch = KvBatch(number=self._number, at=now, events=(event,))
            self._history.append(batch)
            for subscriber in self._subscribers:
                subscriber.put(batch)

    def _stored(self, note: Stored) -> Iterator[BlocksStored]:
        """Takes blocks into the book that can be reached from the beginning of their sequence."""
        parent = note.parent
        new: list[int] = []
        first_parent = parent
        for place in range(len(note.digests) // DIGEST_BYTES):
            digest = note.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            if digest not in self._book:
                reachable = not parent or parent in self._book
                if not reachable or not self._loop.cached_blocks(digest):
                    break  # nothing behind it can be reached either
                if not new:
                    first_parent = parent
                self._book[digest] = _Block(parent, note.salt, note.tokens[place])
                new.append(place)
            elif new:
                yield from _runs(note, first_parent, new)
                new = []
            parent = digest
        if new:
            yield from _runs(note, first_parent, new)

    def _removed(self, note: Removed) -> Iterator[BlocksRemoved]:
        gone = []
        for at in range(0, len(note.digests), DIGEST_BYTES):
            digest = note.digests[at : at + DIGEST_BYTES]
            if digest in self._book and not self._loop.cached_blocks(digest):
                del self._book[digest]
                gone.append(digest)
        for start in range(0, len(gone), BATCH_BLOCKS):
            yield BlocksRemoved(digests=b"".join(gone[start : start + BATCH_BLOCKS]))

    def _snapshot(self) -> Iterator[KvBatch]:
        """The book as it is now, in batches whose numbers end at the newest one."""
        assert self._log is not None
        book, complete, now = dict(self._book), self._log.complete, time.time()
        count = max(1, -(-len(book) // BATCH_BLOCKS))
        first = self._number - count + 1
        ordered = _parents_first(book)
        for index in range(count):
            events: list[KvEvent] = [] if index else [CacheCleared()]
            events.extend(_grouped(book, ordered, BATCH_BLOCKS))
            place = Snapshot(index=index, count=count, blocks=len(book), complete=complete)
            yield KvBatch(number=first + index, at=now, events=tuple(events), snapshot=place)


class _Subscriber:
    """The queue of one subscriber."""

    def __init__(self) -> None:
        self._waiting: deque[KvBatch] = deque()
        self._news = asyncio.Event()
        self._error: ServiceError | None = None

    def put(self, batch: KvBatch) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.fail(Overloaded("the subscriber reads too slowly", reason="SLOW_READER"))
        if self._error is None:
            self._waiting.append(batch)
            self._news.set()

    def fail(self, error: ServiceError) -> None:
        self._error = error
        self._waiting.clear()
        self._news.set()

    async def take(self) -> KvBatch:
        await self._news.wait()
        if self._error is not None:
            raise self._error
        batch = self._waiting.popleft()
        if not self._waiting:
            self._news.clear()
        return batch


def _runs(note: Stored, parent: bytes, places: list[int]) -> Iterator[BlocksStored]:
    """The blocks of a note at these places, which follow each other, in pieces of a batch."""
    for start in range(places[0], places[-1] + 1, BATCH_BLOCKS):
        end = min(start + BATCH_BLOCKS, places[-1] + 1)
        digests = note.digests[start * DIGEST_BYTES : end * DIGEST_BYTES]
        yield BlocksStored(
            salt=note.salt, parent=parent, digests=digests, tokens=note.tokens[start:end]
        )
        parent = digests[-DIGEST_BYTES:]


def _parents_first(book: dict[bytes, _Block]) -> Iterator[bytes]:
    """The digests of a book, each after its parent; what has no parent in it is left out."""
    told: set[bytes] = set()
    for digest in book:
        way = []
        at = digest
        while at in book and at not in told:
            way.append(at)
            at = book[at].parent
        if at and at not in told:
            continue  # the beginning of the sequence is not cached
        told.update(way)
        yield from reversed(way)


def _grouped(
    book: dict[bytes, _Block], ordered: Iterator[bytes], most: int
) -> Iterator[BlocksStored]:
    """The next `most` blocks, those that follow each other together."""
    run: list[bytes] = []

    def told() -> BlocksStored:
        first = book[run[0]]
        return BlocksStored(
            salt=first.salt,
            parent=first.parent,
            digests=b"".join(run),
            tokens=np.stack([book[digest].tokens for digest in run]),
        )

    for _ in range(most):
        digest = next(ordered, None)
        if digest is None:
            break
        if run and book[digest].parent != run[-1]:
            yield told()
            run = []
        run.append(digest)
    if run:
        yield told()
