"""Synthetic loads: lengths, times, classes and shared prefixes drawn from a seed."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.simulate.load import Arrival

_BATCH = 1024
"""Requests drawn at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens.

    Args:
        mean: of all; the length of each where `sigma` is 0.
        sigma: of the logarithm of a log-normal distribution; 0: all are equal.
        most: longer ones are cut to this; None: 8 times the mean.
    """

    mean: int
    sigma: float = 0.0
    most: int | None = None

    @property
    def longest(self) -> int:
        """No length is above this."""
        if not self.sigma:
            return self.mean
        return 8 * self.mean if self.most is None else self.most

    def draw(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """int64 [count], each at least 1."""
        if not self.sigma:
            return np.full(count, self.mean, np.int64)
        # The mean of a log-normal distribution is exp(mu + sigma² / 2).
        mu = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(generator.lognormal(mu, self.sigma, count)).astype(np.int64)
        return np.clip(drawn, 1, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to draw.

    Args:
        requests: how many; None: without end.
        prompt: lengths of prompts.
        output: lengths of outputs.
        bound_output: the bound that each request carries is the longest output, not its own.
        rate: arrivals per second, Poisson; None: all come at time 0 (for closed loops).
        shared_tokens: leading tokens of the prompts that share a beginning.
        shared: of the requests, how many share it, 0 to 1.
        prefixes: how many different beginnings there are.
        classes: names of classes, each as often as the others; () for none.
        tenants: names of tenants, each as often as the others; () for none.
        cancelled: of the requests, how many go away early, 0 to 1.
        cancel_after_us: the mean time after which they do, exponential.
        seed: decides all of it.
    """

    requests: int | None
    prompt: Lengths
    output: Lengths
    bound_output: bool = False
    rate: float | None = None
    shared_tokens: int = 0
    shared: float = 0.0
    prefixes: int = 1
    classes: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    cancelled: float = 0.0
    cancel_after_us: int = 1_000_000
    seed: int = 0

    @property
    def longest(self) -> int:
        """Most tokens in all that a request of it may reach."""
        return self.prompt.longest + self.output.longest


def arrivals(load: Load) -> Iterator[Arrival]:
    """The requests of a load, drawn as they are taken."""
    drawn = _without_end(load)
    return drawn if load.requests is None else itertools.islice(drawn, load.requests)


def _without_end(load: Load) -> Iterator[Arrival]:
    generator = np.random.default_rng(load.seed)
    now = 0.0
    while True:
        prompts = load.prompt.draw(generator, _BATCH).tolist()
        outputs = load.output.draw(generator, _BATCH).tolist()
        gaps = (generator.exponential(1e6, _BATCH) / (load.rate or 1.0)).tolist()
        kinds = generator.random((_BATCH, 5))
        patience = generator.exponential(load.cancel_after_us, _BATCH)
        for place, prompt in enumerate(prompts):
            shares, prefix, of_class, tenant, goes = kinds[place].tolist()
            now += gaps[place] if load.rate is not None else 0.0
            session = f"prefix {int(prefix * load.prefixes)}" if shares < load.shared else ""
            yield Arrival(
                at_us=int(now),
                prompt_tokens=prompt,
                output_tokens=outputs[place],
                max_tokens=load.output.longest if load.bound_output else None,
                priority_class=_one_of(load.classes, of_class),
                tenant=_one_of(load.tenants, tenant),
                session=session,
                shared_tokens=load.shared_tokens if session else None,
                cancel_after_us=1 + int(patience[place]) if goes < load.cancelled else None,
            )


def _one_of(names: tuple[str, ...], share: float) -> str:
    return names[int(share * len(names))] if names else ""
