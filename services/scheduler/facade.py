"""The door of the `smg` gateway: the service `vllm.grpc.engine.VllmEngine` on this scheduler.

Token ids in, token ids out, through the same admission as the token door. The gateway renders chat
templates, tokenizes, and matches stop strings itself: they are taken and left to it.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from quire.version import VERSION
from services.chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)
from services.chassis.server import GrpcServer
from services.chassis.tracing import passed_on
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import codec, facade_codec
from services.scheduler.admittance import admit
from services.scheduler.core.plan import Ended, Limits
from services.scheduler.engine_loop import Caller, EngineLoop
from services.scheduler.kv_events import KvEvents
from services.scheduler.model_folder import ModelFolder
from services.scheduler.outbox import Outbox
from services.scheduler.prompt_hasher import PromptHasher

log = logging.getLogger(__name__)

SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_LONGEST_WAIT_S = 3600.0
_LEAST_INTERVAL_S = 1.0

# grpc's stubs make the context generic; at run time it is a plain class.
Context = Any


def add_facade(
    server: GrpcServer, loop: EngineLoop, hasher: PromptHasher, folder: ModelFolder | None
) -> None:
    """Registers the service.

    Args:
        server: that was made with the name SERVICE.
        loop: the engine loop.
        hasher: of the prompts.
        folder: the model's, where the scheduler was told of it.
    """
    servicer = VllmEngineServicer(loop, hasher, folder)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server.grpc)


class VllmEngineServicer(
    vllm_engine_pb2_grpc.VllmEngineServicer  # type: ignore[misc]  # the stubs have no types
):
    """See the module.

    Args:
        loop: the engine loop.
        hasher: of the prompts.
        folder: see `add_facade`.
    """

    def __init__(self, loop: EngineLoop, hasher: PromptHasher, folder: ModelFolder | None) -> None:
        self._loop = loop
        self._hasher = hasher
        self._folder = folder
        self._calls: dict[str, list[_Call]] = {}
        self._events = KvEvents(loop)
        self._throughput = _Throughput(loop)
        self._started = time.monotonic()
        self._last_request_at = 0.0

    # Requests

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """One request; leaving it aborts the request."""
        self._last_request_at = time.time()
        with facade_codec.named_as_here():
            metadata = context.invocation_metadata()
            call = facade_codec.parse_generate(request, metadata, self._folder)
            call = codec.with_traceparent(call, passed_on(metadata))
            call = codec.with_deadline(call, context.time_remaining())
            outbox = Outbox()
            async with self._loop.caller(outbox) as caller:
                with self._known(call.request_id, caller) as known:
                    await admit(self._loop, self._hasher, caller, 0, call)
                    if known.aborted:  # while its prompt was hashed, when there was nothing to end
                        caller.abort(0)
                    answer = _Answer(prompt_tokens=call.prompt.size, stream=request.stream)
                    async for message in answer.messages(outbox):
                        yield message

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests of this door; unknown ids and those that have ended are ignored."""
        refuse_unknown_fields(request)
        for request_id in request.request_ids:
            for call in self._calls.get(request_id, ()):
                call.abort()
        return vllm_engine_pb2.AbortResponse()

    @contextlib.contextmanager
    def _known(self, request_id: str, caller: Caller) -> "Iterator[_Call]":
        call = _Call(caller)
        self._calls.setdefault(request_id, []).append(call)
        try:
            yield call
        finally:
            self._calls[request_id].remove(call)
            if not self._calls[request_id]:
                del self._calls[request_id]

    # Facts

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Whether requests can be served now, and why not.

        Until the first worker is attached it is UNAVAILABLE: a gateway asks for the model once, as
        soon as it gets an answer here, and the model is not known before.
        """
        refuse_unknown_fields(request)
        if self._loop.last_hashing is None:
            self._limits()
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=self._loop.serving, message=self._trouble()
        )

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """What is served; known once a worker is attached."""
        refuse_unknown_fields(request)
        return facade_codec.model_info(self._limits(), self._loop.model, self._folder)

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """The process."""
        refuse_unknown_fields(request)
        return facade_codec.server_info(
            self._loop.loads(),
            block_size=self._block_size,
            max_num_seqs=self._loop.max_running,
            uptime_s=time.monotonic() - self._started,
            last_request_at=self._last_request_at,
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """How busy it is. There is one section of figures, whichever are asked for."""
        refuse_unknown_fields(request)
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise InvalidArgument("dp_rank", f"there is only rank 0, got {request.dp_rank}")
        return facade_codec.loads_response(
            self._loop.loads(),
            now=time.time(),
            version=VERSION,
            block_size=self._block_size,
            max_num_seqs=self._loop.max_running,
            tokens_per_s=self._throughput.now(),
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as one zip, in pieces."""
        refuse_unknown_fields(request)
        if self._folder is None:
            raise FailedPrecondition(
                "this scheduler does not know the tokenizer; start it with --tokenizer MODEL",
                reason="NO_TOKENIZER",
            )
        for piece in facade_codec.tokenizer_chunks(self._folder):
            yield piece

    # The prefix cache

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """What is cached, then every change of it."""
        refuse_unknown_fields(request)
        # A subscriber that comes back may have nothing to be told for long.
        await context.send_initial_metadata(())
        batches = self._events.subscribe(request.start_sequence_number)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield facade_codec.kv_batch(batch)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Gives up all cached blocks that hold neither a request nor a pin.

        Waits as long as it is told for requests to end. A success where none is left then: else
        blocks of those that run stay, and all others go.
        """
        refuse_unknown_fields(request)
        if not (math.isfinite(request.timeout_s) and 0 <= request.timeout_s <= _LONGEST_WAIT_S):
            limit = f"must be from 0 to {_LONGEST_WAIT_S:g} seconds, got {request.timeout_s:g}"
            raise InvalidArgument("timeout_s", limit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_s):
                await self._loop.idle.wait()
        given_up = await self._loop.flush()
        loads = self._loop.loads()
        live = loads.running + loads.waiting
        message = f"{given_up} blocks given up"
        if live:
            message += f"; {live} requests are live, and what they hold stays cached"
        return common_pb2.FlushCacheResponse(success=not live, message=message)

    # What is not there

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: Context
    ) -> vllm_engine_pb2.EmbedResponse:
        """Refused."""
        _refuse("Embed", "embeddings")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refused."""
        _refuse("StartProfile", "a profiler")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refused."""
        _refuse("StopProfile", "a profiler")

    def _limits(self) -> Limits:
        if self._loop.limits is None:
            raise Unavailable("no worker is attached", reason="NO_WORKER")
        return self._loop.limits

    @property
    def _block_size(self) -> int:
        return 0 if self._loop.limits is None else self._loop.limits.block_size

    def _trouble(self) -> str:
        if self._loop.serving:
            return ""
        if self._loop.draining:
            return "the scheduler is stopping"
        if self._loop.limits is None:
            return "no worker is attached"
        return "work waits and no step completes"


class _Call:
    """One Generate while it runs."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        self._caller.abort(0)


