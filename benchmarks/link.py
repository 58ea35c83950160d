"""`quire bench link`: what the step link costs per step, with a real scheduler and no model.

A scheduler process serves on a unix socket. This process is its worker, which answers every step at
once, and its tokenizer, which has as many requests running as there are rows. With one step in
flight nothing hides the link: the time from writing a result to reading the next step is all that
stands between two steps, `apply` and `plan` included.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from quire.cli.command import CommandError
from quire.v1 import generation_pb2, token_pb2, token_pb2_grpc, worker_pb2, worker_pb2_grpc

_VOCAB = 50_000
_PROMPT_TOKENS = 16
_WARMUP_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Microseconds from writing a result to reading the next step."""

    rows: int
    us_p50: float
    us_p90: float
    us_p99: float


class _NullWorker:
    """Registers, and answers steps at once: every row that reaches its last token gives a 7."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._known = np.zeros(0, np.int64)
        self._computed = np.zeros(0, np.int64)

    async def register(self, rows: int, tokens: int) -> None:
        blocks = rows * (tokens // 16 + 2)
        register = worker_pb2.Register(
            worker_id="null",
            instance_id="null",
            protocol_major=1,
            model="null",
            model_digest="null",
            dtype="none",
            device="none",
            block_size=16,
            num_blocks=blocks,
            max_num_seqs=rows,
            max_num_batched_tokens=max(2048, rows),
            max_model_len=tokens + 16,
            vocab_size=_VOCAB,
            max_in_flight=1,
        )
        await self._call.write(worker_pb2.AttachRequest(register=register))
        registered = (await self._call.read()).registered
        self._known = np.zeros(registered.num_slots, np.int64)
        self._computed = np.zeros(registered.num_slots, np.int64)

    async def step(self) -> worker_pb2.Step:
        message = await self._call.read()
        if message is grpc.aio.EOF or message.WhichOneof("message") != "step":
            raise CommandError("the scheduler ended the link")
        step: worker_pb2.Step = message.step
        return step

    async def answer(self, step: worker_pb2.Step) -> None:
        for new in step.new_requests:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.num_computed
        slots = np.frombuffer(step.slots, "<u4")
        self._computed[slots] += np.frombuffer(step.num_tokens, "<u4")
        samples = self._computed[slots] == self._known[slots]
        self._known[slots] += samples
        result = worker_pb2.StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=samples.astype(np.uint8).tobytes(),
            token_ids=np.full(int(samples.sum()), 7, "<u4").tobytes(),
        )
        await self._call.write(worker_pb2.AttachRequest(result=result))


async def link_cost(rows: int, *, steps: int) -> LinkCost:
    """Times `steps` decode steps of `rows` requests against a scheduler process."""
    max_tokens = steps + 2 * _WARMUP_STEPS + rows
    with tempfile.TemporaryDirectory(prefix="quire-link-") as folder:
        target = f"unix://{folder}/s.sock"
        async with _scheduler(target), grpc.aio.insecure_channel(target) as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            attach: Any = worker_pb2_grpc.WorkerLinkServiceStub(channel)
            session: Any = token_pb2_grpc.TokenServiceStub(channel)
            worker = _NullWorker(attach.Attach())
            await worker.register(rows, _PROMPT_TOKENS + max_tokens)
            tokens = session.Session()
            await _submit(tokens, rows, max_tokens)
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(_drain(tokens))
                times = await _timed(worker, rows, steps)
                reader.cancel()
    p50, p90, p99 = np.percentile(np.array(times) * 1e6, (50, 90, 99))
    return LinkCost(rows=rows, us_p50=float(p50), us_p90=float(p90), us_p99=float(p99))


async def _timed(worker: _NullWorker, rows: int, steps: int) -> list[float]:
    times: list[float] = []
    warm = 0
    step = await worker.step()
    while len(times) < steps:
        started = time.perf_counter()
        await worker.answer(step)
        step = await worker.step()
        elapsed = time.perf_counter() - started
        if len(step.slots) == 4 * rows and not step.new_requests:
            warm += 1
            if warm > _WARMUP_STEPS:
                times.append(elapsed)
    return times


async def _submit(call: Any, rows: int, max_tokens: int) -> None:
    hello = token_pb2.Hello(instance_id="bench", protocol_major=1)
    await call.write(token_pb2.SessionRequest(hello=hello))
    await call.read()
    prompts = np.random.default_rng(0).integers(10, _VOCAB, (rows, _PROMPT_TOKENS), np.uint32)
    for row in range(rows):
        request = token_pb2.TokenRequest(
            request_id=str(row),
            prompt=generation_pb2.TokenIds(packed=prompts[row].astype("<u4").tobytes()),
            stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        )
        submit = token_pb2.Submit(stream_id=row + 1, request=request)
        await call.write(token_pb2.SessionRequest(submit=submit))


async def _drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@contextlib.asynccontextmanager
async def _scheduler(target: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.scheduler", "--listen", target),
        *("--log-level", "error"),
        env=dict(os.environ),
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


class LinkBench:
    """The subcommand."""

    name = "link"
    help = "cost of the step link per step, without a model"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        parser.add_argument("--rows", default="1,32,256", help="row counts, comma separated")
        parser.add_argument("--steps", type=int, default=1000, help="steps timed per row count")
        parser.add_argument("--json", type=Path, help="also write the figures to this file")

    def run(self, args: argparse.Namespace) -> int:
        """Measures and prints."""
        costs = [
            asyncio.run(link_cost(int(rows), steps=args.steps)) for rows in args.rows.split(",")
        ]
        table = Table(title="result written to next step read, one step in flight")
        for heading in ("rows", "p50 µs", "p90 µs", "p99 µs"):
            table.add_column(heading, justify="right")
        for cost in costs:
            figures = (cost.us_p50, cost.us_p90, cost.us_p99)
            table.add_row(str(cost.rows), *(f"{figure:.0f}" for figure in figures))
        Console().print(table)
        if args.json:
            args.json.write_text(json.dumps({"link": [asdict(cost) for cost in costs]}, indent=1))
        return 0


COMMAND = LinkBench()
