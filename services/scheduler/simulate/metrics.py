"""Figures of a simulation, in memory that does not grow with the number of requests.

Columns by handle, which are used again; times as histograms with bins of equal ratio, exact to half
a per cent. Figures as `benchmarks/load.py` defines them:
    ttft     from the arrival of a request to its first token
    tpot     from its first to its last token, by the number of tokens but one
    itl      between two tokens of a request
    e2e      from the arrival of a request to its end
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import Ended, EndReason, Events, IntArray

_BINS_PER_E = 200
_BINS = 31 * _BINS_PER_E
_MOST_GROUPS = 64

DONE = (EndReason.LENGTH, EndReason.STOP)

REFUSED = "refused: "
"""Begins the name of an end of a request that the core did not take; the reason follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a figure is spread, milliseconds; None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Histogram:
    """Counts of durations in whole microseconds, from 1 to e^31 of them."""

    def __init__(self) -> None:
        self._counts: IntArray = np.zeros(_BINS, np.int64)
        self._sum = 0
        self._most = 0
        self.count = 0

    def add(self, micros: int, times: int = 1) -> None:
        """Counts one duration, `times` times."""
        place = int(math.log(micros) * _BINS_PER_E) if micros > 1 else 0
        self._counts[min(place, _BINS - 1)] += times
        self._sum += micros * times
        self._most = max(self._most, micros)
        self.count += times

    def add_many(self, micros: IntArray) -> None:
        """Counts durations; fast where they are few different ones, as gaps of one step are."""
        first = int(micros[0])
        if (micros == first).all():
            self.add(first, micros.size)
            return
        values, counts = np.unique(micros, return_counts=True)
        for value, times in zip(values.tolist(), counts.tolist(), strict=True):
            self.add(value, times)

    def merge(self, other: "Histogram") -> None:
        """Counts all of the other's durations too."""
        self._counts += other._counts
        self._sum += other._sum
        self._most = max(self._most, other._most)
        self.count += other.count

    def spread(self) -> Spread:
        """Mean and maximum are exact, the rest to half a per cent."""
        if not self.count:
            return Spread()
        totals = np.cumsum(self._counts)
        p50, p90, p99 = (self._quantile(totals, share) for share in (0.5, 0.9, 0.99))
        return Spread(
            mean=self._sum / self.count / 1000,
            p50=p50,
            p90=p90,
            p99=p99,
            max=self._most / 1000,
        )

    def _quantile(self, totals: IntArray, share: float) -> float:
        place = int(np.searchsorted(totals, math.ceil(share * self.count)))
        middle = math.exp((place + 0.5) / _BINS_PER_E)
        return float(min(middle, self._most)) / 1000


@dataclass(slots=True, kw_only=True)
class Group:
    """Requests of one class and tenant."""

    name: str
    completed: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)


class Figures:
    """Takes what a simulation does, request by request and step by step."""

    def __init__(self) -> None:
        size = 1024
        self._came: IntArray = np.zeros(size, np.int64)
        self._first: IntArray = np.zeros(size, np.int64)
        self._last: IntArray = np.zeros(size, np.int64)
        self._live: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._group: list[Group | None] = [None] * size
        self._free: list[int] = list(range(size - 1, -1, -1))
        self.groups: dict[str, Group] = {}
        self.all = Group(name="all")
        self.itl = Histogram()
        self.arrived = 0
        self.ends: dict[str, int] = {}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.most_live = 0

    @property
    def live(self) -> int:
        """Requests that have come and not ended."""
        return self._came.size - len(self._free)

    def arrive(self, now: int, group: str) -> int:
        """A request comes; returns its handle, which is used again once it has ended."""
        if not self._free:
            self._grow()
        handle = self._free.pop()
        self._came[handle] = now
        self._first[handle] = -1
        self._live[handle] = True
        self._group[handle] = self._group_of(group)
        self.arrived += 1
        self.most_live = max(self.most_live, self.live)
        return handle

    def refused(self, handle: int, reason: str) -> None:
        """The core did not take it."""
        self._drop(handle, f"{REFUSED}{reason}")

    def take(self, events: Events, now: int) -> int:
        """Tokens and ends that came at `now`; returns the number of ends."""
        handles = events.handles
        if handles.size:
            first = self._first[handles]
            fresh = first < 0
            if fresh.any():
                self._first[handles[fresh]] = now
                older = handles[~fresh]
                if older.size:
                    self.itl.add_many(now - self._last[older])
            else:
                self.itl.add_many(now - self._last[handles])
            self._last[handles] = now
        for end in events.ended:
            self._end(end, now)
        return len(events.ended)

    def is_live(self, handle: int, came: int) -> bool:
        """Whether the request that came then under this handle has not ended."""
        return bool(self._live[handle]) and int(self._came[handle]) == came

    def _end(self, end: Ended, now: int) -> None:
        handle = end.handle
        came, first = int(self._came[handle]), int(self._first[handle])
        tokens = end.completion_tokens
        self.prompt_tokens += end.prompt_tokens
        self.output_tokens += tokens
        self.cached_tokens += end.cached_tokens
        self.recomputed_tokens += end.recomputed_tokens
        self.preemptions += end.preemptions
        own = self._group[handle]
        for group in (self.all,) if own is None else (self.all, own):
            group.output_tokens += tokens
            if first >= 0:
                group.ttft.add(first - came)
            if end.reason in DONE:
                group.completed += 1
                group.e2e.add(now - came)
                if tokens > 1:
                    group.tpot.add(round((int(self._last[handle]) - first) / (tokens - 1)))
        self._drop(handle, end.reason.value)

    def _drop(self, handle: int, reason: str) -> None:
        self.ends[reason] = self.ends.get(reason, 0) + 1
        self._live[handle] = False
        self._group[handle] = None
        self._free.append(handle)

    def _group_of(self, name: str) -> Group | None:
        if not name:
            return None
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= _MOST_GROUPS:
                name = "others"
            group = self.groups.setdefault(name, Group(name=name))
        return group

    def _grow(self) -> None:
        size = self._came.size
        self._came = np.concatenate([self._came, np.zeros(size, np.int64)])
        self._first = np.concatenate([self._first, np.zeros(size, np.int64)])
        self._last = np.concatenate([self._last, np.zeros(size, np.int64)])
        self._live = np.concatenate([self._live, np.zeros(size, np.bool_)])
        self._group.extend([None] * size)
        self._free.extend(range(2 * size - 1, size - 1, -1))
