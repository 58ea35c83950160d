"""The tokens of one live request, from the link that receives them to the handler that waits.

Owns everything needed to submit the request again: prompt and all tokens so far. The mailbox is
that list of tokens and how many of them were taken, so deltas merge by themselves and memory is
bounded by the request. Knows no stream, no protobuf and no text.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.chassis.errors import ServiceError, Unavailable
from services.tokenizer.deadline import left_ms, passed
from services.tokenizer.domain import FinishReason, TokenEnd, TokenWork, Usage

_MAX_FRUITLESS_SUBMITS = 5
"""Sessions that may be lost in a row without one token; the request may be what ends them."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What is new; `end` after the last tokens."""

    ids: Sequence[int]
    end: TokenEnd | None


class StreamOwner(Protocol):
    """The link, as a stream sees it."""

    def finish(self, stream: "TokenStream", kept_tokens: int) -> bool:
        """Tells the scheduler that the answer is whole; False where it cannot be told."""
        ...

    def forget(self, stream: "TokenStream") -> None:
        """Lets go of a stream whose handler is done, and aborts it if it still runs."""
        ...


class SubmissionObserver(Protocol):
    """Told of each submission of one request."""

    def submitted(self, scheduler: str, attempt: int, tokens: int, why: str) -> None:
        """It was.

        Args:
            scheduler: its address.
            attempt: of the caller and ours.
            tokens: of the answer so far.
            why: "new", "refused" elsewhere, or "lost" with a session.
        """
        ...


class TokenStream:
    """One request. Made by the link; used by one handler, which must `close` it.

    Args:
        work: as the handler wants it.
        owner: told of the end.
        finish_timeout_s: how long the scheduler may take to answer a finish.
    """

    def __init__(self, work: TokenWork, owner: StreamOwner, *, finish_timeout_s: float) -> None:
        self._work = work
        self._owner = owner
        self._finish_timeout_s = finish_timeout_s
        self._tokens = list(work.resumed)
        self._taken = len(self._tokens)
        self._submits = 0
        self._fruitless = 0
        self._tokens_at_submit = len(self._tokens)
        self._end: TokenEnd | None = None
        self._error: ServiceError | None = None
        self._kept: int | None = None
        self._closed = False
        self._news = asyncio.Event()
        self._deadline: float | None = None
        self.stream_id: int | None = None
        self.was_refused = False
        """A scheduler refused it, and it was offered to another one."""
        self.observer: SubmissionObserver | None = None
        self._why = "new"

    # What the handler calls.

    async def next(self) -> TokenDelta:
        """Waits for news: tokens since the call before, or the end.

        Raises:
            ServiceError: the request failed; tokens that came before were given out first.
        """
        while self._taken == len(self._tokens) and self._end is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._wait()
        ids = self._tokens[self._taken :]
        self._taken = len(self._tokens)
        return TokenDelta(ids, self._end)

    def finish(self, kept_tokens: int) -> None:
        """Ends the request, because its text met a stop string; `next` then gives the end.

        Args:
            kept_tokens: output tokens that belong to the answer, resumed ones included.
        """
        if self._end is not None or self._error is not None:
            return
        self._kept = kept_tokens
        if self._owner.finish(self, kept_tokens):
            self._deadline = asyncio.get_running_loop().time() + self._finish_timeout_s
        else:
            self._end_here()

    def close(self) -> None:
        """Lets go of the request, and aborts it if it has not ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._owner.forget(self)

    # What the link calls.

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted from a scheduler."""
        return self._end is not None or self._error is not None

    def refused(self) -> None:
        """The scheduler did not take it: the next one is to check it as a new request."""
        self.was_refused = True
        self._submits -= 1
        self._why = "refused"

    def submission(self, stream_id: int, scheduler: str) -> TokenWork:
        """What to submit now: the request with all tokens and the time left.

        Args:
            stream_id: under which.
            scheduler: address of the one that gets it.
        """
        now = asyncio.get_running_loop().time()
        scheduling = self._work.scheduling
        work = replace(
            self._work,
            attempt=self._work.attempt + self._submits,
            resumed=tuple(self._tokens),
            scheduling=replace(scheduling, deadline_ms=left_ms(self._work.ends_at, now)),
        )
        self._submits += 1
        self._tokens_at_submit = len(self._tokens)
        self.stream_id = stream_id
        if self.observer is not None:
            self.observer.submitted(scheduler, work.attempt, len(self._tokens), self._why)
        return work

    @property
    def work(self) -> TokenWork:
        """The request as the handler wants it."""
        return self._work

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return len(self._tokens)

    @property
    def can_move(self) -> bool:
        """Whether another scheduler may go on with it: more tokens are wanted."""
        return not (self.is_over or self._closed or self._kept is not None)

    def move_to(self, owner: StreamOwner) -> None:
        """Another link carries it from now on, and submits it anew."""
        self._owner = owner
        self.stream_id = None

    def push(self, ids: Sequence[int]) -> None:
        """Takes new tokens; none after `finish`."""
        if self._kept is None:
            self._tokens.extend(ids)
            self._news.set()

    def end_with(self, end: TokenEnd | ServiceError) -> None:
        """Takes the end; the first one counts."""
        if not self.is_over:
            if isinstance(end, TokenEnd):
                self._end = end
            else:
                self._error = end
            self._news.set()

    def lose(self) -> None:
        """The session that carried it is gone; it must be submitted anew unless it `is_over`."""
        self.stream_id = None
        if self._kept is not None:
            self._end_here()
            return
        self._why = "lost"
        progressed = len(self._tokens) > self._tokens_at_submit
        self._fruitless = 0 if progressed else self._fruitless + 1
        if self._fruitless > _MAX_FRUITLESS_SUBMITS:
            lost = f"the scheduler was lost {self._fruitless} times in a row"
            self.end_with(Unavailable(lost, reason="SCHEDULER_LOST"))

    def wait_until(self, deadline: float | None) -> None:
        """How long its handler may wait for a scheduler, in loop time; None without limit."""
        if self._kept is None:
            self._deadline = deadline
            self._news.set()

    async def _wait(self) -> None:
        deadline, ends_at = self._deadline, self._work.ends_at
        limit = _earlier(deadline, ends_at)
        if limit is None:
            await self._news.wait()
            return
        try:
            async with asyncio.timeout_at(limit):
                await self._news.wait()
        except TimeoutError:
            if self.is_over:
                return
            # By which of the two it was: a loop's timer may fire a little before its time.
            late = limit == ends_at
            if not late and self._deadline != deadline:
                return  # a scheduler came meanwhile
            if self._kept is not None:
                self._end_here()
            elif late:
                self.end_with(passed())
            else:
                self.end_with(Unavailable("no scheduler can be reached", reason="NO_SCHEDULER"))

    def _end_here(self) -> None:
        """Ends a finished request without the scheduler's word."""
        usage = Usage(
            prompt_tokens=len(self._work.prompt),
            completion_tokens=self._kept or 0,
            cached_tokens=0,
        )
        self.end_with(TokenEnd(reason=FinishReason.STOP, stop_token_id=None, usage=usage))


def _earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two instants; None is never."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
