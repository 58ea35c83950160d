"""A text door that answers from a script: word by word, cut where the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quire.v1 import generation_pb2, text_pb2, text_pb2_grpc

SERVICE = "quire.v1.TextService"


def words(count: int) -> list[str]:
    """The answer the fake gives: ` w0 w1 w2 …`; the id of a word is its number."""
    return [f" w{number}" for number in range(count)]


def failure(code: str, message: str, *details: Any) -> status_pb2.Status:
    """A status with google.rpc details, as a server would send it."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(code), message=message, details=packed)


def unavailable(retry_after_ms: int = 1) -> status_pb2.Status:
    """What a server sends when it cannot serve now."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    return failure("UNAVAILABLE", "going away", error_details_pb2.RetryInfo(retry_delay=delay))


def full(retry_after_ms: int = 1, reason: str = "QUEUE_REQUESTS") -> status_pb2.Status:
    """What a server sends whose queue has no room, or which sheds the request."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    return failure(
        "RESOURCE_EXHAUSTED",
        "queue is full",
        error_details_pb2.RetryInfo(retry_delay=delay),
        error_details_pb2.ErrorInfo(reason=reason, domain="quire"),
    )


@dataclass
class FakeTextService(text_pb2_grpc.TextServiceServicer):
    """Answers every prompt with `length` words, or `max_tokens` of them if that is fewer.

    Attributes:
        length: words of an answer that ends by itself.
        cuts: for each call in turn, after how many words in all it fails; None lets it be.
        failure: how a cut call fails.
        refusal: how every call fails at once, where set.
        pause: after how many words each call waits for `go_on`; None for never.
        go_on: lets waiting calls go on.
        paused: set when a call waits.
        ended_early: set when a caller went away before the end.
        silent_end: the stream ends without saying how.
        refusals: how the first calls fail at once, each in turn.
        refusals_after: how those after the first call fail at once, each in turn.
        room: most calls at a time; those beyond it are told to come back. None for any number.
        requests: all requests for generation, in order.
        metadata: of all calls for generation, in order.
    """

    length: int = 5
    cuts: list[int | None] = field(default_factory=list)
    failure: status_pb2.Status = field(default_factory=unavailable)
    refusal: status_pb2.Status | None = None
    pause: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    ended_early: asyncio.Event = field(default_factory=asyncio.Event)
    silent_end: bool = False
    refusals: list[status_pb2.Status] = field(default_factory=list)
    refusals_after: list[status_pb2.Status] = field(default_factory=list)
    room: int | None = None
    running: int = 0
    turned_away: int = 0
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for part in self._answer(request, context):
            yield text_pb2.GenerateResponse(**part)

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for part in self._answer(request, context):
            yield text_pb2.ChatResponse(**part)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        """One id per character, after a 1 for the special token."""
        response = text_pb2.TokenizeResponse()
        for text in request.texts:
            special = [1] if request.add_special_tokens else []
            response.results.add(packed=_packed([*special, *map(ord, text)]))
        return response

    async def Detokenize(self, request: Any, context: Any) -> Any:
        """The reverse of Tokenize; 1 is the special token."""
        texts = []
        for sequence in request.sequences:
            ids = _unpacked(sequence.packed)
            kept = [i for i in ids if i != 1] if request.skip_special_tokens else ids
            texts.append("".join("<s>" if i == 1 else chr(i) for i in kept))
        return text_pb2.DetokenizeResponse(texts=texts)

    async def RenderChat(self, request: Any, context: Any) -> Any:
        lines = [f"{message.role}: {message.content}\n" for message in request.messages]
        text = "".join(lines) + ("assistant:" if request.add_generation_prompt else "")
        ids = generation_pb2.TokenIds(packed=_packed(map(ord, text)))
        return text_pb2.RenderChatResponse(text=text, token_ids=ids)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            await context.abort_with_status(rpc_status.to_status(self.refusal))
        return text_pb2.GetInfoResponse(
            model="fake",
            version="1.2.3",
            vocab_size=1000,
            max_model_len=512,
            eos_token_ids=[2],
            tokenizer_digest="abc",
            has_chat_template=True,
        )

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        cut = self.cuts[len(self.requests)] if len(self.requests) < len(self.cuts) else None
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        refusal = self.refusals.pop(0) if self.refusals else self.refusal
        if len(self.requests) > 1 and self.refusals_after:
            refusal = self.refusals_after.pop(0)
        if self.room is not None and self.running >= self.room:
            self.turned_away += 1
            refusal = full(20)
        if refusal is not None:
            await context.abort_with_status(rpc_status.to_status(refusal))
        self.running += 1
        try:
            async for part in self._words(request, context, cut):
                yield part
        finally:
            self.running -= 1

    async def _words(
        self, request: Any, context: Any, cut: int | None
    ) -> AsyncIterator[dict[str, Any]]:
        wanted = request.stopping.max_tokens
        count = min(wanted, self.length) if wanted else self.length
        done = _unpacked(request.resume.token_ids.packed)
        assert done == list(range(len(done))), "resumed with tokens that were never sent"
        head: dict[str, Any] = {"request_id": request.request_id, "seed": request.sampling.seed}
        try:
            for number in range(len(done), count):
                if number == cut:
                    await context.abort_with_status(rpc_status.to_status(self.failure))
                if number == self.pause:
                    self.paused.set()
                    await self.go_on.wait()
                ids = [number] if request.output.return_token_ids else []
                yield {**head, "text": words(count)[number], "token_ids": ids}
                head = {}
            if cut == count:
                await context.abort_with_status(rpc_status.to_status(self.failure))
            if not self.silent_end:
                yield {**head, "finished": self._finished(count, wanted)}
        except asyncio.CancelledError:
            self.ended_early.set()
            raise

    def _finished(self, count: int, wanted: int) -> Any:
        by_length = bool(wanted) and count == wanted
        reason = generation_pb2.FINISH_REASON_LENGTH
        end = {} if by_length else {"stop_token_id": 2}
        return text_pb2.Finished(
            reason=reason if by_length else generation_pb2.FINISH_REASON_STOP,
            usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=count, cached_tokens=1),
            **end,
        )


@contextlib.asynccontextmanager
async def serving(
    service: FakeTextService, *, ready: bool = True, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """Serves at `address`, by default on a free port of this host; yields the target."""
    server = grpc.aio.server()
    text_pb2_grpc.add_TextServiceServicer_to_server(service, server)
    states = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    kinds = health_pb2.HealthCheckResponse
    await states.set("", kinds.SERVING)
    await states.set(SERVICE, kinds.SERVING if ready else kinds.NOT_SERVING)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}" if address.endswith(":0") else address
    finally:
        await server.stop(None)


def _packed(ids: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in ids)


def _unpacked(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
