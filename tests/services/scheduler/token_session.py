"""A tokenizer's end of a Session, and a worker that answers, both by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import numpy as np

from quire.v1 import generation_pb2, token_pb2
from tests.fakes.scripted_worker import ScriptedWorker, attached, column
from tests.services.scheduler.conftest import Running


class Session:
    """A tokenizer's end of a session, played by hand."""

    def __init__(self, call) -> None:
        self._call = call
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, token_pb2.StreamEnd] = {}
        self.credits = 0
        self.limits: list[token_pb2.ModelLimits] = []
        self.bye = ""
        self._news = asyncio.Condition()

    async def send(self, **message: object) -> None:
        await self._call.write(token_pb2.SessionRequest(**message))

    async def submit(self, stream: int, prompt: list[int], **fields: object) -> None:
        stopping = generation_pb2.StoppingCriteria(
            max_tokens=fields.pop("max_tokens", 4),
            ignore_eos=True,
            stop_token_ids=fields.pop("stop_token_ids", ()),
        )
        request = token_pb2.TokenRequest(
            **{
                "request_id": f"r{stream}",
                "prompt": generation_pb2.TokenIds(packed=np.array(prompt, "<u4").tobytes()),
                "stopping": stopping,
                **fields,
            }
        )
        await self.send(submit=token_pb2.Submit(stream_id=stream, request=request))

    async def until(self, condition) -> None:
        async with asyncio.timeout(5), self._news:
            await self._news.wait_for(condition)

    async def end_of(self, stream: int) -> token_pb2.StreamEnd:
        await self.until(lambda: stream in self.ends)
        return self.ends[stream]

    async def read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                async with self._news:
                    self._take(message)
                    self._news.notify_all()

    def _take(self, message: token_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "limits":
            self.limits.append(message.limits)
        elif kind == "bye":
            self.bye = message.bye.reason
        else:
            batch = message.batch
            self.credits += batch.credits
            ids = column(batch.token_ids)
            for stream, count in zip(column(batch.stream_ids), column(batch.counts), strict=True):
                assert stream not in self.ends, "a token after the end"
                self.tokens.setdefault(stream, []).extend(ids[:count])
                del ids[:count]
            assert not ids
            for end in batch.ends:
                assert end.stream_id not in self.ends, "two ends"
                self.ends[end.stream_id] = end


@contextlib.asynccontextmanager
async def opened(scheduler: Running) -> AsyncIterator[Session]:
    call = scheduler.tokens.Session()
    hello = token_pb2.Hello(instance_id="t", tokenizer_digest="d", protocol_major=1)
    await call.write(token_pb2.SessionRequest(hello=hello))
    welcome = (await call.read()).welcome
    assert welcome.credits > 0
    session = Session(call)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(session.read())
        try:
            yield session
        finally:
            call.cancel()


@contextlib.asynccontextmanager
async def served(scheduler: Running, **register: object) -> AsyncIterator[ScriptedWorker]:
    async with attached(scheduler.target, **register) as worker, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(worker.serve())
        try:
            yield worker
        finally:
            serving.cancel()
