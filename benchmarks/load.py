"""A closed-loop load: a fixed number of streams, each sending its next request when one ended.

Owns the clock and the arithmetic of the figures; knows nothing of how they are shown.

Figures, all times in milliseconds:
    ttft     from sending a request to its first token
    tpot     from its first to its last token, by the number of tokens but one
    itl      between two messages with tokens (a message may carry several)
    latency  from sending a request to its end
"""

import asyncio
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.client import AsyncClient
from quire.errors import QuireError
from quire.params import SamplingParams, Scheduling

_QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send.

    Attributes:
        concurrency: streams at a time.
        requests: in all, warm-up excluded.
        warmup: requests before, not measured.
        input_len: tokens of each prompt.
        output_len: most tokens of each answer.
        ignore_eos: whether every answer has `output_len` tokens.
        temperature: 0 is greedy.
        seed: decides the prompts.
        scheduling: of every request.
    """

    concurrency: int
    requests: int
    warmup: int
    input_len: int
    output_len: int
    ignore_eos: bool
    temperature: float
    seed: int
    scheduling: Scheduling = field(default_factory=Scheduling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured request; times in seconds on one clock.

    Attributes:
        sent: when it was sent.
        arrivals: when each message with tokens came.
        ended: when the stream ended.
        tokens: that came.
        error: why it failed, or "".
    """

    sent: float
    arrivals: tuple[float, ...]
    ended: float
    tokens: int
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per token after the first; needs two."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between messages."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a figure is spread over the requests, milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one load gave.

    Attributes:
        load: what was sent.
        duration_s: from the first request sent to the last one ended.
        completed: requests that ended well.
        failed: the others.
        errors: up to five different reasons.
        input_tokens: of completed requests.
        output_tokens: of completed requests.
        requests_per_s: completed ones.
        output_tokens_per_s: of completed requests.
        total_tokens_per_s: input and output, of completed requests.
        ttft_ms: see the module.
        tpot_ms: see the module.
        itl_ms: see the module.
        latency_ms: see the module.
    """

    load: Load
    duration_s: float
    completed: int
    failed: int
    errors: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    latency_ms: Spread

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def prompts(load: Load, vocab_size: int, avoid: Collection[int]) -> Iterator[list[int]]:
    """Endless different prompts, the same for the same load; no two share a beginning.

    Args:
        load: gives their length and the seed.
        vocab_size: ids are below it.
        avoid: ids that must not occur, e.g. those that end an answer.
    """
    draw = random.Random(f"{load.seed}/{load.concurrency}/{load.input_len}")
    allowed = [token_id for token_id in range(vocab_size) if token_id not in avoid]
    while True:
        yield draw.choices(allowed, k=load.input_len)


async def run_load(client: AsyncClient, load: Load, source: Iterator[Sequence[int]]) -> Figures:
    """Warms up, sends the load, and returns the figures.

    Args:
        client: whom to send it to.
        load: what to send.
        source: prompts; one is taken per request, warm-up included.
    """
    short = SamplingParams(max_tokens=min(load.output_len, 8), temperature=0.0, ignore_eos=True)
    await _closed_loop(client, load, [next(source) for _ in range(load.warmup)], short)
    params = SamplingParams(
        max_tokens=load.output_len,
        temperature=load.temperature,
        ignore_eos=load.ignore_eos,
        seed=load.seed,
    )
    measured = [next(source) for _ in range(load.requests)]
    return figures(load, await _closed_loop(client, load, measured, params))


def figures(load: Load, samples: Sequence[Sample]) -> Figures:
    """The figures of measured requests."""
    good = [sample for sample in samples if not sample.error]
    duration = max(s.ended for s in samples) - min(s.sent for s in samples)
    answered = [sample for sample in good if sample.arrivals]
    input_tokens = load.input_len * len(good)
    output_tokens = sum(sample.tokens for sample in good)
    reasons = dict.fromkeys(sample.error for sample in samples if sample.error)
    return Figures(
        load=load,
        duration_s=duration,
        completed=len(good),
        failed=len(samples) - len(good),
        errors=tuple(reasons)[:5],
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(input_tokens + output_tokens) / duration,
        ttft_ms=_spread([sample.ttft for sample in answered]),
        tpot_ms=_spread([sample.tpot for sample in answered if sample.tokens > 1]),
        itl_ms=_spread([gap for sample in answered for gap in sample.gaps]),
        latency_ms=_spread([sample.ended - sample.sent for sample in good]),
    )


def quantile(values: Sequence[float], percent: float) -> float:
    """A percentile of at least one value, with linear interpolation between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


async def _closed_loop(
    client: AsyncClient, load: Load, requests: Sequence[Sequence[int]], params: SamplingParams
) -> list[Sample]:
    samples: list[Sample] = []
    waiting = iter(requests)

    async def stream() -> None:
        samples.extend(
            [await _measured(client, prompt, params, load.scheduling) for prompt in waiting]
        )

    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.concurrency):
            tasks.create_task(stream())
    return samples


async def _measured(
    client: AsyncClient, prompt: Sequence[int], params: SamplingParams, scheduling: Scheduling
) -> Sample:
    clock = time.perf_counter
    arrivals: list[float] = []
    tokens = 0
    error = ""
    sent = clock()
    try:
        async for delta in client.generate(prompt, params, scheduling=scheduling):
            if delta.token_ids:
                arrivals.append(clock())
                tokens += len(delta.token_ids)
    except QuireError as failure:
        error = failure.message
    return Sample(sent=sent, arrivals=tuple(arrivals), ended=clock(), tokens=tokens, error=error)


def _spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread(mean=None, p50=None, p90=None, p99=None)
    p50, p90, p99 = (quantile(seconds, percent) * 1000 for percent in _QUANTILES)
    return Spread(mean=sum(seconds) / len(seconds) * 1000, p50=p50, p90=p90, p99=p99)
