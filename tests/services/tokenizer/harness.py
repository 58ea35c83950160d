"""The link, and the whole text service, wired to a fake scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from quire.v1 import text_pb2_grpc
from services.chassis.channel import CHANNEL_OPTIONS
from services.chassis.metrics import Metrics
from services.chassis.rpc_telemetry import RpcTelemetry
from services.chassis.server import GrpcServer
from services.chassis.tracing import Tracing
from services.tokenizer.domain import Sampling, SamplingDefaults, Scheduling, TokenWork
from services.tokenizer.encoding import Encoding
from services.tokenizer.encoding_pool import EncodingPool
from services.tokenizer.metrics import State, TokenizerMetrics
from services.tokenizer.routing import Router
from services.tokenizer.servicer import TextServicer
from services.tokenizer.session import LinkCounts, SchedulerLink
from services.tokenizer.session_call import LinkOptions
from services.tokenizer.validation import Validator
from services.tokenizer.watching import Watchers
from tests.fakes.scheduler import FakeScheduler, default_limits

NOTHING = LinkCounts(live=0, unsent=0, on_session=0)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for something that happens by itself soon, and fails if it does not."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def link_options(target: str, **kwargs: Any) -> LinkOptions:
    options = LinkOptions(
        target=target,
        tokenizer_digest="d1",
        model="tiny",
        first_delay_s=0.01,
        longest_delay_s=0.05,
        goodbye_s=0.5,
    )
    return replace(options, **kwargs)


def work(request_id: str = "r", **kwargs: Any) -> TokenWork:
    made = TokenWork(
        request_id=request_id,
        model="",
        prompt=(5, 6, 7),
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=7),
        max_tokens=10,
        ignore_eos=False,
        stop_token_ids=frozenset(),
        attempt=0,
        resumed=(),
        traceparent="",
        scheduling=Scheduling(),
        ends_at=None,
    )
    return replace(made, **kwargs)


@asynccontextmanager
async def running_link(options: LinkOptions) -> AsyncIterator[SchedulerLink]:
    """A link that runs; it says goodbye at the end."""
    link = SchedulerLink(options, _ignore)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        try:
            yield link
        finally:
            link.stop()


@asynccontextmanager
async def running_router(*options: LinkOptions) -> AsyncIterator[Router]:
    """Links with all these schedulers; they say goodbye at the end."""
    router = Router(options, _ignore)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(router.run())
        try:
            yield router
        finally:
            router.stop()


async def _ignore(_connected: bool) -> None:
    return


@dataclass
class TextService:
    """A running service, its scheduler, and a client."""

    scheduler: FakeScheduler
    link: Router
    servicer: TextServicer
    server: GrpcServer
    stub: Any
    address: str

    async def is_empty(self) -> None:
        """Waits until no state of any request is left."""
        await eventually(lambda: self.servicer.live_calls == 0 and self.link.counts == NOTHING)


@asynccontextmanager
async def text_service(
    encoding: Encoding,
    sockets: Path,
    *,
    scheduler: FakeScheduler | None = None,
    defaults: SamplingDefaults | None = None,
    scheduler_runs: bool = True,
    tracing: Tracing | None = None,
    metrics: Metrics | None = None,
    content: bool = False,
    **options: Any,
) -> AsyncIterator[TextService]:
    """The service on a socket, connected; observed where there is something to tell."""
    scheduler = scheduler or FakeScheduler(
        f"unix://{sockets}/scheduler.sock", limits=default_limits()
    )
    if scheduler_runs:
        await scheduler.start()
    watched = tracing is not None or metrics is not None
    tracer = tracing.tracer if tracing else None
    counts = None if metrics is None else TokenizerMetrics(metrics, "tiny")
    server = GrpcServer(
        ["quire.v1.TextService"], observers=[RpcTelemetry(tracer, metrics)] if watched else []
    )
    pool = EncodingPool(encoding, on_done=None if counts is None else counts.encoded)
    watchers = Watchers(
        model="tiny",
        tokenizer_digest=encoding.digest,
        tracer=tracer,
        metrics=counts,
        content=content,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_end, scheduler)
        link = await stack.enter_async_context(
            running_router(link_options(scheduler.address, **options))
        )
        stack.callback(pool.close)
        stack.push_async_callback(server.stop)
        servicer = TextServicer(
            version="1",
            validator=Validator(
                model="tiny",
                vocab_size=encoding.vocab_size,
                defaults=defaults or SamplingDefaults(),
            ),
            encoding=encoding,
            pool=pool,
            link=link,
            watchers=watchers if watched else None,
        )
        if counts is not None:
            counts.watch(
                lambda: State(calls=servicer.live_calls, encoding=pool.waiting, links=link.states)
            )
        text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server.grpc)
        (address,) = await server.start([f"unix://{sockets}/text.sock"])
        if scheduler_runs:
            await eventually(lambda: link.limits is not None or scheduler.limits is None)
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = text_pb2_grpc.TextServiceStub(channel)
            yield TextService(scheduler, link, servicer, server, stub, address)


async def _end(scheduler: FakeScheduler) -> None:
    if scheduler.runs:
        await scheduler.die()
