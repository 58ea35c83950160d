"""How busy the scheduler is and what it has cached, for tokenizers that choose among schedulers.

The hashes of cached blocks become a Bloom filter (B. Bloom, "Space/time trade-offs in hash coding
with allowable errors", CACM 1970) of the package rbloom: small, and never without a block that is
cached. Made outside the core, only while a session asks, in slices that leave the event loop free,
and so seldom that making it takes at most a twentieth of the time.
"""

import asyncio
import functools
import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from rbloom import Bloom

from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import Loads

FALSE_POSITIVES = 0.01
"""Share of absent blocks that a filter takes for present, while it may be as large as it needs."""

MAX_BITS = 8 * 1024 * 1024
"""Largest filter; what holds more blocks than about 875,000 errs more often."""

INTERVAL_S = 1.0
"""Least time between two reports, seconds."""

_WORST_FALSE_POSITIVES = 0.5  # above that a filter of this kind would use no hash function at all
_SLICE_BLOCKS = 1024
"""Blocks put in at a stretch, about a millisecond."""
_HASHED = np.dtype({"names": ["head"], "formats": ["V16"], "itemsize": DIGEST_BYTES})
_PAUSE_PER_WORK = 19.0

_hash_of = functools.partial(int.from_bytes, byteorder="little", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixDigest:
    """A set of block hashes; see PrefixDigest in token.proto.

    Args:
        bloom: the filter's bytes.
        items: hashes put in.
    """

    bloom: bytes
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The scheduler now; see LoadReport in token.proto.

    Args:
        prefixes: what is cached; None where the receiver has been told.
    """

    running: int
    waiting: int
    waiting_tokens: int
    prefixes: PrefixDigest | None


class LoadSource(Protocol):
    """The engine loop, as seen from here."""

    def loads(self) -> Loads:
        """Gauges and counters."""
        ...

    def cached_hashes(self) -> bytes:
        """Hashes of all cached blocks back to back, 32 bytes each."""
        ...


async def prefix_digest(hashes: bytes) -> PrefixDigest:
    """The filter of these hashes.

    Args:
        hashes: back to back, 32 bytes each.
    """
    return (await _build(hashes))[0]


class LoadReports:
    """The newest report, made when somebody asks for it and the last one is old enough.

    Args:
        source: what is reported on.
        interval_s: least time between two reports, seconds.
    """

    def __init__(self, source: LoadSource, *, interval_s: float = INTERVAL_S) -> None:
        self._source = source
        self._interval_s = interval_s
        self._one_at_a_time = asyncio.Lock()
        self._due = -math.inf
        self._mark: object = None
        self._hashes: bytes | None = None
        self._report: LoadReport | None = None

    async def newest(self) -> LoadReport:
        """What is known now; the same object while nothing has changed."""
        async with self._one_at_a_time:
            if self._report is None or _clock() >= self._due:
                started = _clock()
                spent_s = await self._refresh()
                self._due = max(started + self._interval_s, _clock() + spent_s * _PAUSE_PER_WORK)
            assert self._report is not None
            return self._report

    async def pause(self) -> None:
        """Waits until another report may be due."""
        # A millisecond more, since a loop's timer may fire a little before its time.
        await asyncio.sleep(max(0.0, self._due - _clock()) + 1e-3)

    async def _refresh(self) -> float:
        """Takes the source's figures, and its hashes where they may have changed.

        Returns:
            How long the filter took to make, pauses left out; seconds.
        """
        loads = self._source.loads()
        spent_s = 0.0
        prefixes = None if self._report is None else self._report.prefixes
        mark = _mark(loads)
        if prefixes is None or mark != self._mark:
            hashes = self._source.cached_hashes()
            if prefixes is None or hashes != self._hashes:
                prefixes, spent_s = await _build(hashes)
            self._mark, self._hashes = mark, hashes
        report = LoadReport(
            running=loads.running,
            waiting=loads.waiting,
            waiting_tokens=loads.waiting_tokens,
            prefixes=prefixes,
        )
        if report != self._report:
            self._report = report
        return spent_s


def unless_known(report: LoadReport, before: LoadReport | None) -> LoadReport:
    """The report without its prefixes where the receiver has them from the one `before`."""
    known = before is not None and report.prefixes is before.prefixes
    return replace(report, prefixes=None) if known else report


async def _build(hashes: bytes) -> tuple[PrefixDigest, float]:
    count = len(hashes) // DIGEST_BYTES
    bloom = _empty(count)
    heads = np.frombuffer(hashes, _HASHED)["head"]
    spent_s = 0.0
    for start in range(0, count, _SLICE_BLOCKS):
        if start:
            await asyncio.sleep(0)
        begun = _clock()
        bloom.update(heads[start : start + _SLICE_BLOCKS].tolist())
        spent_s += _clock() - begun
    return PrefixDigest(bloom=bloom.save_bytes(), items=count), spent_s


def _empty(count: int) -> Bloom:
    """A filter for so many items, with as few false positives as its largest size allows."""
    ln2_squared = math.log(2) ** 2
    rate = max(FALSE_POSITIVES, math.exp(-MAX_BITS * ln2_squared / max(count, 1)))
    most = int(MAX_BITS * ln2_squared / -math.log(_WORST_FALSE_POSITIVES))
    return Bloom(max(1, min(count, most)), min(rate, _WORST_FALSE_POSITIVES), _hash_of)


def _mark(loads: Loads) -> object:
    """Equal as long as no worker came, went, was sent a step or answered one, and no block went.

    Nothing else changes what is cached.
    """
    workers = tuple(
        (load.worker_id, load.epoch, load.steps, load.steps_in_flight) for load in loads.workers
    )
    return loads.counters.steps, loads.counters.evicted_blocks, workers


def _clock() -> float:
    return time.monotonic()
