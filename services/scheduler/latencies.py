"""How long requests waited that ended lately. Owns bounded windows of samples, one per class."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.plan import Ended

_WINDOW_US = 30_000_000
"""How long a request counts after its end."""

_MOST = 1024
"""Requests that count at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Percentiles over requests, microseconds; see `Latencies` in info.proto."""

    requests: int
    ttft_us_p50: int
    ttft_us_p95: int
    tpot_requests: int
    tpot_us_p50: int
    tpot_us_p95: int


class LatencyWindow:
    """Collects the samples of one scheduler."""

    def __init__(self) -> None:
        self._all = _Samples()
        self._classes: dict[str, _Samples] = {}  # as many as the configuration has

    def ended(self, end: Ended) -> None:
        """A request ended. One whose first token came to an earlier attempt has no sample."""
        if end.first_token is None:
            return
        ttft = end.first_token - end.arrived
        later = end.completion_tokens - 1
        tpot = (end.ended - end.first_token) / later if later > 0 else None
        self._all.add(end.ended, ttft, tpot)
        if end.class_name not in self._classes:
            self._classes[end.class_name] = _Samples()
        self._classes[end.class_name].add(end.ended, ttft, tpot)

    def summary(self, now: int, class_name: str | None = None) -> Latencies | None:
        """The figures of all requests or of one class; None where none ended lately.

        Args:
            now: on the clock of the core, microseconds.
            class_name: None: all.
        """
        samples = self._all if class_name is None else self._classes.get(class_name)
        return None if samples is None else samples.summary(now)


class _Samples:
    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, float | None]] = deque(maxlen=_MOST)

    def add(self, ended: int, ttft: int, tpot: float | None) -> None:
        self._samples.append((ended, ttft, tpot))

    def summary(self, now: int) -> Latencies | None:
        while self._samples and self._samples[0][0] < now - _WINDOW_US:
            self._samples.popleft()
        if not self._samples:
            return None
        tpots = [tpot for _, _, tpot in self._samples if tpot is not None]
        ttft_p50, ttft_p95 = _p50_p95([ttft for _, ttft, _ in self._samples])
        tpot_p50, tpot_p95 = _p50_p95(tpots)
        return Latencies(
            requests=len(self._samples),
            ttft_us_p50=ttft_p50,
            ttft_us_p95=ttft_p95,
            tpot_requests=len(tpots),
            tpot_us_p50=tpot_p50,
            tpot_us_p95=tpot_p95,
        )


def _p50_p95(values: list[int] | list[float]) -> tuple[int, int]:
    """The two percentiles; 0 without values."""
    if not values:
        return 0, 0
    p50, p95 = np.percentile(values, (50, 95))
    return int(p50), int(p95)
