"""A scheduler as a tokenizer sees it: serves Session, and does what a test tells it to.

Decides nothing. A test takes submits as they come, emits tokens, ends requests, withholds credits,
says goodbye or drops the stream.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2

from quire.v1 import generation_pb2, token_pb2, token_pb2_grpc
from services.chassis.channel import SERVER_OPTIONS


def packed(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    column = array("I")
    column.frombytes(data)
    return column.tolist()


def default_limits() -> token_pb2.ModelLimits:
    return token_pb2.ModelLimits(
        model="tiny",
        vocab_size=1024,
        max_model_len=256,
        kv_capacity_tokens=4096,
        eos_token_ids=[2],
        num_workers=1,
    )


@dataclass
class FakeSession:
    """One stream of one tokenizer."""

    hello: token_pb2.Hello
    aborts: list[int] = field(default_factory=list)
    finishes: list[tuple[int, int]] = field(default_factory=list)
    said_goodbye: bool = False
    # None closes the stream without goodbye.
    outbox: asyncio.Queue[token_pb2.SessionResponse | None] = field(default_factory=asyncio.Queue)

    def send(self, **message: object) -> None:
        self.outbox.put_nowait(token_pb2.SessionResponse(**message))

    def say_goodbye(self, reason: str = "scheduler stops") -> None:
        self.send(bye=token_pb2.Bye(reason=reason))
        self.outbox.put_nowait(None)

    def drop(self) -> None:
        """Ends the stream without a goodbye."""
        self.outbox.put_nowait(None)


@dataclass
class Submission:
    """A request that was submitted, and what the test does with it."""

    session: FakeSession
    stream_id: int
    request: token_pb2.TokenRequest

    @property
    def prompt(self) -> list[int]:
        return unpacked(self.request.prompt.packed)

    @property
    def resumed(self) -> list[int]:
        return unpacked(self.request.resumed.packed)

    def batch(self, *rows: Sequence[int], end: token_pb2.StreamEnd | None = None) -> None:
        """One message with one row for each list of ids."""
        self.session.send(
            batch=token_pb2.TokenBatch(
                stream_ids=packed([self.stream_id] * len(rows)),
                counts=packed(map(len, rows)),
                token_ids=packed(token for row in rows for token in row),
                ends=[end] if end else [],
            )
        )

    def emit(self, *ids: int) -> None:
        self.batch(ids)

    def finished(
        self,
        reason: int = generation_pb2.FINISH_REASON_LENGTH,
        *,
        stop_token_id: int | None = None,
        completion: int = 0,
        cached: int = 0,
    ) -> token_pb2.StreamEnd:
        usage = generation_pb2.Usage(
            prompt_tokens=len(self.prompt), completion_tokens=completion, cached_tokens=cached
        )
        end = token_pb2.TokenFinished(reason=reason, stop_token_id=stop_token_id, usage=usage)
        return token_pb2.StreamEnd(stream_id=self.stream_id, finished=end)

    def end(self, *ids: int, **kwargs: object) -> None:
        """The last tokens and the end, in one message."""
        self.batch(*([ids] if ids else []), end=self.finished(**kwargs))

    def fail(self, code: grpc.StatusCode, message: str, *details: any_pb2.Any) -> None:
        status = status_pb2.Status(code=code.value[0], message=message, details=details)
        self.batch(end=token_pb2.StreamEnd(stream_id=self.stream_id, status=status))


class FakeScheduler(token_pb2_grpc.TokenServiceServicer):
    """Serves on `address`; may be stopped and started again, as a process may.

    Args:
        address: a unix:/// address.
        credits: of the Welcome.
        gives_credits: whether each Submit's credit is given back at once.
        limits: of the Welcome; None for no worker.
        autopilot: called with each submission instead of queueing it.
    """

    def __init__(
        self,
        address: str,
        *,
        credits: int = 64,
        gives_credits: bool = True,
        limits: token_pb2.ModelLimits | None = None,
        autopilot: Callable[[Submission], Awaitable[None]] | None = None,
    ) -> None:
        self.address = address
        self.credits = credits
        self.gives_credits = gives_credits
        self.limits = limits
        self.autopilot = autopilot
        self.protocol_major = 1
        self.welcomes = True
        self.sessions: list[FakeSession] = []
        self.submissions: asyncio.Queue[Submission] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        token_pb2_grpc.add_TokenServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    @property
    def runs(self) -> bool:
        return self._server is not None

    async def die(self) -> None:
        """Ends as a killed process does: every stream is cut."""
        assert self._server is not None
        await self._server.stop(None)
        self._server = None

    async def next_submission(self) -> Submission:
        return await asyncio.wait_for(self.submissions.get(), 20)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something that tokenizers tell us makes `condition` true."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(condition)

    @property
    def session(self) -> FakeSession:
        """The newest session."""
        return self.sessions[-1]

    async def Session(
        self,
        request_iterator: AsyncIterator[token_pb2.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[token_pb2.SessionResponse]:
        first = await anext(request_iterator)
        if not self.welcomes:
            await anext(request_iterator, None)
            return
        session = FakeSession(hello=first.hello)
        yield token_pb2.SessionResponse(
            welcome=token_pb2.Welcome(
                credits=self.credits, limits=self.limits, protocol_major=self.protocol_major
            )
        )
        async with self._changed:
            self.sessions.append(session)
            self._changed.notify_all()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(session, request_iterator))
            try:
                while (message := await session.outbox.get()) is not None:
                    yield message
            finally:
                reader.cancel()

    async def _read(
        self, session: FakeSession, requests: AsyncIterator[token_pb2.SessionRequest]
    ) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    await self._take(session, message.submit)
                case "abort":
                    session.aborts.append(message.abort.stream_id)
                case "finish":
                    session.finishes.append((message.finish.stream_id, message.finish.kept_tokens))
                case "bye":
                    session.said_goodbye = True
            async with self._changed:
                self._changed.notify_all()
        session.drop()

    async def _take(self, session: FakeSession, submit: token_pb2.Submit) -> None:
        submission = Submission(session, submit.stream_id, submit.request)
        if self.gives_credits:
            session.send(batch=token_pb2.TokenBatch(credits=1))
        if self.autopilot is not None:
            await self.autopilot(submission)
        else:
            self.submissions.put_nowait(submission)
