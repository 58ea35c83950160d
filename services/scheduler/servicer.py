"""The token door (`quire.v1.TokenService`) and the facts (`quire.v1.InfoService`)."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import info_pb2, info_pb2_grpc, token_pb2, token_pb2_grpc
from quire.version import VERSION
from services.chassis.errors import InvalidArgument, Overloaded, ServiceError, Unavailable
from services.chassis.tasks import run_until_first_ends
from services.chassis.tracing import passed_on
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import codec
from services.scheduler.admittance import admit
from services.scheduler.digest import LoadReport, LoadReports, unless_known
from services.scheduler.engine_loop import Caller, EngineLoop
from services.scheduler.outbox import WRITE_TIMEOUT_S, Outbox
from services.scheduler.prompt_hasher import PromptHasher

log = logging.getLogger(__name__)

SESSION_CREDITS = 256
"""Submits a session may have unacknowledged."""

# grpc's stubs make the context generic; at run time it is a plain class.
Context = Any


class TokenServicer(token_pb2_grpc.TokenServiceServicer):
    """Both doors into the engine loop.

    Args:
        loop: the engine loop.
        hasher: of the prompts.
    """

    def __init__(self, loop: EngineLoop, hasher: PromptHasher) -> None:
        self._loop = loop
        self._hasher = hasher
        self._reports = LoadReports(loop)

    async def Generate(
        self, request: token_pb2.TokenServiceGenerateRequest, context: Context
    ) -> AsyncIterator[token_pb2.TokenServiceGenerateResponse]:
        """One request on its own stream; leaving it aborts the request."""
        refuse_unknown_fields(request)
        call = codec.parse_request(request.request, mint_id=True)
        call = codec.with_traceparent(call, passed_on(context.invocation_metadata()))
        call = codec.with_deadline(call, context.time_remaining())
        outbox = Outbox()
        async with self._loop.caller(outbox) as caller:
            await admit(self._loop, self._hasher, caller, 0, call)
            response = token_pb2.TokenServiceGenerateResponse(
                request_id=call.request_id, seed=call.sampling.seed
            )
            while not response.HasField("finished"):
                delivery = await outbox.take()
                response.token_ids.extend(delivery.token_ids.tolist())
                for _, end in delivery.ends:
                    error = codec.error_of(end)
                    if error is not None:
                        raise error
                    response.finished.CopyFrom(codec.finished(end))
                if delivery.closing and not delivery.ends:
                    raise Unavailable("the scheduler is stopping", reason="DRAINING")
                if response.token_ids or delivery.ends:
                    yield response
                    if not delivery.ends:
                        response = token_pb2.TokenServiceGenerateResponse()

    async def Session(  # type: ignore[override]  # a handler may write instead of yielding
        self, request_iterator: AsyncIterator[token_pb2.SessionRequest], context: Context
    ) -> None:
        """All requests of one tokenizer. Writes by itself, so it is no generator."""
        session = _Session(self._loop, self._hasher, self._reports, context)
        await session.run(aiter(request_iterator))


class _Session:
    def __init__(
        self, loop: EngineLoop, hasher: PromptHasher, reports: LoadReports, context: Context
    ) -> None:
        self._loop = loop
        self._hasher = hasher
        self._reports = reports
        self._context = context
        self._outbox = Outbox()
        self._last_stream = -1
        self._credits = SESSION_CREDITS

    async def run(self, requests: AsyncIterator[token_pb2.SessionRequest]) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidArgument("message", "the first message of a session must be hello")
        refuse_unknown_fields(first)
        codec.check_hello(first.hello)
        log.info("session of tokenizer %s opened", first.hello.instance_id)
        try:
            # First of all, so that what changes while the welcome is written is not missed.
            async with self._loop.caller(self._outbox) as caller:
                await self._context.write(
                    codec.welcome(
                        SESSION_CREDITS,
                        self._loop.limits,
                        self._loop.model,
                        serving=self._loop.serving,
                    )
                )
                jobs = [self._write(), self._read(requests, caller), self._give_up()]
                if first.hello.wants_load:
                    jobs.append(self._report())
                await run_until_first_ends(*jobs)
        finally:
            log.info("session of tokenizer %s closed", first.hello.instance_id)

    async def _read(
        self, requests: AsyncIterator[token_pb2.SessionRequest], caller: Caller
    ) -> None:
        """Takes messages until Bye or the end of the stream; what is live then is aborted."""
        async for message in requests:
            refuse_unknown_fields(message)
            kind = message.WhichOneof("message")
            if kind == "submit":
                await self._submit(message.submit, caller)
            elif kind == "abort":
                caller.abort(message.abort.stream_id)
            elif kind == "finish":
                caller.finish(message.finish.stream_id, message.finish.kept_tokens)
            elif kind == "bye":
                return
            else:
                raise InvalidArgument("message", f"{kind or 'nothing'} is out of place here")

    async def _submit(self, submit: token_pb2.Submit, caller: Caller) -> None:
        stream = submit.stream_id
        if stream <= self._last_stream:
            raise InvalidArgument("submit.stream_id", f"must count up, got {stream}")
        self._last_stream = stream
        # A peer that asks on without reading would pile up requests here without limit.
        if self._credits == 0:
            raise InvalidArgument(
                "submit", f"came without a credit; at most {SESSION_CREDITS} may be unacknowledged"
            )
        self._credits -= 1
        try:
            call = codec.parse_request(submit.request, mint_id=False)
            await admit(self._loop, self._hasher, caller, stream, call)
        except ServiceError as error:
            self._outbox.put_end(stream, error)
        self._outbox.put_credit()

    async def _report(self) -> None:
        """Tells how busy the scheduler is, whenever that has changed."""
        before: LoadReport | None = None
        while True:
            report = await self._reports.newest()
            if report is not before:
                self._outbox.put_load(unless_known(report, before))
                before = report
            await self._reports.pause()

    async def _write(self) -> None:
        """Writes what the outbox holds until it closes or the tokenizer reads too slowly."""
        while True:
            delivery = await self._outbox.take()
            self._credits += delivery.credits
            if delivery.limits_changed:
                await self._send(codec.limits_response(delivery.limits, self._loop.model))
            if delivery.serving is not None:
                await self._send(codec.readiness_response(delivery.serving))
            batch = codec.batch_response(delivery)
            if batch is not None:
                await self._send(batch)
            if delivery.load is not None:
                await self._send(codec.load_response(delivery.load))
            if delivery.closing:
                await self._send(codec.goodbye("the scheduler stops"))
                return

    async def _send(self, message: token_pb2.SessionResponse) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._context.write(message)
        except TimeoutError:
            raise _slow_reader() from None

    async def _give_up(self) -> None:
        """Ends the session once too much waits for the tokenizer, also in the middle of a write."""
        await self._outbox.overflowed()
        raise _slow_reader()


def _slow_reader() -> Overloaded:
    return Overloaded("the tokenizer reads too slowly", reason="SLOW_READER")


class InfoServicer(info_pb2_grpc.InfoServiceServicer):
    """Read-only facts."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def GetModelInfo(
        self, request: info_pb2.GetModelInfoRequest, context: Context
    ) -> info_pb2.GetModelInfoResponse:
        """What is served."""
        refuse_unknown_fields(request)
        response = info_pb2.GetModelInfoResponse(version=VERSION)
        if self._loop.limits is not None:
            response.limits.CopyFrom(codec.limits_message(self._loop.limits, self._loop.model))
        return response

    async def GetLoads(
        self, request: info_pb2.GetLoadsRequest, context: Context
    ) -> info_pb2.GetLoadsResponse:
        """Gauges and counters."""
        refuse_unknown_fields(request)
        return codec.loads_response(
            self._loop.loads(), self._loop.facts(), self._loop.stall(), self._loop.now()
        )
