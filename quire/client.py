"""The client: talks to the text door, and goes on where a cut stream ended.

It is the first door of a request: it mints the request id and the seed, so that it can ask for the
same answer again. A stream that is cut after tokens have come is resumed with those tokens: nothing
of it is generated or yielded twice, and the same seed draws the same tokens.
"""

import asyncio
import contextlib
import itertools
import secrets
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import codec
from quire.answers import ChatMessage, Completion, Delta, RenderedChat, ServerInfo
from quire.errors import DeadlineExceeded, InvalidRequest, QuireError, ServerFault, Unavailable
from quire.params import SamplingParams
from quire.statuses import error_of
from quire.v1 import text_pb2, text_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where `quire up` serves."""

TEXT_SERVICE = "quire.v1.TextService"
"""Its name for health checks."""

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Keeps what a slow reader can pile up inside the transport near 100 KB instead of 5 MB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_HEALTH_PAUSE_S = 0.1
_HEALTH_TIMEOUT_S = 5.0


class CallOptions(TypedDict, total=False):
    """Keywords of `AsyncClient.generate` that its one-shot variants take too."""

    request_id: str | None
    deadline_s: float | None
    traceparent: str | None


class AsyncClient:
    """A connection to one server.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for delta in client.generate("Once upon", SamplingParams(max_tokens=20)):
                print(delta.text, end="", flush=True)

    All methods raise the errors of `quire.errors`. Leaving the `async with` cuts what still runs.

    Args:
        target: `host:port` or `unix:///path`.
        resume_tries: how often one cut stream is taken up again; 0 for never.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, resume_tries: int = 6) -> None:
        self.target = target
        self._resume_tries = resume_tries
        self._open_channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        # A channel belongs to the loop it is made on, so it is made here.
        self._open_channel = grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        channel, self._open_channel = self._channel, None
        await channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Completes a prompt; closing the iterator ends the request on the server.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop; absent: as the model's configuration says.
            request_id: unique among live requests, at most 128 bytes; absent: minted.
            deadline_s: when to give up, seconds from now, resumed attempts included.
            traceparent: W3C trace context, passed on as metadata.

        Returns:
            What is new, piece by piece; the last one has `finished` set.
        """
        ask = _Ask.of(params, request_id, deadline_s, traceparent)
        request = codec.generate_request(
            prompt, params or _DEFAULTS, request_id=ask.request_id, seed=ask.seed
        )
        return self._answer(self._text.Generate, request, ask)

    def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Answers a conversation; otherwise like `generate`.

        Args:
            messages: the conversation, as `ChatMessage` or as `{"role": …, "content": …}`.
            params: see `generate`.
            request_id: see `generate`.
            deadline_s: see `generate`.
            traceparent: see `generate`.

        Returns:
            The assistant's turn, piece by piece; the last one has `finished` set.
        """
        ask = _Ask.of(params, request_id, deadline_s, traceparent)
        request = codec.chat_request(
            messages, params or _DEFAULTS, request_id=ask.request_id, seed=ask.seed
        )
        return self._answer(self._text.Chat, request, ask)

    async def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Completes a prompt and returns the whole; see `generate`."""
        return await collect(self.generate(prompt, params, **options))

    async def complete_chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Answers a conversation and returns the whole; see `chat`."""
        return await collect(self.chat(messages, params, **options))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: adds what the tokenizer adds to a prompt, e.g. a BOS.
        """
        request = text_pb2.TokenizeRequest(
            texts=[codec.checked_text(text, "text")], add_special_tokens=add_special_tokens
        )
        response = await self._ask(self._text.Tokenize, request)
        return codec.unpacked(response.results[0])

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids.

        Args:
            token_ids: what to decode.
            skip_special_tokens: leaves special tokens out of the text.
        """
        request = text_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        request.sequences.add(packed=codec.packed(token_ids, field="token_ids"))
        response = await self._ask(self._text.Detokenize, request)
        return str(response.texts[0])

    async def render_chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedChat:
        """A conversation as the model will see it.

        Args:
            messages: see `chat`.
            add_generation_prompt: ends the text with the opening of the assistant's turn.
        """
        request = text_pb2.RenderChatRequest(
            messages=codec.chat_messages(messages), add_generation_prompt=add_generation_prompt
        )
        response = await self._ask(self._text.RenderChat, request)
        return RenderedChat(text=response.text, token_ids=codec.unpacked(response.token_ids))

    async def info(self) -> ServerInfo:
        """What the server serves, and within which limits."""
        return codec.server_info(await self._ask(self._text.GetInfo, text_pb2.GetInfoRequest()))

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the server can serve.

        Raises:
            Unavailable: it could not within `timeout_s` seconds.
        """
        last = "it is not ready"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        if await self.is_ready():
                            return
                        last = "it is not ready"
                    except QuireError as error:
                        last = error.message
                    await asyncio.sleep(_HEALTH_PAUSE_S)
        except TimeoutError:
            message = f"{self.target} was not ready within {timeout_s:g} s ({last})"
            raise Unavailable(message) from None

    async def is_ready(self) -> bool:
        """Whether the server says that it can serve now."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=TEXT_SERVICE)
        response = await self._ask(stub.Check, request, timeout_s=_HEALTH_TIMEOUT_S)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask(self, rpc: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        try:
            return await rpc(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.target) from error

    async def _answer(self, rpc: Any, first: Any, ask: "_Ask") -> AsyncGenerator[Delta, None]:
        """Yields the answer to `first`, through as many calls as it takes."""
        clock = asyncio.get_running_loop().time
        ends_at = None if ask.deadline_s is None else clock() + ask.deadline_s
        received: list[int] = []
        for attempt in itertools.count():
            request = codec.resumed(first, attempt, received) if attempt else first
            timeout_s = None if ends_at is None else max(ends_at - clock(), 0.0)
            call = rpc(request, timeout=timeout_s, metadata=ask.metadata())
            finished = False
            try:
                async for response in call:
                    delta = codec.delta(response, request_id=ask.request_id, seed=ask.seed)
                    received.extend(delta.token_ids)
                    finished = finished or delta.finished is not None
                    yield delta
            except grpc.aio.AioRpcError as error:
                if finished:
                    return
                failure = error_of(error, self.target)
                if not isinstance(failure, Unavailable) or not received:
                    raise failure from error
                if attempt >= self._resume_tries:
                    raise failure from error
            else:
                if finished:
                    return
                raise ServerFault(f"{self.target} ended the answer without saying how it ended")
            finally:
                call.cancel()
            pause_s = _pause_s(failure, attempt)
            if ends_at is not None and clock() + pause_s >= ends_at:
                message = f"{self.target} cannot finish within the time given ({failure.message})"
                raise DeadlineExceeded(message)
            await asyncio.sleep(pause_s)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open_channel is None:
            raise QuireError("the client is not open; use: async with AsyncClient(…) as client")
        return self._open_channel

    @property
    def _text(self) -> Any:
        return text_pb2_grpc.TextServiceStub(self._channel)


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request, whatever the number of its calls."""

    request_id: str
    seed: int
    deadline_s: float | None
    traceparent: str | None

    @classmethod
    def of(
        cls,
        params: SamplingParams | None,
        request_id: str | None,
        deadline_s: float | None,
        traceparent: str | None,
    ) -> "_Ask":
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidRequest("deadline_s", f"must be > 0, got {deadline_s}")
        seed = params.seed if params is not None else None
        return cls(
            request_id or f"q-{uuid.uuid4().hex}",
            # 53 bits: what JSON readers that know only doubles can hold.
            secrets.randbits(53) if seed is None else seed,
            deadline_s,
            traceparent,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.traceparent is None else (("traceparent", self.traceparent),)


_DEFAULTS = SamplingParams()


async def collect(answer: AsyncGenerator[Delta, None]) -> Completion:
    """Reads an answer to its end and puts it together."""
    texts: list[str] = []
    token_ids: list[int] = []
    async with contextlib.aclosing(answer):
        async for delta in answer:
            texts.append(delta.text)
            token_ids.extend(delta.token_ids)
            if delta.finished is not None:
                end = delta.finished
    return Completion(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=end.reason,
        usage=end.usage,
        seed=end.seed,
        request_id=end.request_id,
    )


def _pause_s(failure: Unavailable, attempt: int) -> float:
    """How long to wait before the stream is taken up again, seconds."""
    if failure.retry_after_s is not None:
        return min(failure.retry_after_s, _LONGEST_PAUSE_S)
    return min(_FIRST_PAUSE_S * (1 << attempt), _LONGEST_PAUSE_S)
