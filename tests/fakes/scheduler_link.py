"""The scheduler's end of the step link, scripted by a test.

    async with FakeScheduler.listening(address) as scheduler:
        link = await scheduler.next_link()
        await link.accept(epoch=1)
        await link.send(step(epoch=1, step_id=1, ...))
        result = await link.result()

Nothing is decided here: the test says what is sent, and sees everything that arrives.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from quire.v1 import token_pb2, worker_pb2, worker_pb2_grpc
from services.chassis.channel import SERVER_OPTIONS


def u32(values: Sequence[int]) -> bytes:
    """A packed column."""
    return np.asarray(values, dtype="<u4").tobytes()


def ids(packed: bytes) -> list[int]:
    """The numbers of a packed column."""
    return np.frombuffer(packed, dtype="<u4").tolist()


def block_table_digest(tables: Mapping[int, Sequence[int]]) -> int:
    """Of block ids by slot, as the contract defines it."""
    numbers = [
        number for slot in sorted(tables) for number in (slot, len(tables[slot]), *tables[slot])
    ]
    return int.from_bytes(hashlib.sha256(u32(numbers)).digest()[:8], "little")


def step(
    *,
    epoch: int = 1,
    step_id: int,
    rows: Sequence[tuple[int, int, Sequence[int]]] = (),
    new: Sequence[worker_pb2.NewRequest] = (),
    released: Sequence[int] = (),
    digest: int | None = None,
    copies: Sequence[tuple[int, int]] = (),
    traceparent: str = "",
) -> worker_pb2.Step:
    """A step; each row is (slot, tokens to compute, block ids appended), each copy (from, to)."""
    return worker_pb2.Step(
        epoch=epoch,
        step_id=step_id,
        released_slots=u32(released),
        new_requests=new,
        slots=u32([slot for slot, _, _ in rows]),
        num_tokens=u32([count for _, count, _ in rows]),
        num_new_blocks=u32([len(blocks) for _, _, blocks in rows]),
        new_block_ids=u32([block for _, _, blocks in rows for block in blocks]),
        block_table_digest=digest,
        copied_from=u32([source for source, _ in copies]),
        copied_to=u32([target for _, target in copies]),
        traceparent=traceparent,
    )


def new_request(slot: int, tokens: Sequence[int], **fields: Any) -> worker_pb2.NewRequest:
    """A greedy request whose tokens are all prompt, unless `fields` say otherwise."""
    defaults = {"prompt_len": len(tokens), "num_computed": 0, "temperature": 0.0, "top_p": 1.0}
    return worker_pb2.NewRequest(slot=slot, token_ids=u32(tokens), **(defaults | fields))


class SchedulerLink:
    """One attachment of one worker."""

    def __init__(self, register: worker_pb2.Register) -> None:
        self.register = register
        self._outgoing: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self._incoming: asyncio.Queue[worker_pb2.AttachRequest | None] = asyncio.Queue()
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    async def accept(self, *, epoch: int = 1, **fields: Any) -> None:
        """Answers Register, granting what was asked for."""
        asked = self.register
        defaults = {
            "max_num_seqs": asked.max_num_seqs,
            "num_slots": (asked.max_in_flight + 1) * asked.max_num_seqs,
        }
        registered = worker_pb2.Registered(epoch=epoch, **(defaults | fields))
        await self._outgoing.put(worker_pb2.AttachResponse(registered=registered))

    async def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call with a status."""
        self.refusal = (code, details)
        await self._outgoing.put(None)

    async def send(self, *steps: worker_pb2.Step) -> None:
        """Sends steps, whatever is in them."""
        for one in steps:
            await self._outgoing.put(worker_pb2.AttachResponse(step=one))

    async def send_raw(self, response: worker_pb2.AttachResponse) -> None:
        """Sends any message."""
        await self._outgoing.put(response)

    async def bye(self, reason: str = "scheduler stops") -> None:
        """Says goodbye and closes the stream."""
        await self._outgoing.put(worker_pb2.AttachResponse(bye=token_pb2.Bye(reason=reason)))
        await self.close()

    async def close(self) -> None:
        """Closes the stream without goodbye."""
        await self._outgoing.put(None)

    async def received(self) -> worker_pb2.AttachRequest | None:
        """The next message of the worker; None when its stream has ended, in whatever way."""
        return await self._incoming.get()

    async def result(self) -> worker_pb2.StepResult:
        """The next message, which must be a result."""
        message = await self.received()
        assert message is not None, "the stream ended; expected a result"
        assert message.WhichOneof("message") == "result", message
        return message.result

    async def serve(self, requests: AsyncIterator[worker_pb2.AttachRequest], context: Any) -> None:
        """Both directions of the call, until the test or the worker ends it."""
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(requests))
            while (response := await self._outgoing.get()) is not None:
                await context.write(response)
            reader.cancel()
        if self.refusal is not None:
            await context.abort(*self.refusal)

    async def _read(self, requests: AsyncIterator[worker_pb2.AttachRequest]) -> None:
        try:
            async for request in requests:
                await self._incoming.put(request)
                if request.WhichOneof("message") == "bye":  # answered as a scheduler does
                    await self.bye("the worker said goodbye")
        finally:
            self._incoming.put_nowait(None)


def _free(address: str) -> None:
    """Takes the path of a socket from an earlier server."""
    if address.startswith("unix://"):
        Path(address.removeprefix("unix://")).unlink(missing_ok=True)


class FakeScheduler(worker_pb2_grpc.WorkerLinkServiceServicer):
    """Collects the links of all workers that dial in."""

    def __init__(self) -> None:
        self._links: asyncio.Queue[SchedulerLink] = asyncio.Queue()

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, address: str) -> AsyncIterator["FakeScheduler"]:
        """A fake that listens at `address`; leaving the block cuts every link, without goodbye."""
        _free(address)
        fake = cls()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerLinkServiceServicer_to_server(fake, server)
        server.add_insecure_port(address)
        await server.start()
        try:
            yield fake
        finally:
            await server.stop(None)

    async def next_link(self) -> SchedulerLink:
        """The next worker that dials in and sends Register."""
        return await self._links.get()

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        requests = aiter(request_iterator)
        link = SchedulerLink((await anext(requests)).register)
        await self._links.put(link)
        await link.serve(requests, context)
