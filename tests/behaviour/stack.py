"""All three services, real, on the event loop of the tests: sockets in a folder, no processes.

    async with running_stack(sockets, folder, scripted_part(script, limits)) as stack:
        answer = await send(stack, Way.CHAT_UNARY, Ask(prompt="hello"))

In one process a test can look inside: block tables, maps, gauges. What the processes add (signals,
flags, exit codes) is tested with processes.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from quire.v1 import info_pb2, info_pb2_grpc, text_pb2_grpc, token_pb2_grpc
from services.chassis.channel import CHANNEL_OPTIONS
from services.chassis.server import GrpcServer
from services.scheduler.__main__ import wire
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.worker_state import WorkerState
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.settings import Settings
from services.tokenizer.domain import ChatMessage
from services.tokenizer.encoding import Encoding, load_encoding
from services.tokenizer.encoding_pool import EncodingPool
from services.tokenizer.sampling_defaults import load_sampling_defaults
from services.tokenizer.servicer import TextServicer
from services.tokenizer.session import SchedulerLink as TokenizerLink
from services.tokenizer.session_call import LinkOptions as SessionOptions
from services.tokenizer.validation import Validator
from services.worker.engine import Engine, StartUp, load_engine
from services.worker.link import SchedulerLink as WorkerLink
from services.worker.machine import Machine
from services.worker.model_thread import ModelThread
from services.worker.plan import Attachment, Registration, StepLimits
from services.worker.rows import RequestRows
from services.worker.settings import WorkerSettings
from services.worker.stream import LinkOptions, StepExecutor
from tests.fakes.scripted_executor import Script, ScriptedExecutor

MODEL = "tiny"

SCRIPTED_LIMITS = StepLimits(
    block_size=4,
    num_blocks=1024,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    max_model_len=512,
    vocab_size=512,
    max_in_flight=2,
)
"""Roomy: nothing of the scheduler shows."""

STARVED_LIMITS = StepLimits(
    block_size=4,
    num_blocks=16,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=64,
    vocab_size=512,
    max_in_flight=2,
)
"""So small that every limit is met."""


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for what is about to happen by itself."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(frozen=True, kw_only=True)
class WorkerPart:
    """What differs between one worker and another; the link is the same."""

    limits: StepLimits
    make_executor: Callable[[Attachment], StepExecutor]
    eos_token_ids: tuple[int, ...]
    model_digest: str


def engine_part(engine: Engine) -> WorkerPart:
    """A worker with a model."""
    return WorkerPart(
        limits=engine.limits,
        make_executor=engine.attach,
        eos_token_ids=tuple(engine.loaded.config.eos_token_ids),
        model_digest=engine.loaded.digest,
    )


def scripted_part(
    script: Script, limits: StepLimits = SCRIPTED_LIMITS, *, eos_token_ids: Sequence[int] = ()
) -> WorkerPart:
    """A worker that says what it is told."""
    return WorkerPart(
        limits=limits,
        make_executor=functools.partial(ScriptedExecutor, limits=limits, script=script),
        eos_token_ids=tuple(eos_token_ids),
        model_digest=hashlib.sha256(b"script").hexdigest(),
    )


def load_small_engine(folder: Path, *, num_blocks: int, **settings: Any) -> Engine:
    """The engine of a tiny float32 checkpoint, with a pool of exactly `num_blocks` blocks."""
    block_size = settings.get("block_size", 4)
    config = json.loads((folder / "config.json").read_text())
    values = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    block_bytes = values * block_size * 2 * 4  # keys and values, four bytes each
    defaults = {
        "model": str(folder),
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory": str(num_blocks * block_bytes),
        "block_size": block_size,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    engine = load_engine(WorkerSettings(**defaults | settings), folder, Machine(), StartUp(0.0))
    assert engine.limits.num_blocks == num_blocks
    return engine


class Worker:
    """A worker attached by its own link. `die` cuts it as a killed process would."""

    def __init__(self, part: WorkerPart, target: str, worker_id: str = "w-0") -> None:
        self.part = part
        self.executors: list[StepExecutor] = []
        self.attached = asyncio.Event()
        self.stopping = asyncio.Event()
        self.thread = ModelThread(asyncio.get_running_loop())
        self._task: asyncio.Task[None] | None = None
        self._link = WorkerLink(
            LinkOptions(
                target=target,
                registration=Registration(
                    worker_id=worker_id,
                    instance_id=f"{worker_id}-instance",
                    model=MODEL,
                    model_digest=part.model_digest,
                    dtype="float32",
                    device="cpu",
                    limits=part.limits,
                    eos_token_ids=part.eos_token_ids,
                ),
                drain_timeout_s=5.0,
            ),
            make_executor=self._make,
            thread=self.thread,
            on_ready=self._on_ready,
        )

    @property
    def rows(self) -> RequestRows:
        """Of the present attachment."""
        executor: Any = self.executors[-1]
        rows = executor.rows if isinstance(executor, ScriptedExecutor) else executor._rows
        assert isinstance(rows, RequestRows)
        return rows

    async def run(self) -> None:
        """Until `stopping` is set, or `die`."""
        async with asyncio.TaskGroup() as tasks:
            self._task = tasks.create_task(self._link.run(self.stopping))

    def die(self) -> None:
        """Cuts the link without a goodbye; it does not come back."""
        assert self._task is not None
        self._task.cancel()

    def _make(self, attachment: Attachment) -> StepExecutor:
        self.executors.append(self.part.make_executor(attachment))
        return self.executors[-1]

    async def _on_ready(self, ready: bool) -> None:
        if ready:
            self.attached.set()
        else:
            self.attached.clear()


@contextlib.asynccontextmanager
async def running_worker(
    part: WorkerPart, target: str, worker_id: str = "w-0"
) -> AsyncIterator[Worker]:
    """A worker that is attached; it says goodbye at the end."""
    worker = Worker(part, target, worker_id)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        try:
            async with asyncio.timeout(10):
                await worker.attached.wait()
            yield worker
        finally:
            worker.stopping.set()
    assert await worker.thread.close(5), "the model thread is stuck"


@dataclass(kw_only=True)
class Stack:
    """A running set, its inside, and channels to its doors.

    Attributes:
        encoding: the tokenizer's own.
        workers: attached ones, the first one first.
        script: where the worker is a scripted one.
        canary: a prompt, and the ids that it must give after whatever has happened.
        answers: what each request gave the first time; it must give the same again.
        is_running: false once it has been torn down.
    """

    encoding: Encoding
    link: TokenizerLink
    servicer: TextServicer
    loop: EngineLoop
    workers: list[Worker]
    text_channel: grpc.aio.Channel
    token_channel: grpc.aio.Channel
    text_target: str
    scheduler_target: str
    script: Script | None = None
    canary: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    answers: dict[Any, Any] = field(default_factory=dict)
    is_running: bool = True
    _prompts: dict[tuple[int, ...], str] = field(default_factory=dict)

    @property
    def text(self) -> Any:
        """Stub of the text door."""
        return text_pb2_grpc.TextServiceStub(self.text_channel)

    @property
    def tokens(self) -> Any:
        """Stub of the token door."""
        return token_pb2_grpc.TokenServiceStub(self.token_channel)

    @property
    def core(self) -> Scheduler:
        """The scheduler's state machine."""
        return self.loop._core

    @property
    def worker_state(self) -> WorkerState:
        """What the core keeps about the only worker."""
        (state,) = self.core._workers.values()
        return state

    async def loads(self) -> info_pb2.GetLoadsResponse:
        """Gauges and counters, as the scheduler's door tells them."""
        stub: Any = info_pb2_grpc.InfoServiceStub(self.token_channel)
        return await stub.GetLoads(info_pb2.GetLoadsRequest(), timeout=5)

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """As the text door encodes a prompt."""
        (ids,) = self.encoding.encode([text], add_special_tokens=True)
        return tuple(ids)

    def chat_ids(self, text: str) -> tuple[int, ...]:
        """As the chat door encodes one user message."""
        message = ChatMessage(role="user", content=text)
        rendered = self.encoding.render([message], add_generation_prompt=True)
        return tuple(rendered.token_ids)

    def prompt_for(self, output: Sequence[int]) -> str:
        """A prompt that the scripted worker answers by `output`, at every door."""
        assert self.script is not None
        key = tuple(output)
        if key not in self._prompts:
            prompt = f"say {len(self._prompts)}: "
            self._prompts[key] = prompt
            self.script.say(self.prompt_ids(prompt), output)
            if self.encoding.has_chat_template:
                self.script.say(self.chat_ids(prompt), output)
        return self._prompts[key]


