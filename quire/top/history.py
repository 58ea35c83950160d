"""The last samples of each scheduler, and what follows from how they change: rates and curves.

Knows nothing of gRPC and of terminals, and reads no clock.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quire.top.sample import Sample, Worker

MOST_SAMPLES = 240
"""Samples kept of one scheduler; more than most screens have columns for."""

_RATE_OVER_US = 2_000_000
"""Rates are over at least so long, where samples reach back so far."""

Curve = tuple[float | None, ...]
"""One value for each question, the latest last; None where there was none to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRates:
    """How one worker fared since an earlier sample; None: not known, e.g. no step was answered.

    Args:
        busy: share of the time that it computed, 0 to 1.
        tokens_per_step: mean.
        steps_per_s: answered ones.
    """

    busy: float | None = None
    tokens_per_step: float | None = None
    steps_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is known of one scheduler.

    Args:
        target: its address.
        sample: the latest; None: it has not answered yet.
        problem: why it did not answer when it was asked last; "": it did.
        silent_s: for how long it has not answered, seconds.
        per_s: growth of each counter per second, `accepted` and `ended` among them; empty before
            the second sample.
        hit_share: tokens found in the prefix cache of those looked up, 0 to 1; None without any.
        workers: rates by worker id.
        curves: "prompt" and "generation" in tokens per second, "ttft" and "tpot" medians in
            microseconds.
    """

    target: str
    sample: Sample | None = None
    problem: str = ""
    silent_s: float = 0.0
    per_s: Mapping[str, float] = field(default_factory=dict)
    hit_share: float | None = None
    workers: Mapping[str, WorkerRates] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)


class History:
    """Collects what one scheduler says.

    Args:
        target: its address.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._curves: dict[str, deque[float | None]] = {
            name: deque(maxlen=MOST_SAMPLES) for name in _CURVES
        }
        self._problem = ""
        self._silent_since: float | None = None

    def answered(self, sample: Sample) -> None:
        """It answered. One that was started again since counts from zero."""
        if self._samples and sample.uptime_us < self._samples[-1].uptime_us:
            self._samples.clear()
        before = self._samples[-1] if self._samples else sample
        for name, curve in self._curves.items():
            curve.append(_CURVES[name](before, sample))
        self._samples.append(sample)
        self._problem, self._silent_since = "", None

    def failed(self, problem: str, now: float) -> None:
        """It did not answer; `now` in seconds on any clock."""
        for curve in self._curves.values():
            curve.append(None)
        self._problem = problem
        if self._silent_since is None:
            self._silent_since = now

    def seen(self, now: float) -> Seen:
        """What is known; `now` on the clock of `failed`."""
        silent_s = 0.0 if self._silent_since is None else now - self._silent_since
        if not self._samples:
            return Seen(target=self.target, problem=self._problem, silent_s=silent_s)
        last = self._samples[-1]
        before = self._before()
        return Seen(
            target=self.target,
            sample=last,
            problem=self._problem,
            silent_s=silent_s,
            per_s=_growth_per_s(before, last),
            hit_share=_hit_share(before, last),
            workers=_worker_rates(before, last),
            curves={name: tuple(curve) for name, curve in self._curves.items()},
        )

    def _before(self) -> Sample:
        """The sample that rates are taken from."""
        last = self._samples[-1]
        for sample in reversed(self._samples):
            if last.uptime_us - sample.uptime_us >= _RATE_OVER_US:
                return sample
        return self._samples[0]


def _rate(counter: str) -> Callable[[Sample, Sample], float | None]:
    return lambda before, after: _per_s(
        before.counters[counter], after.counters[counter], before, after
    )


def _per_s(before: int, after: int, earlier: Sample, later: Sample) -> float | None:
    elapsed_us = later.uptime_us - earlier.uptime_us
    return (after - before) * 1e6 / elapsed_us if elapsed_us > 0 else None


def _growth_per_s(before: Sample, last: Sample) -> Mapping[str, float]:
    def totals(sample: Sample) -> dict[str, int]:
        return {**sample.counters, "accepted": sample.accepted, "ended": sample.ended}

    earlier, later = totals(before), totals(last)
    rates = {name: _per_s(earlier[name], later[name], before, last) for name in later}
    return MappingProxyType({name: rate for name, rate in rates.items() if rate is not None})


def _hit_share(before: Sample, last: Sample) -> float | None:
    asked = last.counters["prefix_query_tokens"] - before.counters["prefix_query_tokens"]
    found = last.counters["prefix_hit_tokens"] - before.counters["prefix_hit_tokens"]
    return found / asked if asked else None


def _worker_rates(before: Sample, last: Sample) -> Mapping[str, WorkerRates]:
    earlier = {(one.worker_id, one.epoch): one for one in before.workers}
    elapsed_us = last.uptime_us - before.uptime_us
    rates = {}
    for worker in last.workers:
        was = earlier.get((worker.worker_id, worker.epoch))
        if was is not None and elapsed_us > 0:
            rates[worker.worker_id] = _rates_of(was, worker, elapsed_us)
    return MappingProxyType(rates)


def _rates_of(before: Worker, after: Worker, elapsed_us: int) -> WorkerRates:
    steps = _answered(after) - _answered(before)
    tokens = after.computed_tokens - before.computed_tokens
    # A step counts when it is answered, so that a long one may seem longer than the time between.
    busy = min((after.execute_us - before.execute_us) / elapsed_us, 1.0)
    return WorkerRates(
        busy=busy,
        tokens_per_step=tokens / steps if steps else None,
        steps_per_s=steps * 1e6 / elapsed_us,
    )


def _answered(worker: Worker) -> int:
    return worker.steps - worker.steps_in_flight


def _ttft(_: Sample, sample: Sample) -> float | None:
    return None if sample.latencies is None else sample.latencies.ttft_us_p50


def _tpot(_: Sample, sample: Sample) -> float | None:
    latencies = sample.latencies
    return None if latencies is None or not latencies.tpot_requests else latencies.tpot_us_p50


_CURVES: Mapping[str, Callable[[Sample, Sample], float | None]] = MappingProxyType(
    {
        "prompt": _rate("prompt_tokens"),
        "generation": _rate("generation_tokens"),
        "ttft": _ttft,
        "tpot": _tpot,
    }
)
"""What each curve is of, from a sample and the one before it."""
