"""What long prompts cost the steps of others: a part of `quire bench scheduler`.

Engine loop, prompt hasher, codecs and core run as in service, on one event loop with a scripted
worker and scripted sessions; only the transport is left out. The worker takes a fixed time for each
step, with one step in flight, so that nothing hides the scheduler. Short requests decode all the
time; then prompts of 131,072 tokens come. From the posting of a result to the next step's message
everybody waits: what the event loop does meanwhile is measured as processor time of its thread,
which other work on the machine does not lengthen. Of each trial the longest of these waits counts,
until some steps after the last prompt was admitted and until all have been aborted again.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import uvloop
from rich.table import Table

from quire.v1 import generation_pb2, token_pb2
from services.chassis.process import settle_memory
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import codec, worker_codec
from services.scheduler.admittance import admit
from services.scheduler.core.config import Config
from services.scheduler.core.plan import StepPlan, StepResult, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine_loop import Caller, EngineLoop, WorkerLink
from services.scheduler.facts import WorkerKind
from services.scheduler.hashing import SHA256
from services.scheduler.link_timings import StepTimings
from services.scheduler.outbox import Outbox
from services.scheduler.prompt_hasher import PromptHasher
from services.scheduler.session_chains import SessionChains

PROMPT_TOKENS = 131_072
_BLOCK_SIZE = 16
_DECODES = 32
_DECODE_TOKENS = 30_000
_VOCAB = 50_000
_MOST_LONG = 8
_STEP_S = 0.01
_STEPS_AROUND = 20
"""Steps looked at after an admission, after an abort, and twice as many before anything comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptCost:
    """The longest waits for a step, milliseconds.

    Args:
        case: what came.
        ms_without: with the short requests alone; median of the trials.
        ms_with: while it came; median of the trials.
        more_ms: the difference of the two; median of the trials.
        more_ms_most: the greatest difference.
    """

    case: str
    ms_without: float
    ms_with: float
    more_ms: float
    more_ms_most: float


class _Worker:
    """Answers every step after `step_s` seconds, and notes how long each let it wait."""

    def __init__(self, loop: EngineLoop, link: WorkerLink) -> None:
        self._loop = loop
        self._link = link
        slots = link.spec.num_slots
        self._known = np.zeros(slots, np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._long = np.zeros(slots, np.bool_)
        self._stepped = asyncio.Event()
        self.step_s = 0.0
        self.waits: list[float] = []
        self.long_seen = 0
        """Long prompts received."""
        self.long_done = 0
        """Long prompts computed to their end."""

    async def run(self) -> None:
        posted = time.thread_time()
        timings = StepTimings(wait_us=0, execute_us=int(_STEP_S * 1e6), idle_us=0)
        while (step := await self._link.take()) is not None:
            worker_codec.step_message(step).SerializeToString()
            self.waits.append(time.thread_time() - posted)
            result = self._result(step)
            self._stepped.set()
            await asyncio.sleep(self.step_s)
            posted = time.thread_time()
            self._loop.result(self._link, result, timings)

    def _result(self, step: StepPlan) -> StepResult:
        for new in step.new_rows:
            self._known[new.slot] = new.token_ids.size
            self._computed[new.slot] = new.num_computed
            self._long[new.slot] = new.token_ids.size >= PROMPT_TOKENS
            self.long_seen += int(self._long[new.slot])
        self._computed[step.slots] += step.num_tokens
        samples = self._computed[step.slots] == self._known[step.slots]
        self.long_done += int((samples & self._long[step.slots]).sum())
        self._long[step.slots[samples]] = False
        self._known[step.slots] += samples
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=samples.astype(np.uint8),
            token_ids=np.full(int(samples.sum()), 7, np.uint32),
            execute_us=int(_STEP_S * 1e6),
        )

    async def until(self, *, long_seen: int = 0, long_done: int = 0, steps: int = 0) -> None:
        """Waits for so much since start, and for so many more steps."""
        last = len(self.waits) + steps
        while self.long_seen < long_seen or self.long_done < long_done or len(self.waits) < last:
            self._stepped.clear()
            await self._stepped.wait()


class _Session:
    """Takes messages as the token service does; what is to be written is thrown away."""

    def __init__(self, loop: EngineLoop, hasher: PromptHasher, caller: Caller, box: Outbox) -> None:
        self._loop = loop
        self._hasher = hasher
        self._caller = caller
        self._outbox = box
        self._last_stream = 0

    async def drain(self) -> None:
        while True:
            codec.batch_response(await self._outbox.take())

    async def submit(self, request: bytes) -> None:
        message = token_pb2.SessionRequest.FromString(request)
        refuse_unknown_fields(message)
        call = codec.parse_request(message.submit.request, mint_id=False)
        self._last_stream += 1
        await admit(self._loop, self._hasher, self._caller, self._last_stream, call)

    def abort_last(self) -> None:
        self._caller.abort(self._last_stream)