class _Answer:
    """The messages of one request: pieces if it is a stream, and the end."""

    def __init__(self, *, prompt_tokens: int, stream: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._tokens: list[int] = []
        self._count = 0

    async def messages(self, outbox: Outbox) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        while True:
            delivery = await outbox.take()
            self._tokens.extend(delivery.token_ids.tolist())
            self._count += delivery.token_ids.size
            for _, end in delivery.ends:
                error = codec.error_of(end)
                if error is not None:
                    raise error
                assert isinstance(end, Ended)
                if self._stream and self._tokens:
                    # The gateway makes the text and the count of a stream from its pieces alone.
                    yield self._chunk()
                yield facade_codec.complete(self._tokens, end)
                return
            if delivery.closing:
                raise Unavailable("the scheduler is stopping", reason="DRAINING")
            if self._stream and self._tokens:
                yield self._chunk()
                self._tokens = []

    def _chunk(self) -> vllm_engine_pb2.GenerateResponse:
        return facade_codec.chunk(
            self._tokens, prompt_tokens=self._prompt_tokens, completion_tokens=self._count
        )


class _Throughput:
    """Generated tokens per second, between two askings at least a second apart."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._at = time.monotonic()
        self._tokens = 0
        self._rate = 0.0

    def now(self) -> float:
        at = time.monotonic()
        if at - self._at >= _LEAST_INTERVAL_S:
            tokens = self._loop.loads().counters.generation_tokens
            self._rate = (tokens - self._tokens) / (at - self._at)
            self._at, self._tokens = at, tokens
        return self._rate


def _refuse(rpc: str, what: str) -> NoReturn:
    raise Unimplemented(f"{rpc}: {what} is not available in this version", reason="UNSUPPORTED")
