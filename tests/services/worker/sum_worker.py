"""A link whose executor adds up tokens instead of running a model, and a scheduler's end for it."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from services.worker.link import SchedulerLink
from services.worker.model_thread import ModelThread
from services.worker.plan import Registration, StepLimits, StepPlan, StepResult
from services.worker.rows import RequestRows
from services.worker.stream import LinkOptions
from tests.fakes.scheduler_link import FakeScheduler

LIMITS = StepLimits(
    block_size=4,
    num_blocks=16,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=32,
    vocab_size=97,
    max_in_flight=2,
)
REGISTRATION = Registration(
    worker_id="w-0",
    instance_id="i-1",
    model="sums",
    model_digest="d",
    dtype="float32",
    device="cpu",
    limits=LIMITS,
    eos_token_ids=(0,),
)


def next_token(tokens):
    """What the executor below "samples" after `tokens`."""
    return (int(np.sum(tokens)) * 31 + len(tokens)) % LIMITS.vocab_size


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def eventually(condition):
    """Waits for what another thread or the network is about to do."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not happen")


class SumExecutor:
    """Real rows; the model is a sum over the row. Steps wait for `gate`, and fail as told."""

    def __init__(self, attachment):
        self.rows = RequestRows(attachment, LIMITS)
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[int] = []
        self.fails: dict[int, Exception] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.started.append(plan.step_id)
        assert self.gate.wait(10)
        if plan.step_id in self.fails:
            raise self.fails[plan.step_id]
        rows = self.rows
        rows.apply(plan)
        rows.advance(plan.slots, plan.num_tokens)
        sampled = plan.slots[rows.computed[plan.slots] == rows.known[plan.slots]]
        failures = rows.failures(plan.slots)
        sampled = sampled[~np.isin(sampled, [failure.slot for failure in failures])]
        tokens = np.array(
            [next_token(rows.tokens[slot, : rows.known[slot]]) for slot in sampled], np.int64
        )
        rows.append_tokens(sampled, tokens)
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=np.isin(plan.slots, sampled).astype(np.uint8),
            token_ids=tokens.astype(np.uint32),
            failures=failures,
        )


class Worker:
    """The link under test, and what it did."""

    def __init__(self, address, drain_timeout_s=5.0, register_timeout_s=10.0, observe=None):
        self.stopping = asyncio.Event()
        self.executors: list[SumExecutor] = []
        self.ready: list[bool] = []
        self.thread = ModelThread(asyncio.get_running_loop())
        self.link = SchedulerLink(
            LinkOptions(
                target=address,
                registration=REGISTRATION,
                drain_timeout_s=drain_timeout_s,
                register_timeout_s=register_timeout_s,
            ),
            make_executor=self._make,
            thread=self.thread,
            on_ready=self._on_ready,
            observe=observe,
        )

    def _make(self, attachment):
        self.executors.append(SumExecutor(attachment))
        return self.executors[-1]

    async def _on_ready(self, ready):
        self.ready.append(ready)

    async def received(self, steps):
        """Waits until so many steps have been received and not begun."""
        await eventually(lambda: self.thread._jobs.qsize() == steps)


@contextlib.asynccontextmanager
async def running(worker):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.link.run(worker.stopping))
        try:
            yield task
        finally:
            for executor in worker.executors:
                executor.gate.set()
            worker.stopping.set()
    assert await worker.thread.close(5)


@contextlib.asynccontextmanager
async def attached(address, **options):
    """A worker, its scheduler, and their link at epoch 1."""
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address, **options)
        async with running(worker):
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            yield worker, scheduler, link
