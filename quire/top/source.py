"""Asks schedulers how they are, over and over. Owns the connections; draws nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from quire.errors import NotSupported, QuireError
from quire.statuses import error_of
from quire.top.codec import sample_of, shown
from quire.top.history import History, Seen
from quire.top.sample import Sample
from quire.v1 import info_pb2, info_pb2_grpc

_ANSWER_WITHIN_S = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class Source:
    """One scheduler.

    Args:
        target: its address.
        channel: to it; the caller closes it.
    """

    def __init__(self, target: str, channel: grpc.aio.Channel) -> None:
        self.target = target
        self._info: Any = info_pb2_grpc.InfoServiceStub(channel)

    async def ask(self) -> Sample:
        """How it is now.

        Raises:
            QuireError: it does not answer within 5 s, or serves no facts.
        """
        try:
            answer = await self._info.GetLoads(info_pb2.GetLoadsRequest(), timeout=_ANSWER_WITHIN_S)
        except grpc.aio.AioRpcError as error:
            problem = error_of(error, self.target, service="info service")
            if isinstance(problem, NotSupported):
                raise NotSupported(f"{problem.message}; a scheduler has one") from error
            raise problem from error
        return sample_of(answer)


@contextlib.asynccontextmanager
async def sources(targets: Sequence[str]) -> AsyncIterator[tuple[Source, ...]]:
    """The schedulers at these addresses, whether they answer or not."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            )
            for target in targets
        ]
        yield tuple(Source(*pair) for pair in zip(targets, channels, strict=True))


class Watch:
    """Keeps a history of each scheduler.

    Args:
        fleet: whom to ask.
    """

    def __init__(self, fleet: Sequence[Source]) -> None:
        self._fleet = tuple(fleet)
        self._histories = tuple(History(source.target) for source in fleet)
        self.problems: dict[str, QuireError] = {}
        """Why those do not answer that did not when they were asked last, by address."""

    def seen(self) -> tuple[Seen, ...]:
        """What is known now."""
        return tuple(history.seen(time.monotonic()) for history in self._histories)

    async def once(self) -> None:
        """Asks each of them, side by side."""
        async with asyncio.TaskGroup() as tasks:
            for source, history in zip(self._fleet, self._histories, strict=True):
                tasks.create_task(self._ask(source, history))

    async def run(self, interval_s: float, on_news: Callable[[], None]) -> None:
        """Asks each of them every `interval_s` seconds, for ever; who is slow delays nobody else.

        Args:
            interval_s: from one question to the next.
            on_news: called after each answer, and after each one that failed to come.
        """

        async def ask_on(source: Source, history: History) -> None:
            clock = asyncio.get_running_loop().time
            due = clock()
            while True:
                await self._ask(source, history)
                on_news()
                due = max(due + interval_s, clock())
                await asyncio.sleep(due - clock())

        async with asyncio.TaskGroup() as tasks:
            for source, history in zip(self._fleet, self._histories, strict=True):
                tasks.create_task(ask_on(source, history))

    async def _ask(self, source: Source, history: History) -> None:
        try:
            history.answered(await source.ask())
        except QuireError as error:
            self.problems[source.target] = error
            history.failed(shown(error.message), time.monotonic())
        else:
            self.problems.pop(source.target, None)
