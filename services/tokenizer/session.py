"""The link to the scheduler: one session for all requests of this process, a new one when it ends.

Owns the live requests and the order in which they are submitted. When a session is lost, every
live request is submitted again on the next one, with all tokens it has and a higher attempt; its
user sees a pause. Knows neither text nor what a request means.
"""

import asyncio
import logging
import random
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.v1 import token_pb2_grpc
from services.chassis.channel import open_channel
from services.chassis.errors import Overloaded, ServiceError
from services.tokenizer import codec
from services.tokenizer.domain import Limits, TokenWork
from services.tokenizer.scheduler_load import SchedulerLoad
from services.tokenizer.session_call import LinkOptions, SessionCall
from services.tokenizer.token_stream import TokenStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounts:
    """Requests the link holds: all, those not submitted, those on the session."""

    live: int
    unsent: int
    on_session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """Where a link stands.

    Attributes:
        target: address of the scheduler.
        has_session: it is reached.
        serves: it can serve requests.
        sessions: opened so far.
        counts: requests held.
    """

    target: str
    has_session: bool
    serves: bool
    sessions: int
    counts: LinkCounts


class Elsewhere(Protocol):
    """The other schedulers, as a link sees them."""

    def take_over(self, link: "SchedulerLink", streams: Iterable[TokenStream]) -> None:
        """Moves those of the link's streams that another scheduler can serve now."""
        ...

    def refused(self, link: "SchedulerLink", stream: TokenStream, code: int) -> bool:
        """Whether a stream that this scheduler ended with an error was moved to another one."""
        ...


