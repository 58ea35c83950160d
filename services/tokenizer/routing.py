"""Which scheduler gets a request, where there are several: session first, content second.

Among the schedulers that serve and can hold the request:

1. a request of a session goes to the scheduler that had the one before it;
2. else to the one that has the longest prefix of its prompt cached, unless that one is overloaded:
   its outstanding tokens exceed the least busy one's by more than the prefix and SLACK_TOKENS;
3. else to the one with the fewest outstanding tokens, the first one of equals.

A request that is refused is offered to one more; those of a lost scheduler go on at the others.
With one scheduler nothing of this is done.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import grpc

from services.chassis.errors import Overloaded, ServiceError
from services.tokenizer.block_hashes import COMPUTABLE, block_hashes, held_blocks, salt_of
from services.tokenizer.domain import Limits, TokenWork
from services.tokenizer.session import LinkCounts, LinkState, SchedulerLink
from services.tokenizer.session_call import LinkOptions
from services.tokenizer.token_stream import TokenStream

SLACK_TOKENS = 2048
"""Outstanding tokens by which a holder of a prefix may exceed the least busy one in any case."""

MOST_BLOCKS = 1024
"""Blocks of a prompt that are hashed to find who holds it; one or two milliseconds."""

MOST_SESSIONS = 65_536
"""Sessions whose scheduler is remembered; the ones used longest ago are forgotten first."""

_OFFERED_AGAIN = frozenset(
    code.value[0] for code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
)


class Router:
    """Keeps a link with each scheduler and gives every request to one of them.

    Args:
        options: one for each scheduler, the one to prefer among equals first.
        on_serving: told whether requests can be served: some scheduler does.
    """

    def __init__(
        self, options: Sequence[LinkOptions], on_serving: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._on_serving = on_serving
        self._stopping = False
        self._sessions: OrderedDict[tuple[str, str], SchedulerLink] = OrderedDict()
        self._merged: tuple[tuple[Limits, ...], Limits] | None = None
        if len(options) == 1:
            self._links: tuple[SchedulerLink, ...] = (SchedulerLink(options[0], on_serving),)
        else:
            self._links = tuple(
                SchedulerLink(
                    replace(one, wants_load=True),
                    functools.partial(self._changed, index),
                    elsewhere=self,
                )
                for index, one in enumerate(options)
            )

    @property
    def limits(self) -> Limits | None:
        """The widest of what the schedulers can serve; None while none is known."""
        if len(self._links) == 1:
            return self._links[0].limits
        known = tuple(link.limits for link in self._links if link.matches and link.limits)
        if not known:
            return None
        if self._merged is None or self._merged[0] != known:
            self._merged = (known, _widest(known))
        return self._merged[1]

    @property
    def counts(self) -> LinkCounts:
        """How many requests are held, on all links."""
        counts = [link.counts for link in self._links]
        return LinkCounts(
            live=sum(one.live for one in counts),
            unsent=sum(one.unsent for one in counts),
            on_session=sum(one.on_session for one in counts),
        )

    @property
    def states(self) -> list[LinkState]:
        """Where the link with each scheduler stands."""
        return [link.state for link in self._links]

    async def run(self) -> None:
        """Keeps all links up until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run())

    def stop(self) -> None:
        """Asks `run` to say goodbye to all and return."""
        self._stopping = True
        for link in self._links:
            link.stop()

    def fail_all(self, error: ServiceError) -> None:
        """Ends every live request with `error`."""
        for link in self._links:
            link.fail_all(error)

    def open(self, work: TokenWork) -> TokenStream:
        """Takes a request, for the scheduler that suits it best.

        Raises:
            Overloaded: too many requests wait to be submitted already, everywhere.
        """
        if len(self._links) == 1:
            return self._links[0].open(work)
        best = self._choose(work, self._serving()) or self._best_of_the_unready()
        others = sorted(
            (link for link in self._links if link.serves and link is not best), key=_outstanding
        )
        full: Overloaded | None = None
        for link in (best, *others):
            try:
                stream = link.open(work)
            except Overloaded as error:
                full = full or error
                continue
            self._remember(work, link)
            return stream
        assert full is not None
        raise full

    # What the links call.

    def take_over(self, link: SchedulerLink, streams: Iterable[TokenStream]) -> None:
        """See Elsewhere."""
        for stream in list(streams):
            if stream.can_move and not self._stopping:
                self._move(stream, link)

    def refused(self, link: SchedulerLink, stream: TokenStream, code: int) -> bool:
        """See Elsewhere."""
        if code not in _OFFERED_AGAIN or stream.was_refused or not stream.can_move:
            return False
        # Elsewhere its time to the first token would be counted from the beginning.
        if stream.work.scheduling.shed_late and code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
            return False
        stream.refused()
        return not self._stopping and self._move(stream, link)

    async def _changed(self, index: int, _serving: bool) -> None:
        """A link serves from now on, or no longer: requests go where they are served."""
        for link in self._links:
            if not link.serves:
                self.take_over(link, link.unsent)
        await self._on_serving(any(link.serves for link in self._links))

    # The choice.

    def _move(self, stream: TokenStream, away_from: SchedulerLink) -> bool:
        """Gives a stream to another scheduler that serves, if there is one."""
        serving = [link for link in self._serving() if link is not away_from]
        able = [link for link in serving if _fits(stream.work, link.limits, stream.num_tokens)]
        link = self._choose(stream.work, able)
        if link is None:
            return False
        away_from.release(stream)
        link.adopt(stream)
        self._remember(stream.work, link)
        return True

    def _serving(self) -> list[SchedulerLink]:
        return [link for link in self._links if link.serves]

    def _choose(self, work: TokenWork, serving: list[SchedulerLink]) -> SchedulerLink | None:
        # One without workers still queues, but others need not wait for any.
        links = [link for link in serving if link.limits is not None] or serving
        # Where none can hold it, the one that gets it says what its limit is.
        links = [link for link in links if _fits(work, link.limits)] or links
        if len(links) < 2:
            return links[0] if links else None
        known = self._sessions.get(_session(work))
        if known in links:
            return known
        least = min(links, key=_outstanding)
        held = _held_tokens(work, links)
        by_content = sorted(held, key=lambda link: (-held[link], _outstanding(link)))
        for link in by_content:
            if _outstanding(link) <= _outstanding(least) + held[link] + SLACK_TOKENS:
                return link
        return least

    def _best_of_the_unready(self) -> SchedulerLink:
        """Where a request waits while nobody serves: at a scheduler that can be reached, if any."""
        return next((link for link in self._links if link.has_session), self._links[0])

    def _remember(self, work: TokenWork, link: SchedulerLink) -> None:
        key = _session(work)
        if not key[1]:
            return
        self._sessions[key] = link
        self._sessions.move_to_end(key)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)


