"""The scheduler's end of the step link (`quire.v1.WorkerLinkService`): one stream per worker.

Owns the stream; the engine loop owns the worker. An end of stream is the end of the lease, whatever
its cause; a gRPC receiver cannot tell an oversize message from a goodbye, so only Bye is orderly.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import worker_pb2, worker_pb2_grpc
from services.chassis.errors import InvalidArgument, ServiceError
from services.chassis.logs import told
from services.chassis.tasks import run_until_first_ends
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import worker_codec
from services.scheduler.engine_loop import EngineLoop, WorkerLink

log = logging.getLogger(__name__)

# grpc's stubs make the context generic; at run time it is a plain class.
Context = Any


class WorkerLinkServicer(worker_pb2_grpc.WorkerLinkServiceServicer):
    """Attaches workers to the engine loop.

    Args:
        loop: the engine loop.
        check_block_tables: tell workers to compare digests; the core's plans carry them.
    """

    def __init__(self, loop: EngineLoop, *, check_block_tables: bool) -> None:
        self._loop = loop
        self._check_block_tables = check_block_tables

    async def Attach(  # type: ignore[override]  # a handler may write instead of yielding
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> None:
        """One attachment. Writes by itself, so it is no generator."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "register":
            raise InvalidArgument("message", "the first message of a worker must be register")
        refuse_unknown_fields(first)
        spec, model = worker_codec.parse_register(first.register)
        kind = worker_codec.worker_kind(first.register)
        link = await self._loop.attach(spec, model, first.register.instance_id, kind)
        try:
            await context.write(
                worker_codec.registered(link.spec, link.epoch, self._check_block_tables)
            )
            await run_until_first_ends(_write(link, context), self._read(link, requests))
        except ServiceError as error:
            self._loop.lost(link, error.message)
            raise
        finally:
            self._loop.lost(link, "the stream ended")

    async def _read(
        self, link: WorkerLink, requests: AsyncIterator[worker_pb2.AttachRequest]
    ) -> None:
        async for message in requests:
            refuse_unknown_fields(message)
            kind = message.WhichOneof("message")
            if kind == "result":
                result, timings = worker_codec.parse_result(message.result)
                self._loop.result(link, result, timings)
            elif kind == "bye":
                self._loop.lost(link, f"it said goodbye: {told(message.bye.reason)}")
                return
            else:
                raise InvalidArgument("message", f"{kind or 'nothing'} is out of place here")


async def _write(link: WorkerLink, context: Context) -> None:
    """Sends steps until the loop lets go of the worker, then goodbye."""
    while (step := await link.take()) is not None:
        await context.write(worker_codec.step_message(step))
    await context.write(worker_codec.goodbye(link.end_reason or ""))