class SchedulerLink:
    """Keeps a session with the scheduler until told to stop, and carries requests over it.

    Args:
        options: where and how.
        on_serving: told whether requests can be served: a session stands, whose scheduler says so.
        elsewhere: the other schedulers, if there are any.
    """

    def __init__(
        self,
        options: LinkOptions,
        on_serving: Callable[[bool], Awaitable[None]],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._options = options
        self._on_serving = on_serving
        self._elsewhere = elsewhere
        self.load = SchedulerLoad()
        self._instance_id = uuid.uuid4().hex
        self._random = random.Random()
        self._stopping = asyncio.Event()
        self._session: SessionCall | None = None
        # In order of arrival, with what the load wants to know at their end.
        self._live: dict[TokenStream, int] = {}
        self._unsent: OrderedDict[TokenStream, None] = OrderedDict()
        self._last_reason = ""
        self._sessions = 0

    @property
    def limits(self) -> Limits | None:
        """What the workers can serve; None while it is not known."""
        return self._session.limits if self._session is not None else None

    @property
    def has_session(self) -> bool:
        """Whether the scheduler is reached."""
        return self._session is not None

    @property
    def serves(self) -> bool:
        """Whether requests can be served now."""
        return self._session is not None and self._session.serving

    @property
    def matches(self) -> bool:
        """Whether the scheduler is reached and its workers serve this model."""
        return self._session is not None and self._session.matches

    @property
    def unsent(self) -> Iterable[TokenStream]:
        """Requests not submitted, in order."""
        return self._unsent.keys()

    @property
    def counts(self) -> LinkCounts:
        """How many requests are held."""
        on_session = len(self._session.streams) if self._session is not None else 0
        return LinkCounts(live=len(self._live), unsent=len(self._unsent), on_session=on_session)

    @property
    def state(self) -> LinkState:
        """Where it stands."""
        return LinkState(
            target=self._options.target,
            has_session=self.has_session,
            serves=self.serves,
            sessions=self._sessions,
            counts=self.counts,
        )

    async def run(self) -> None:
        """Opens a session, and a new one whenever it ends, until `stop`."""
        delay = self._options.first_delay_s
        async with open_channel(self._options.target) as channel:
            stub: Any = token_pb2_grpc.TokenServiceStub(channel)
            while not self._stopping.is_set():
                session = SessionCall(
                    stub.Session(),
                    self._options,
                    self._unsent,
                    on_load=self.load.report,
                    passed_on=self._passed_on,
                )
                reason = await self._hold(session)
                if session.welcomed:
                    delay = self._options.first_delay_s
                self._lose(session, reason)
                await self._pause(delay * self._random.uniform(0.5, 1.0))
                delay = min(delay * 2, self._options.longest_delay_s)

    def stop(self) -> None:
        """Asks `run` to say goodbye and return."""
        self._stopping.set()

    def open(self, work: TokenWork) -> TokenStream:
        """Takes a request; it is submitted as soon as the scheduler gives credit.

        Raises:
            Overloaded: too many requests wait for that already.
        """
        if len(self._unsent) >= self._options.max_unsent:
            raise Overloaded(
                f"{len(self._unsent)} requests wait for the scheduler", reason="TOO_MANY_WAITING"
            )
        stream = TokenStream(work, self, finish_timeout_s=self._options.finish_s)
        if self._session is None:
            loop = asyncio.get_running_loop()
            stream.wait_until(loop.time() + self._options.new_request_s)
        self._take(stream)
        return stream

    def adopt(self, stream: TokenStream) -> None:
        """Takes a live request from another link; the scheduler must be reached."""
        stream.move_to(self)
        stream.wait_until(None)
        self._take(stream)

    def release(self, stream: TokenStream) -> None:
        """Lets go of a live request that another link takes; an ended session carried it, or none,
        or the scheduler has ended it.
        """
        self._unsent.pop(stream, None)
        self._ended(stream)

    def finish(self, stream: TokenStream, kept_tokens: int) -> bool:
        """See StreamOwner."""
        if self._session is None or stream.stream_id is None:
            self._unsent.pop(stream, None)
            return False
        self._session.send(codec.to_finish(stream.stream_id, kept_tokens))
        return True

    def forget(self, stream: TokenStream) -> None:
        """See StreamOwner."""
        self._unsent.pop(stream, None)
        self._ended(stream)
        if self._session is not None and stream.stream_id in self._session.streams:
            del self._session.streams[stream.stream_id]
            self._session.send(codec.to_abort(stream.stream_id))

    def fail_all(self, error: ServiceError) -> None:
        """Ends every live request with `error`."""
        for stream in self._live:
            stream.end_with(error)

    async def _hold(self, session: SessionCall) -> str:
        """Runs one session to its end and says why it ended."""
        async with asyncio.TaskGroup() as tasks:
            reading = session.read(self._instance_id, self._welcomed, self._on_serving)
            running = [
                tasks.create_task(reading),
                tasks.create_task(session.write()),
                tasks.create_task(session.leave_on(self._stopping)),
            ]
            try:
                return await session.ended
            finally:
                for task in running:
                    task.cancel()
                session.call.cancel()

    def _welcomed(self, session: SessionCall) -> None:
        self._session = session
        self._sessions += 1
        for stream in self._live:
            stream.wait_until(None)
        self._last_reason = ""
        target = self._options.target
        log.info("session with the scheduler at %s, %d credits", target, session.credits)

    def _lose(self, session: SessionCall, reason: str) -> None:
        """Takes back what a session carried; all of it is to be submitted anew."""
        if session is self._session:
            self._session = None
        loop = asyncio.get_running_loop()
        if session.welcomed:
            for stream in self._unsent:
                stream.wait_until(loop.time() + self._options.new_request_s)
            for stream in self._live:
                if stream.stream_id is not None and not stream.is_over:
                    stream.lose()
                    stream.wait_until(loop.time() + self._options.lost_request_s)
            in_order = [stream for stream in self._live if not stream.is_over]
            self._unsent.clear()
            self._unsent.update(dict.fromkeys(in_order))
            self.load.forget()
            if self._elsewhere is not None:
                self._elsewhere.take_over(self, in_order)
        if reason != self._last_reason and not self._stopping.is_set():
            self._last_reason = reason
            target, waiting = self._options.target, len(self._unsent)
            log.warning(
                "no session with the scheduler at %s: %s; %d requests wait", target, reason, waiting
            )

    async def _pause(self, seconds: float) -> None:
        await self._on_serving(False)
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _take(self, stream: TokenStream) -> None:
        self._live[stream] = self.load.opened(len(stream.work.prompt))
        self._unsent[stream] = None
        if self._session is not None:
            self._session.wake()

    def _ended(self, stream: TokenStream) -> None:
        opened = self._live.pop(stream, None)
        if opened is not None:
            self.load.ended(opened, len(stream.work.prompt))

    def _passed_on(self, stream: TokenStream, code: int) -> bool:
        return self._elsewhere is not None and self._elsewhere.refused(self, stream, code)
