"""Every door a request can enter by, behind one function: `send`.

What holds for every answer is asserted here, so that no test can forget it: the form of the stream,
the text against an independent decode, the same answer to the same request whatever the door or the
neighbours, and an end in time.
"""

import asyncio
import contextlib
import enum
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.v1 import generation_pb2, text_pb2, token_pb2
from tests.behaviour.stack import Stack
from tests.behaviour.text_rule import expected_text

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


class Way(enum.Enum):
    """A door, and the form of its answer where it has two."""

    GENERATE_STREAM = "generate-stream"
    GENERATE_UNARY = "generate-unary"
    CHAT_STREAM = "chat-stream"
    CHAT_UNARY = "chat-unary"
    TOKENS = "tokens"
    SESSION = "session"

    @property
    def is_text(self) -> bool:
        """Whether it answers in text."""
        return self not in TOKEN_WAYS

    @property
    def is_chat(self) -> bool:
        """Whether it takes a conversation."""
        return self in CHAT_WAYS

    @property
    def streams(self) -> bool:
        """Whether deltas come one by one."""
        return self not in (Way.GENERATE_UNARY, Way.CHAT_UNARY)


TOKEN_WAYS = (Way.TOKENS, Way.SESSION)
CHAT_WAYS = (Way.CHAT_STREAM, Way.CHAT_UNARY)
GENERATE_WAYS = (Way.GENERATE_STREAM, Way.GENERATE_UNARY)
TEXT_WAYS = (*GENERATE_WAYS, *CHAT_WAYS)
ALL_WAYS = (*TEXT_WAYS, *TOKEN_WAYS)
NOT_CHAT_WAYS = (*GENERATE_WAYS, *TOKEN_WAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, whatever the door. A text prompt is encoded for the token doors.

    Attributes:
        messages: contents of the conversation where it is not the one message `prompt`.
        scheduling: fields of SchedulingOptions with their values; no answer depends on them.
        deadline_s: of the call.
    """

    prompt: str | tuple[int, ...]
    messages: tuple[str, ...] | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool | None = None
    scheduling: tuple[tuple[str, Any], ...] = ()
    deadline_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    deltas: tuple[str, ...]
    token_ids: tuple[int, ...]
    reason: str
    stop_string: str | None
    stop_token_id: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.deltas)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must be the same whenever the same is asked."""
        return (self.token_ids, self.reason, self.stop_string, self.stop_token_id)


class Refused(Exception):
    """A call that ended in a status.

    Attributes:
        code: of the status.
        message: of the status.
        reason: ErrorInfo's, or "".
        numbers: ErrorInfo's metadata.
        field: the first one BadRequest names, or "".
        fields: all that it names.
        parts: messages that came before it.
    """

    def __init__(self, status: status_pb2.Status, parts: int) -> None:
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        super().__init__(f"{code.name}: {status.message}")
        self.code = code
        self.message = status.message
        self.parts = parts
        self.reason, self.field = "", ""
        self.fields: tuple[str, ...] = ()
        self.numbers: dict[str, int] = {}
        for detail in status.details:
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            if detail.Unpack(info):
                self.reason = info.reason
                self.numbers = {name: int(value) for name, value in info.metadata.items()}
            if detail.Unpack(bad):
                self.fields = tuple(violation.field for violation in bad.field_violations)
                self.field = self.fields[0]


@dataclass(slots=True)
class _Part:
    """One message of an answer, in the words of no door."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    opening: tuple[str, int | None] | None = None
    end: Any = None


async def send(
    stack: Stack, way: Way, ask: Ask, *, first_token: asyncio.Event | None = None
) -> Answer:
    """Sends `ask` and checks the answer as far as it can be checked without knowing it.

    Args:
        stack: where to.
        way: by which door.
        ask: what.
        first_token: set when the first ids have come.

    Raises:
        Refused: the call ended in a status.
    """
    parts: list[_Part] = []
    try:
        # No hang: every call ends within its deadline and a second.
        async with asyncio.timeout(ask.deadline_s + 1):
            async for part in messages(stack, way, ask):
                parts.append(part)
                if part.token_ids and first_token is not None:
                    first_token.set()
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error) or status_pb2.Status(
            code=error.code().value[0], message=error.details() or ""
        )
        raise Refused(status, len(parts)) from error
    answer = _joined(parts, way)
    if way.is_text:
        context = () if way.is_chat else _prompt_ids(stack, ask)
        assert answer.text == expected_text(stack.encoding, ask, answer, context)
    _recall(stack, way, ask, answer)
    return answer


def messages(stack: Stack, way: Way, ask: Ask) -> AsyncIterator[_Part]:
    """The messages of the answer as they come; leaving them ends the call."""
    if way is Way.TOKENS:
        return _by_tokens(stack, ask)
    if way is Way.SESSION:
        return _by_session(stack, ask)
    return _by_text(stack, way, ask)


def stopping(ask: Ask) -> generation_pb2.StoppingCriteria:
    """The message of the same name."""
    return generation_pb2.StoppingCriteria(
        max_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos, stop_token_ids=ask.stop_token_ids
    )


def scheduling(ask: Ask) -> generation_pb2.SchedulingOptions | None:
    """The message of the same name; None where nothing is asked for."""
    return generation_pb2.SchedulingOptions(**dict(ask.scheduling)) if ask.scheduling else None


def token_request(stack: Stack, ask: Ask, request_id: str = "") -> token_pb2.TokenRequest:
    """The message of the same name."""
    assert not ask.stops
    return token_pb2.TokenRequest(
        request_id=request_id,
        prompt=generation_pb2.TokenIds(ids=_prompt_ids(stack, ask)),
        sampling=generation_pb2.SamplingParams(temperature=ask.temperature, seed=ask.seed),
        stopping=stopping(ask),
        scheduling=scheduling(ask),
    )


async def _by_text(stack: Stack, way: Way, ask: Ask) -> AsyncIterator[_Part]:
    common: dict[str, Any] = {
        "sampling": generation_pb2.SamplingParams(temperature=ask.temperature, seed=ask.seed),
        "stopping": stopping(ask),
        "scheduling": scheduling(ask),
        "stop_strings": ask.stops,
        "output": text_pb2.OutputOptions(
            stream=way.streams,
            return_token_ids=True,
            include_stop_str_in_output=ask.include_stop,
            skip_special_tokens=ask.skip_special,
        ),
    }
    if way.is_chat:
        contents = (ask.prompt,) if ask.messages is None else ask.messages
        turns = [text_pb2.ChatMessage(role="user", content=content) for content in contents]
        call = stack.text.Chat(
            text_pb2.ChatRequest(messages=turns, **common), timeout=ask.deadline_s
        )
    else:
        prompt: dict[str, Any] = {"text": ask.prompt}
        if not isinstance(ask.prompt, str):
            prompt = {"token_ids": generation_pb2.TokenIds(ids=ask.prompt)}
        call = stack.text.Generate(
            text_pb2.GenerateRequest(**prompt, **common), timeout=ask.deadline_s
        )
    with _cancelling(call):
        async for message in call:
            yield _Part(
                text=message.text,
                token_ids=list(message.token_ids),
                opening=_opening(message),
                end=message.finished if message.HasField("finished") else None,
            )


async def _by_tokens(stack: Stack, ask: Ask) -> AsyncIterator[_Part]:
    request = token_pb2.TokenServiceGenerateRequest(request=token_request(stack, ask))
    call = stack.tokens.Generate(request, timeout=ask.deadline_s)
    with _cancelling(call):
        async for message in call:
            yield _Part(
                token_ids=list(message.token_ids),
                opening=_opening(message),
                end=message.finished if message.HasField("finished") else None,
            )


async def _by_session(stack: Stack, ask: Ask) -> AsyncIterator[_Part]:
    async with session(stack, deadline_s=ask.deadline_s) as line:
        request_id = uuid.uuid4().hex
        await line.submit(1, token_request(stack, ask, request_id))
        part = _Part(opening=(request_id, ask.seed))
        while part.end is None:
            for _, token_ids, end in await line.batch():
                part.token_ids.extend(token_ids)
                if isinstance(end, status_pb2.Status):
                    raise Refused(end, 0 if part.opening else 1)
                part.end = end
            if part.token_ids or part.end is not None:
                yield part
                if part.end is None:
                    part = _Part()


class Session:
    """A tokenizer's end of one Session, by hand. Use `session()`."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def submit(self, stream_id: int, request: token_pb2.TokenRequest) -> None:
        """A new request."""
        submit = token_pb2.Submit(stream_id=stream_id, request=request)
        await self._call.write(token_pb2.SessionRequest(submit=submit))

    async def abort(self, stream_id: int) -> None:
        """Its answer is not wanted any more."""
        abort = token_pb2.Abort(stream_id=stream_id)
        await self._call.write(token_pb2.SessionRequest(abort=abort))

    async def finish(self, stream_id: int, kept_tokens: int) -> None:
        """Its answer is whole."""
        finish = token_pb2.Finish(stream_id=stream_id, kept_tokens=kept_tokens)
        await self._call.write(token_pb2.SessionRequest(finish=finish))

    async def batch(self) -> list[tuple[int, list[int], Any]]:
        """Stream id, new ids and the end (or its status, or None), of the next batch."""
        message = await self._call.read()
        assert message is not grpc.aio.EOF, "the scheduler ended the session"
        if message.WhichOneof("message") != "batch":
            return []
        batch = message.batch
        streams, counts = _column(batch.stream_ids), _column(batch.counts)
        ids = _column(batch.token_ids)
        news: list[tuple[int, list[int], Any]] = []
        for stream, count in zip(streams, counts, strict=True):
            news.append((stream, ids[:count], None))
            ids = ids[count:]
        assert not ids
        ends = [(end.stream_id, getattr(end, end.WhichOneof("end"))) for end in batch.ends]
        return [*news, *((stream, [], end) for stream, end in ends)]


@contextlib.asynccontextmanager
async def session(stack: Stack, *, deadline_s: float = 20.0) -> AsyncIterator[Session]:
    """Opens a session; one left in order says Bye, any other is cut."""
    call = stack.tokens.Session(timeout=deadline_s)
    with _cancelling(call):
        hello = token_pb2.Hello(instance_id="by-hand", tokenizer_digest="-", protocol_major=1)
        await call.write(token_pb2.SessionRequest(hello=hello))
        welcome = await call.read()
        assert welcome is not grpc.aio.EOF
        assert welcome.WhichOneof("message") == "welcome"
        yield Session(call)
        await call.write(token_pb2.SessionRequest(bye=token_pb2.Bye(reason="done")))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK


@contextlib.contextmanager
def _cancelling(call: Any) -> Any:
    """Leaving it early ends the call, as a client that goes away does."""
    try:
        yield
    finally:
        call.cancel()


def _joined(parts: Sequence[_Part], way: Way) -> Answer:
    """Checks the form of the stream: one opening, first; one end, last; no empty message."""
    assert parts, "the stream was empty"
    assert [part.end is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.opening is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert all(part.text or part.token_ids for part in parts[:-1]), "an empty message"
    assert way.streams or len(parts) == 1, "more than one message without streaming"
    end, opening = parts[-1].end, parts[0].opening
    assert opening is not None
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    stop_string = stop_token_id = None
    if isinstance(end, text_pb2.Finished):
        stop_string = end.stop_string if end.HasField("stop_string") else None
    if end.HasField("stop_token_id"):
        stop_token_id = end.stop_token_id
    reason = _REASONS[end.reason]
    assert (reason == "stop") == (stop_string is not None or stop_token_id is not None)
    assert end.usage.completion_tokens == len(token_ids)
    for part in parts:
        part.text.encode("utf-8", "strict")  # raises on a lone surrogate
    return Answer(
        deltas=tuple(part.text for part in parts if part.text),
        token_ids=token_ids,
        reason=reason,
        stop_string=stop_string,
        stop_token_id=stop_token_id,
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=end.usage.completion_tokens,
        cached_tokens=end.usage.cached_tokens,
        seed=opening[1],
    )


def _recall(stack: Stack, way: Way, ask: Ask, answer: Answer) -> None:
    """The same request gives the same answer, in both forms, at any time, beside any neighbour."""
    if ask.temperature and ask.seed is None:
        return
    # Chat renders another prompt, and the token doors show no text.
    key = (way.is_chat, replace(ask, deadline_s=0.0, scheduling=()))
    before = stack.answers.setdefault(key, answer)
    assert answer.outcome == before.outcome, "the same request got another answer"
    text_key = (*key, "text")
    if way.is_text:
        assert answer.text == stack.answers.setdefault(text_key, answer.text)


def _prompt_ids(stack: Stack, ask: Ask) -> tuple[int, ...]:
    return stack.prompt_ids(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt


def _opening(message: Any) -> tuple[str, int | None] | None:
    if not message.request_id:
        assert not message.HasField("seed")
        return None
    assert message.HasField("seed")
    return message.request_id, message.seed


def _column(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()
