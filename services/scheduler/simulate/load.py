"""Who asks for what and when: an arrival, its tokens, and the sources that a simulation has."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.scheduler.core.plan import AddRequest, Sampling, TokenArray
from services.scheduler.hashing import tenant_salt
from services.scheduler.simulate.step_model import VOCAB_SIZE

_BUFFER_TOKENS = 1 << 22
_STRIDE = 1_000_003  # odd and prime to the number of places, so that neighbours lie far apart
_FIRST_TOKEN = 10  # those below are special

_NO_TOKENS: TokenArray = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request to come.

    Args:
        at_us: when, microseconds since the start; in closed loops not before.
        prompt_tokens: at least 1.
        output_tokens: what the model would say, at least 1.
        max_tokens: the bound that the request carries, at least `output_tokens`; None: the same.
        priority_class: name of its class, or "".
        tenant: whom it is for, or "".
        session: requests of one name have the same beginning, or "" for none.
        shared_tokens: how long that beginning is at most; None: the whole prompt, as when each is a
            longer turn of one conversation.
        cancel_after_us: the client goes away then; None: never.
    """

    at_us: int = 0
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    priority_class: str = ""
    tenant: str = ""
    session: str = ""
    shared_tokens: int | None = None
    cancel_after_us: int | None = None


class Source(Protocol):
    """Where a simulation takes its arrivals from."""

    def next_at(self) -> int | None:
        """When the next one comes; None: none before another request ends, or none any more."""

    def take(self, now: int) -> Arrival:
        """The next one."""

    def ended(self, now: int) -> None:
        """A request has ended, or was refused."""


class OpenLoop:
    """Arrivals at their own times, which must not fall."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = iter(arrivals)
        self._next = next(self._arrivals, None)

    def next_at(self) -> int | None:
        """See Source."""
        return None if self._next is None else self._next.at_us

    def take(self, now: int) -> Arrival:
        """See Source."""
        del now
        arrival = self._next
        assert arrival is not None, "no arrival is left"
        self._next = next(self._arrivals, None)
        return arrival

    def ended(self, now: int) -> None:
        """See Source."""


class ClosedLoop:
    """A fixed number of clients, each sending its next request when one ended.

    Args:
        arrivals: taken in order, by whichever client is free; a client waits for `at_us`.
        concurrency: clients.
    """

    def __init__(self, arrivals: Iterable[Arrival], concurrency: int) -> None:
        self._open = OpenLoop(arrivals)
        self._free: deque[int] = deque([0] * concurrency)

    def next_at(self) -> int | None:
        """See Source."""
        due = self._open.next_at()
        if due is None or not self._free:
            return None
        return max(due, self._free[0])

    def take(self, now: int) -> Arrival:
        """See Source."""
        self._free.popleft()
        return self._open.take(now)

    def ended(self, now: int) -> None:
        """See Source."""
        self._free.append(now)


class Prompts:
    """Token ids of prompts, as views of one buffer of random ones: 16 MiB for any number of them.

    Two prompts have a beginning in common only where they are of one session. A prompt is a copy,
    not a view, where it goes on alone after the beginning it shares.

    Args:
        seed: decides the tokens.
        longest: the longest prompt.
    """

    def __init__(self, seed: int, longest: int) -> None:
        draw = np.random.default_rng(seed)
        size = max(_BUFFER_TOKENS, 4 * longest)
        self._buffer: TokenArray = draw.integers(_FIRST_TOKEN, VOCAB_SIZE, size, np.uint32)
        self._buffer.flags.writeable = False
        self._places = size - longest
        self._next = 0
        self._sessions: dict[str, int] = {}

    def of(self, arrival: Arrival) -> TokenArray:
        """uint32 [prompt_tokens], read-only."""
        size = arrival.prompt_tokens
        if not arrival.session:
            return self._at(self._place(), size)
        start = self._sessions.get(arrival.session)
        if start is None:
            start = self._sessions[arrival.session] = self._place()
        shared = size if arrival.shared_tokens is None else min(arrival.shared_tokens, size)
        if shared == size:
            return self._at(start, size)
        own = self._at(self._place(), size - shared)
        return np.concatenate([self._at(start, shared), own])

    def _place(self) -> int:
        self._next += 1
        return self._next * _STRIDE % self._places

    def _at(self, start: int, size: int) -> TokenArray:
        return self._buffer[start : start + size]


class RequestMaker:
    """Makes the core's requests of arrivals; what they have in common is made once.

    Args:
        prompts: gives the tokens.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._sampling: dict[int, Sampling] = {}
        self._count = 0

    def make(self, arrival: Arrival, handle: int) -> AddRequest:
        """The request, with an id of its own."""
        output = arrival.output_tokens
        most = output if arrival.max_tokens is None else arrival.max_tokens
        sampling = self._sampling.get(output)
        if sampling is None:
            sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=output)
            self._sampling[output] = sampling
        self._count += 1
        return AddRequest(
            request_id=f"r{self._count}",
            handle=handle,
            attempt=0,
            prompt=self._prompts.of(arrival),
            resumed=_NO_TOKENS,
            max_tokens=most,
            ignore_eos=most == output,
            sampling=sampling,
            salt=tenant_salt(arrival.tenant),
            priority_class=arrival.priority_class,
            tenant=arrival.tenant,
        )