def _session(work: TokenWork) -> tuple[str, str]:
    return work.scheduling.tenant, work.scheduling.session_id


def _outstanding(link: SchedulerLink) -> int:
    return link.load.outstanding_tokens


def _held_tokens(work: TokenWork, links: Sequence[SchedulerLink]) -> dict[SchedulerLink, int]:
    """Tokens of the prompt that each scheduler seems to have cached; only those with some."""
    held: dict[SchedulerLink, int] = {}
    if work.scheduling.skip_reading_prefix_cache:
        return held
    kinds: dict[tuple[int, str], list[SchedulerLink]] = {}
    for link in links:
        limits = link.limits
        if limits is None or limits.prefix_hash not in COMPUTABLE or link.load.prefixes is None:
            continue
        kinds.setdefault((limits.block_size, limits.model_digest), []).append(link)
    for (block_size, digest), alike in kinds.items():
        hashes = block_hashes(
            work.prompt,
            block_size=block_size,
            model_digest=digest,
            salt=salt_of(work.scheduling),
            most=MOST_BLOCKS,
        )
        sets = [link.load.prefixes for link in alike if link.load.prefixes is not None]
        for link, blocks in zip(alike, held_blocks(hashes, sets), strict=True):
            if blocks:
                held[link] = blocks * block_size
    return held


def _fits(work: TokenWork, limits: Limits | None, made: int = 0) -> bool:
    """Whether a scheduler's workers can hold a request, as far as is known.

    Args:
        work: the request.
        limits: of the scheduler.
        made: tokens of its answer so far.
    """
    if limits is None:
        return True
    size = len(work.prompt) + max(work.max_tokens or 0, made + 1)
    # The last token is never computed, so it needs no place in the cache.
    return size <= min(limits.max_model_len, limits.kv_capacity_tokens + 1)


def _widest(known: Sequence[Limits]) -> Limits:
    """What at least one of them can serve; each request goes to one that can."""
    return replace(
        known[0],
        vocab_size=max(limits.vocab_size for limits in known),
        max_model_len=max(limits.max_model_len for limits in known),
        kv_capacity_tokens=max(limits.kv_capacity_tokens for limits in known),
        eos_token_ids=frozenset().union(*(limits.eos_token_ids for limits in known)),
        num_workers=sum(limits.num_workers for limits in known),
    )
