"""The client: talks to the text door, and goes on where a cut stream ended.

It is the first door of a request: it mints the request id and the seed, so that it can ask for the
same answer again. A stream that is cut is resumed with the tokens that have come, on another server
where there is one: nothing of it is generated or yielded twice, and the same seed draws the same
tokens.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import codec
from quire.answers import ChatMessage, Completion, Delta, RenderedChat, ServerInfo
from quire.course import Course, Cut, all_of
from quire.endpoints import Endpoints, may_go_elsewhere, split_target
from quire.errors import DeadlineExceeded, InvalidRequest, QuireError, ServerFault, Unavailable
from quire.params import SamplingParams, Scheduling
from quire.request_options import CallOptions, RequestOptions
from quire.request_span import RequestSpan, make_tracer
from quire.statuses import error_of
from quire.v1 import text_pb2

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where `quire up` serves."""

TEXT_SERVICE = "quire.v1.TextService"
"""Its name for health checks."""

_HEALTH_PAUSE_S = 0.1
_HEALTH_TIMEOUT_S = 5.0


class AsyncClient:
    """A connection to one server, or to several that serve the same model.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for delta in client.generate("Once upon", SamplingParams(max_tokens=20)):
                print(delta.text, end="", flush=True)

    Each call goes to the next server in turn, past those that are known to be down. One that cannot
    be reached, or is going away, is replaced by another before a call fails; so is one that goes
    away in the middle of an answer. A name with several addresses counts as one server here, and
    gRPC spreads the calls over its addresses.

    Where the application has an OpenTelemetry tracer provider, each answer is a span of it, below
    the current one, and its trace goes on in the servers.

    All methods raise the errors of `quire.errors`. Leaving the `async with` cuts what still runs.

    Args:
        target: `host:port` or `unix:///path`; several of them joined by commas, or a sequence.
        resume_tries: how often one cut stream is taken up again; 0 for never. With one server
            that is gone, as many as by default take some 25 s: time to start it again.

    Raises:
        InvalidRequest: `target` names no server, or `resume_tries` is no number.
    """

    def __init__(
        self, target: str | Sequence[str] = DEFAULT_TARGET, *, resume_tries: int = 16
    ) -> None:
        self._targets = split_target(target)
        self.target = ",".join(self._targets)
        """All addresses, joined by commas."""
        if isinstance(resume_tries, bool) or not isinstance(resume_tries, int) or resume_tries < 0:
            raise InvalidRequest("resume_tries", f"must be a number >= 0, got {resume_tries!r}")
        self._resume_tries = resume_tries
        self._open_endpoints: Endpoints | None = None
        self._tracer = make_tracer()

    async def __aenter__(self) -> Self:
        if self._open_endpoints is not None:
            raise QuireError("the client is open already; make another one")
        # A channel belongs to the loop it is made on, so it is made here.
        self._open_endpoints = Endpoints(self._targets)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        endpoints, self._open_endpoints = self._endpoints, None
        await endpoints.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        scheduling: Scheduling | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Completes a prompt; closing the iterator ends the request on the server.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop; absent: as the model's configuration says.
            request_id: unique among live requests, at most 128 bytes; absent: minted.
            deadline_s: when to give up, seconds from now, resumed attempts included; absent or
                infinite: never.
            traceparent: W3C trace context to belong to, instead of the application's current span;
                at most 512 characters, ASCII.
            scheduling: how urgent it is, whom it is for; absent: as all others. Its `deadline_s`
                counts too, the earlier of both.

        Returns:
            What is new, piece by piece; the last one has `finished` set.
        """
        ask = RequestOptions.of(params, request_id, deadline_s, traceparent, scheduling)
        request = codec.generate_request(
            prompt,
            params or _DEFAULTS,
            request_id=ask.request_id,
            seed=ask.seed,
            scheduling=ask.scheduling,
        )
        return self._answer("Generate", request, ask, params or _DEFAULTS)

    def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        scheduling: Scheduling | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Answers a conversation; otherwise like `generate`.

        Args:
            messages: the conversation, as `ChatMessage` or as `{"role": …, "content": …}`.
            params: see `generate`.
            request_id: see `generate`.
            deadline_s: see `generate`.
            traceparent: see `generate`.
            scheduling: see `generate`.

        Returns:
            The assistant's turn, piece by piece; the last one has `finished` set.
        """
        ask = RequestOptions.of(params, request_id, deadline_s, traceparent, scheduling)
        request = codec.chat_request(
            messages,
            params or _DEFAULTS,
            request_id=ask.request_id,
            seed=ask.seed,
            scheduling=ask.scheduling,
        )
        return self._answer("Chat", request, ask, params or _DEFAULTS)

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
        response = await self._ask("Tokenize", request)
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
        response = await self._ask("Detokenize", request)
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
        response = await self._ask("RenderChat", request)
        return RenderedChat(text=response.text, token_ids=codec.unpacked(response.token_ids))

    async def info(self) -> ServerInfo:
        """What the server serves, and within which limits."""
        return codec.server_info(await self._ask("GetInfo", text_pb2.GetInfoRequest()))

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the server can serve; of several, until one of them can.

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
        """Whether the server says that it can serve now; of several, whether one of them does.

        Raises:
            ServerError: none of them could be asked.
        """
        request = health_pb2.HealthCheckRequest(service=TEXT_SERVICE)
        failure: QuireError | None = None
        answered = False
        endpoints = self._endpoints
        for endpoint in endpoints.in_turn():
            check = health_pb2_grpc.HealthStub(endpoint.channel).Check
            try:
                with endpoints.in_use():
                    response = await check(request, timeout=_HEALTH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                failure = error_of(error, endpoint.target)
                continue
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return True
            answered = True
        if failure is not None and not answered:
            raise failure
        return False

    async def _ask(self, rpc: str, request: Any) -> Any:
        """One unary call; it changes nothing there, so that it may be made again elsewhere."""
        failures: list[Unavailable] = []
        endpoints = self._endpoints
        for endpoint in endpoints.in_turn():
            try:
                with endpoints.in_use():
                    return await getattr(endpoint.text, rpc)(request)
            except grpc.aio.AioRpcError as error:
                failure = error_of(error, endpoint.target)
                if not (isinstance(failure, Unavailable) and may_go_elsewhere(failure)):
                    raise failure from error
                failures.append(failure)
        raise all_of(failures)

    async def _answer(
        self, rpc: str, first: Any, ask: RequestOptions, params: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        """Yields the answer to `first`, through as many calls as it takes."""
        endpoints = self._endpoints
        span = RequestSpan(self._tracer, rpc, ask, params)
        try:
            attempts = self._attempts(endpoints, rpc, first, ask, span)
            async with contextlib.aclosing(attempts) as deltas:
                with endpoints.in_use():
                    async for delta in deltas:
                        span.took(delta)
                        yield delta
        except Exception as error:
            span.failed(error)
            raise
        finally:
            span.end()

    async def _attempts(
        self, endpoints: Endpoints, rpc: str, first: Any, ask: RequestOptions, span: RequestSpan
    ) -> AsyncGenerator[Delta, None]:
        clock = asyncio.get_running_loop().time
        ends_at = None if ask.deadline_s is None else clock() + ask.deadline_s
        received: list[int] = []
        course = Course(endpoints, self._resume_tries)
        for attempt in itertools.count():
            endpoint = endpoints.choose(course.tried)
            connected = await endpoint.connect(_left(ends_at, clock()))
            before, finished = len(received), False
            left_s = _left(ends_at, clock())
            request = codec.attempt_of(first, attempt, received, left_s)
            method = getattr(endpoint.text, rpc)
            span.attempt(endpoint.target, attempt, before, course.last if attempt else None)
            call = method(request, timeout=left_s, metadata=span.metadata)
            try:
                async for response in call:
                    delta = codec.delta(
                        response,
                        request_id=ask.request_id,
                        seed=ask.seed,
                        trace_id=span.trace_id,
                    )
                    received.extend(delta.token_ids)
                    finished = finished or delta.finished is not None
                    yield delta
            except grpc.aio.AioRpcError as error:
                if finished:
                    return
                pause_s = course.after(
                    error_of(error, endpoint.target),
                    Cut(endpoint, connected, len(received) > before, attempt),
                    cause=error,
                )
            else:
                if finished:
                    return
                message = f"{endpoint.target} ended the answer without saying how it ended"
                raise ServerFault(message)
            finally:
                call.cancel()
            if ends_at is not None and clock() + pause_s >= ends_at:
                reason = course.last.message
                message = f"{self.target} cannot finish within the time given ({reason})"
                raise DeadlineExceeded(message)
            await asyncio.sleep(pause_s)

    @property
    def _endpoints(self) -> Endpoints:
        if self._open_endpoints is None:
            raise QuireError("the client is not open; use: async with AsyncClient(…) as client")
        return self._open_endpoints


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
        stop=end.stop,
        usage=end.usage,
        seed=end.seed,
        request_id=end.request_id,
        trace_id=end.trace_id,
    )


def _left(ends_at: float | None, now: float) -> float | None:
    """Time left, seconds; None without limit."""
    return None if ends_at is None else max(ends_at - now, 0.0)