class _Bench:
    """A scheduler, its worker and its sessions, with short requests decoding."""

    def __init__(self, worker: _Worker, sessions: Sequence[_Session]) -> None:
        self._worker = worker
        self._sessions = sessions
        self._random = np.random.default_rng(0)
        self._requests = 0

    def prompt(self, tokens: int = PROMPT_TOKENS) -> bytes:
        return self._random.integers(10, _VOCAB, tokens, np.uint32).astype("<u4").tobytes()

    async def start_decodes(self) -> None:
        for _ in range(_DECODES):
            request = self._request(self.prompt(_BLOCK_SIZE), _DECODE_TOKENS)
            await self._sessions[0].submit(request)
        await self._worker.until(steps=200)

    async def fill_cache(self, prompt: bytes) -> None:
        """Has a prompt computed, at full speed."""
        self._worker.step_s = 0.0
        await self._sessions[0].submit(self._request(prompt, 1))
        await self._worker.until(long_done=self._worker.long_done + 1)

    def _request(self, packed: bytes, max_tokens: int) -> bytes:
        """A message with a new request, as it comes over the wire."""
        self._requests += 1
        request = token_pb2.TokenRequest(
            request_id=str(self._requests),
            prompt=generation_pb2.TokenIds(packed=packed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        )
        submit = token_pb2.Submit(stream_id=self._requests, request=request)
        return token_pb2.SessionRequest(submit=submit).SerializeToString()

    async def trial(self, prompts: Sequence[bytes]) -> tuple[float, float]:
        """The longest waits without these prompts and with them, seconds."""
        worker = self._worker
        worker.step_s = _STEP_S
        requests = [self._request(prompt, 512) for prompt in prompts]
        await worker.until(steps=_STEPS_AROUND)
        before = len(worker.waits)
        await worker.until(steps=2 * _STEPS_AROUND)
        coming = len(worker.waits)
        seen = worker.long_seen + len(prompts)
        async with asyncio.TaskGroup() as tasks:
            for session, request in zip(self._sessions, requests, strict=False):
                tasks.create_task(session.submit(request))
        await worker.until(long_seen=seen)
        await worker.until(steps=_STEPS_AROUND)
        for session in self._sessions[: len(prompts)]:
            session.abort_last()
        await worker.until(steps=_STEPS_AROUND)
        return max(worker.waits[before:coming]), max(worker.waits[coming:])


def _spec() -> WorkerSpec:
    tokens = _DECODES * _DECODE_TOKENS + (_MOST_LONG + 2) * PROMPT_TOKENS
    return WorkerSpec(
        worker_id="scripted",
        num_blocks=tokens // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_num_seqs=_DECODES + _MOST_LONG,
        max_num_batched_tokens=2048,
        max_model_len=PROMPT_TOKENS + 1024,
        vocab_size=_VOCAB,
        eos_token_ids=(2,),
        max_in_flight=1,
        model_digest=b"benchmark",
    )


@contextlib.asynccontextmanager
async def _bench() -> AsyncIterator[_Bench]:
    loop = EngineLoop(Scheduler(Config(), SHA256))
    hasher = PromptHasher(SHA256, SessionChains())
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as callers:
        running = [tasks.create_task(loop.run())]
        link = await loop.attach(_spec(), "benchmark", "benchmark", WorkerKind())
        worker = _Worker(loop, link)
        running.append(tasks.create_task(worker.run()))
        sessions = []
        for _ in range(_MOST_LONG):
            outbox = Outbox()
            caller = await callers.enter_async_context(loop.caller(outbox))
            sessions.append(_Session(loop, hasher, caller, outbox))
            running.append(tasks.create_task(sessions[-1].drain()))
        bench = _Bench(worker, sessions)
        await bench.start_decodes()
        yield bench
        for task in running:
            task.cancel()


async def _measure(trials: int) -> list[LongPromptCost]:
    costs = []
    async with _bench() as bench:
        for case, count in (("one new prompt", 1), (f"{_MOST_LONG} new prompts", _MOST_LONG)):
            waits = [
                await bench.trial([bench.prompt() for _ in range(count)]) for _ in range(trials)
            ]
            costs.append(_cost(case, waits))
        cached = bench.prompt()
        await bench.fill_cache(cached)
        costs.append(
            _cost("one cached prompt", [await bench.trial([cached]) for _ in range(trials)])
        )
    return costs


def _cost(case: str, trials: Sequence[tuple[float, float]]) -> LongPromptCost:
    more = [came - alone for alone, came in trials]
    return LongPromptCost(
        case=case,
        ms_without=statistics.median(alone for alone, _ in trials) * 1e3,
        ms_with=statistics.median(came for _, came in trials) * 1e3,
        more_ms=statistics.median(more) * 1e3,
        more_ms_most=max(more) * 1e3,
    )


def long_prompt_costs(trials: int) -> list[LongPromptCost]:
    """Measures every case `trials` times."""
    settle_memory()  # as services do once they run
    return uvloop.run(_measure(trials))


def long_prompt_table(costs: Sequence[LongPromptCost]) -> Table:
    """The figures for people."""
    table = Table(
        title=f"prompts of {PROMPT_TOKENS:,} tokens while {_DECODES} requests decode, one step in "
        "flight: longest wait for a step, ms"
    )
    for heading in ("what comes", "without", "with", "more", "most more"):
        table.add_column(heading, justify="right")
    for cost in costs:
        case, *figures = astuple(cost)
        table.add_row(case, *(f"{figure:.1f}" for figure in figures))
    return table
