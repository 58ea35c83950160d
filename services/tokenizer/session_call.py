"""One Session call with the scheduler, from Hello to its end.

Owns the stream, its credits, and which request has which stream id on it. Always reads: news go to
the requests' mailboxes and nothing waits for a handler; one writer writes. What comes before and
after a call is not its business but `session`'s.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import status_pb2

from quire.v1 import token_pb2
from services.chassis.channel import MAX_MESSAGE_BYTES
from services.chassis.errors import FailedPrecondition, Internal, InvalidArgument, RemoteError
from services.chassis.logs import told
from services.tokenizer import codec
from services.tokenizer.domain import Limits, LoadReport, TokenEnd
from services.tokenizer.packing import unpack_ids
from services.tokenizer.token_stream import TokenStream

log = logging.getLogger(__name__)

# grpc's stubs make the call generic; at run time it is a plain class.
_Call = Any

_SUBMIT_OVERHEAD_BYTES = 1024
_ERROR_CODES = frozenset(code.value[0] for code in grpc.StatusCode) - {0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Where the scheduler is, who we are, and how long to wait; times in seconds.

    Attributes:
        target: address of the scheduler.
        tokenizer_digest: sha256 of the tokenizer files, hex.
        model: name that is served here.
        max_unsent: requests that may wait to be submitted.
        new_request_s: how long a new request waits for a scheduler to be reached.
        lost_request_s: how long one waits whose session was lost.
        welcome_s: how long the scheduler may take to accept a session.
        finish_s: how long it may take to answer a finish.
        goodbye_s: how long it may take to answer our goodbye.
        first_delay_s: pause before dialling again, doubled each time.
        longest_delay_s: where doubling ends.
        wants_load: whether the scheduler is to tell how busy it is.
    """

    target: str
    tokenizer_digest: str
    model: str
    max_unsent: int = 1024
    new_request_s: float = 5.0
    lost_request_s: float = 30.0
    welcome_s: float = 5.0
    finish_s: float = 5.0
    goodbye_s: float = 2.0
    first_delay_s: float = 0.05
    longest_delay_s: float = 1.0
    wants_load: bool = False


