"""Many requests at once on the loop, read by a caller in another thread.

Owns how many run at a time and what of them waits for the caller: of each running request one
snapshot, however slowly it is read. Memory is bounded by the requests that run at once.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from quire.answers import CompletionOutput, Delta, Finished, RequestOutput
from quire.client import AsyncClient
from quire.errors import DeadlineExceeded, InvalidRequest, Overloaded
from quire.loop_thread import Job

MOST_AT_ONCE = 256
"""Requests of one call that run at a time."""

_PATIENCE_S = 300.0
"""How long a call goes on asking while all its requests are turned away and none gets a token."""

_LEAST_S = 0.001
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a call.

    Attributes:
        start: asks it, with the seconds it has; None without limit.
        deadline_s: seconds from when it is first asked to its end; None without limit.
        placed: an error of this request as one of the call.
        request_id: the request's name.
        prompt: see RequestOutput.
        prompt_token_ids: see RequestOutput.
    """

    start: Callable[[AsyncClient, float | None], AsyncGenerator[Delta, None]]
    deadline_s: float | None
    placed: Callable[[InvalidRequest], InvalidRequest]
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class _Growing:
    """The answer to one request while it comes."""

    index: int
    ask: Ask
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.finished = delta.finished

    def snapshot(self) -> RequestOutput:
        self.texts = ["".join(self.texts)]
        end = self.finished
        output = CompletionOutput(
            index=0,
            text=self.texts[0],
            token_ids=tuple(self.token_ids),
            finish_reason=None if end is None else end.reason,
            stop_reason=None if end is None else end.stop,
        )
        return RequestOutput(
            index=self.index,
            request_id=self.ask.request_id,
            prompt=self.ask.prompt,
            prompt_token_ids=self.ask.prompt_token_ids,
            outputs=(output,),
            finished=end is not None,
            usage=None if end is None else end.usage,
        )


class Mailbox:
    """From the loop to the caller's thread.

    Args:
        partial: hands out snapshots of answers that have not ended.
    """

    def __init__(self, *, partial: bool) -> None:
        self._partial = partial
        self._changed = threading.Condition()
        # By index, the oldest news first; a request has at most one entry.
        self._news: dict[int, _Growing] = {}

    def put(self, growing: _Growing, delta: Delta) -> None:
        """Takes what is new in an answer; on the loop."""
        with self._changed:
            growing.add(delta)
            if self._partial or growing.finished is not None:
                self._news[growing.index] = growing
                self._changed.notify_all()

    def take(self, job: Job) -> RequestOutput | None:
        """Waits for news of any request of `job`; None when all have ended and were taken.

        Raises:
            BaseException: what the job failed with.
        """
        with self._changed:
            while not self._news and not job.outcome.done():
                self._changed.wait()
            if job.outcome.done() and (error := job.outcome.exception()) is not None:
                raise error
            if not self._news:
                return None
            growing = self._news.pop(next(iter(self._news)))
            output = growing.snapshot()
        if output.finished:
            job.call(growing.taken.set)
        return output

    def wake(self, _: object = None) -> None:
        """Has the caller look again."""
        with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class _Progress:
    """When any request of a call last got tokens, at first when the call began; loop time."""

    last: float
    clock: Callable[[], float]


async def answer_all(client: AsyncClient, asks: Sequence[Ask], mailbox: Mailbox) -> None:
    """Asks all of them, in order and MOST_AT_ONCE at a time, and waits until all were taken.

    Raises:
        QuireError: one failed; the others were cut.
    """
    todo = iter(enumerate(asks))
    clock = asyncio.get_running_loop().time
    progress = _Progress(last=clock(), clock=clock)

    async def take_turns() -> None:
        for index, ask in todo:
            growing = _Growing(index, ask)
            await _answer(client, growing, mailbox, progress)
            await growing.taken.wait()

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(MOST_AT_ONCE, len(asks))):
                tasks.create_task(take_turns())
    except BaseExceptionGroup as group:
        failure = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise failure


async def _answer(
    client: AsyncClient, growing: _Growing, mailbox: Mailbox, progress: _Progress
) -> None:
    ask, clock = growing.ask, progress.clock
    ends_at = None if ask.deadline_s is None else clock() + ask.deadline_s
    while True:
        left_s = None if ends_at is None else max(ends_at - clock(), _LEAST_S)
        try:
            async with contextlib.aclosing(ask.start(client, left_s)) as answer:
                async for delta in answer:
                    progress.last = clock()
                    mailbox.put(growing, delta)
            return
        except InvalidRequest as error:
            raise ask.placed(error) from error
        except Overloaded as error:
            # What was turned away at the door has cost nothing, and there will be room: the
            # requests before it end, be they of this call or of others that use the server.
            if growing.token_ids or error.retry_after_s is None or error.was_shed:
                raise
            if clock() - progress.last > _PATIENCE_S:
                raise
            pause_s = _pause_s(error.retry_after_s)
            if ends_at is not None and clock() + pause_s >= ends_at:
                message = f"it cannot be finished within the time given ({error.message})"
                raise DeadlineExceeded(message, reason=error.reason) from error
        await asyncio.sleep(pause_s)


def _pause_s(retry_after_s: float) -> float:
    """As long as the server says, and not all at the same moment."""
    asked = min(max(retry_after_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
    return asked * random.uniform(1.0, 1.25)
