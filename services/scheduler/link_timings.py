"""How the time of a worker's recent steps was spent. Owns a bounded window of samples per link."""

from collections import deque
from dataclasses import dataclass

import numpy as np

_WINDOW = 1024
"""Steps the figures are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """What the worker measured for one step, microseconds."""

    wait_us: int
    execute_us: int
    idle_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """Percentiles over the last `steps` steps, microseconds; see `LinkTimings` in info.proto."""

    steps: int
    link_us_p50: int
    link_us_p99: int
    execute_us_p50: int
    execute_us_p99: int
    idle_us_p50: int


class TimingWindow:
    """Collects the samples of one link."""

    def __init__(self) -> None:
        self._sent: deque[int] = deque()  # as many as steps are open
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)

    @property
    def oldest_open(self) -> int | None:
        """When the oldest step without an answer was sent, microseconds; None without one."""
        return self._sent[0] if self._sent else None

    def sent(self, now: int) -> None:
        """A step was handed to the link."""
        self._sent.append(now)

    def answered(self, timings: StepTimings, now: int) -> None:
        """The oldest step sent was answered."""
        link = now - self._sent.popleft() - timings.wait_us - timings.execute_us
        self._samples.append((max(link, 0), timings.execute_us, timings.idle_us))

    def summary(self) -> LinkTimings | None:
        """The figures now, or None before the first answer."""
        if not self._samples:
            return None
        p50, p99 = np.percentile(np.array(self._samples), (50, 99), axis=0)
        return LinkTimings(
            steps=len(self._samples),
            link_us_p50=int(p50[0]),
            link_us_p99=int(p99[0]),
            execute_us_p50=int(p50[1]),
            execute_us_p99=int(p99[1]),
            idle_us_p50=int(p50[2]),
        )