class SessionCall:
    """One stream. `ended` gets the first reason for its end; later ones are consequences.

    Args:
        call: as the stub made it.
        options: who we are, and how long to wait.
        unsent: requests to submit, first ones first; what is submitted leaves it.
        on_load: told how busy the scheduler is, where `options` want that.
        passed_on: asked about each request that the scheduler ends with an error, with the
            status code: whether another scheduler has it now.
    """

    def __init__(
        self,
        call: _Call,
        options: LinkOptions,
        unsent: OrderedDict[TokenStream, None],
        *,
        on_load: Callable[[LoadReport], None],
        passed_on: Callable[[TokenStream, int], bool],
    ) -> None:
        self.call = call
        self.limits: Limits | None = None
        self.credits = 0
        self.welcomed = False
        self._mismatch: FailedPrecondition | None = None
        self._scheduler_serves = False
        self.streams: dict[int, TokenStream] = {}
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._options = options
        self._unsent = unsent
        self._on_load = on_load
        self._passed_on = passed_on
        # Bounded: at most a finish and an abort for each submitted request, and a goodbye.
        self._outbox: deque[token_pb2.SessionRequest] = deque()
        self._work = asyncio.Event()
        self._last_id = 0
        self._left = False
        self._said_goodbye = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether requests can be served now: the scheduler says so, and serves this model."""
        return self._scheduler_serves and self.matches

    @property
    def matches(self) -> bool:
        """Whether the workers serve this model, as far as is known."""
        return self._mismatch is None

    def send(self, message: token_pb2.SessionRequest) -> None:
        """Queues a message that needs no credit."""
        self._outbox.append(message)
        self._work.set()

    def wake(self) -> None:
        """Says that there is a request to submit."""
        self._work.set()

    async def read(
        self,
        instance_id: str,
        on_welcome: Callable[["SessionCall"], None],
        on_serving: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Introduces us, then takes whatever comes until the stream ends.

        Args:
            instance_id: of this process.
            on_welcome: called once, when the session stands.
            on_serving: told whether requests can be served, then and whenever that changes.
        """
        try:
            async with asyncio.timeout(self._options.welcome_s):
                await self.call.write(
                    codec.to_hello(
                        instance_id,
                        self._options.tokenizer_digest,
                        wants_load=self._options.wants_load,
                    )
                )
                self._take_welcome(await self.call.read())
            on_welcome(self)
            await on_serving(self.serving)
            self._work.set()
            while (message := await self.call.read()) is not grpc.aio.EOF:
                if message.HasField("bye"):
                    await self._answer_goodbye()
                    self._end(f"it said goodbye: {told(message.bye.reason)}")
                    return
                before = self.serving
                self._take(message)
                if self.serving != before:
                    await on_serving(self.serving)
            self._end("it ended the stream without goodbye")
        except TimeoutError:
            self._end(f"it did not accept the session within {self._options.welcome_s:g} s")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._end(await self._status())
        except ValueError as error:
            self._end(f"protocol violation: {error}")

    async def write(self) -> None:
        """Writes what is queued, and submits requests while there are credits."""
        while True:
            message = self._next_message()
            if message is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                await self.call.write(message)
                if message.HasField("bye"):
                    await self.call.done_writing()
                    self._said_goodbye.set()
                    return
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self._said_goodbye.set()
                return  # the reader learns why

    async def leave_on(self, stopping: asyncio.Event) -> None:
        """Once `stopping` is set: says goodbye, and ends in any case."""
        await stopping.wait()
        if self.welcomed:
            self._leave("tokenizer stops")
            await asyncio.sleep(self._options.goodbye_s)
        self._end("stopped")

    def _next_message(self) -> token_pb2.SessionRequest | None:
        if self._outbox:
            return self._outbox.popleft()
        while self.welcomed and not self._left and self.credits > 0 and self._unsent:
            stream, _ = self._unsent.popitem(last=False)
            if stream.is_over:
                continue
            if self._mismatch is not None:
                stream.end_with(self._mismatch)
                continue
            work = stream.submission(self._last_id + 1, self._options.target)
            message = codec.to_submit(self._last_id + 1, work)
            size = message.ByteSize()
            if size > MAX_MESSAGE_BYTES - _SUBMIT_OVERHEAD_BYTES:
                # Writing it would end the session, and everybody's requests with it.
                stream.stream_id = None
                stream.end_with(InvalidArgument("prompt", f"is too large to pass on: {size} bytes"))
                continue
            self._last_id += 1
            self.credits -= 1
            self.streams[self._last_id] = stream
            return message
        return None

    def _take_welcome(self, message: Any) -> None:
        if message is grpc.aio.EOF or message.WhichOneof("message") != "welcome":
            raise ValueError("it did not begin with Welcome")
        welcome = message.welcome
        if welcome.protocol_major != codec.PROTOCOL_MAJOR:
            raise ValueError(
                f"it speaks protocol {welcome.protocol_major}, we speak {codec.PROTOCOL_MAJOR}"
            )
        self.credits = welcome.credits
        self.welcomed = True
        self._scheduler_serves = not welcome.HasField("readiness") or welcome.readiness.serving
        if welcome.HasField("limits"):
            self._take_limits(welcome.limits)

    def _take(self, message: token_pb2.SessionResponse) -> None:
        match message.WhichOneof("message"):
            case "batch":
                self._take_batch(message.batch)
            case "limits":
                self._take_limits(message.limits)
            case "readiness":
                self._scheduler_serves = message.readiness.serving
            case "load":
                self._on_load(codec.load_from_proto(message.load))
            case other:
                raise ValueError(f"unexpected {other or 'empty message'}")

    def _take_limits(self, limits: token_pb2.ModelLimits) -> None:
        self.limits = codec.limits_from_proto(limits)
        own = self._options.model
        if not limits.model or limits.model == own:
            self._mismatch = None
            return
        log.error("the scheduler serves %r, this tokenizer is for %r", limits.model, own)
        # Its tokens would be nonsense to that model, and would not look like an error.
        self._mismatch = FailedPrecondition(
            f"this tokenizer is for the model {own!r}, the workers serve {limits.model!r}",
            reason="MODEL_MISMATCH",
        )
        for stream in self.streams.values():
            stream.end_with(self._mismatch)
        self._work.set()

    def _take_batch(self, batch: token_pb2.TokenBatch) -> None:
        stream_ids, counts = unpack_ids(batch.stream_ids), unpack_ids(batch.counts)
        tokens = unpack_ids(batch.token_ids)
        if len(stream_ids) != len(counts) or sum(counts) != len(tokens):
            raise ValueError("the columns of a batch do not fit together")
        done = 0
        for stream_id, count in zip(stream_ids, counts, strict=True):
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.push(tokens[done : done + count])
            done += count
        for end in batch.ends:
            stream = self.streams.pop(end.stream_id, None)
            if stream is None or (end.status.code and self._passed_on(stream, end.status.code)):
                continue
            _end_stream(stream, end)
        if batch.credits:
            self.credits += batch.credits
            self._work.set()

    def _leave(self, reason: str) -> None:
        if not self._left:
            self._left = True
            self.send(codec.to_bye(reason))

    async def _answer_goodbye(self) -> None:
        """Says goodbye too, unless we did, and waits until it is written."""
        self._leave("the scheduler said goodbye")
        try:
            async with asyncio.timeout(self._options.goodbye_s):
                await self._said_goodbye.wait()
        except TimeoutError:
            return

    async def _status(self) -> str:
        code, details = await self.call.code(), await self.call.details()
        return f"{code.name}: {told(details or 'no details')}"

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


def _end_stream(stream: TokenStream, end: token_pb2.StreamEnd) -> None:
    """Ends a stream; an end that this version does not know is one all the same."""
    known: TokenEnd | RemoteError | None = None
    if end.HasField("finished"):
        known = codec.end_from_proto(end.finished)
    elif end.HasField("status") and end.status.code in _ERROR_CODES:
        status = status_pb2.Status()
        status.CopyFrom(end.status)
        known = RemoteError(status)
    stream.end_with(known or Internal("the scheduler did not say how the request ended"))