@contextlib.asynccontextmanager
async def running_stack(
    sockets: Path,
    folder: Path,
    part: WorkerPart,
    *,
    script: Script | None = None,
    scheduler: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """Starts scheduler, worker and tokenizer, each as its process wires it, and connects them.

    Args:
        sockets: folder for the sockets; its path must be short.
        folder: of the model; the tokenizer takes its files.
        part: the worker.
        script: of the worker, where it is a scripted one.
        scheduler: settings of the scheduler.
    """
    text_address = f"unix://{sockets}/text.sock"
    scheduler_address = f"unix://{sockets}/scheduler.sock"
    async with contextlib.AsyncExitStack() as stack:
        loop = await stack.enter_async_context(
            _running_scheduler(scheduler_address, scheduler or {})
        )
        worker = await stack.enter_async_context(running_worker(part, scheduler_address))
        encoding, link, servicer = await stack.enter_async_context(
            _running_tokenizer(text_address, scheduler_address, folder)
        )
        text_channel, token_channel = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            )
            for address in (text_address, scheduler_address)
        ]
        await eventually(lambda: link.limits is not None)
        made = Stack(
            encoding=encoding,
            link=link,
            servicer=servicer,
            loop=loop,
            workers=[worker],
            text_channel=text_channel,
            token_channel=token_channel,
            text_target=text_address,
            scheduler_target=scheduler_address,
            script=script,
        )
        try:
            yield made
        finally:
            made.is_running = False
            if script is not None:
                script.go_on()


@contextlib.asynccontextmanager
async def _running_scheduler(
    address: str, settings: Mapping[str, Any]
) -> AsyncIterator[EngineLoop]:
    loop, server = wire(Settings(**{"check_block_tables": True, **settings}))
    await server.start([address])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.run())
        try:
            yield loop
        finally:
            loop.close()
            await server.stop()


@contextlib.asynccontextmanager
async def _running_tokenizer(
    address: str, scheduler: str, folder: Path
) -> AsyncIterator[tuple[Encoding, TokenizerLink, TextServicer]]:
    encoding = load_encoding(folder)
    server = GrpcServer(["quire.v1.TextService"])
    link = TokenizerLink(
        SessionOptions(
            target=scheduler,
            tokenizer_digest=encoding.digest,
            model=MODEL,
            first_delay_s=0.01,
            longest_delay_s=0.05,
        ),
        server.set_ready,
    )
    pool = EncodingPool(encoding, threads=1)
    servicer = TextServicer(
        version="1",
        validator=Validator(
            model=MODEL, vocab_size=encoding.vocab_size, defaults=load_sampling_defaults(folder)
        ),
        encoding=encoding,
        pool=pool,
        link=link,
    )
    text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server.grpc)
    await server.start([address])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        try:
            yield encoding, link, servicer
        finally:
            link.stop()
            await server.stop()
            pool.close()
