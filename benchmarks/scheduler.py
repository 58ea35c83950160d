"""`quire bench scheduler`: what one step costs the scheduler core, without worker and grpc.

Decode steady state: every row computes one token per step, two steps are in flight, block tables
grow and filled blocks are hashed and registered as in service. Timed is `plan` + `apply`.
"""

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scheduler_blocks import SMALLEST, block_costs, block_table
from benchmarks.scheduler_hash import hash_costs, hash_table
from benchmarks.scheduler_long_prompt import long_prompt_costs, long_prompt_table
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Sampling,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64
_VOCAB = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Cost of `plan` + `apply` per step, medians and 99th percentiles over the steps timed."""

    rows: int
    prefix_caching: bool
    us_per_step: float
    us_per_step_p99: float
    us_per_row: float


class _EchoWorker:
    """Knows which rows sample; every sampled token is the same."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def answer(self, plan: StepPlan) -> StepResult:
        for row in plan.new_rows:
            self._known[row.slot] = row.token_ids.size
            self._computed[row.slot] = row.num_computed
        counts = np.zeros(plan.slots.size, np.uint8)
        work = zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
        for place, (slot, tokens) in enumerate(work):
            self._computed[slot] += tokens
            if self._computed[slot] == self._known[slot]:
                self._known[slot] += 1
                counts[place] = 1
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=counts,
            token_ids=np.full(int(counts.sum()), 7, np.uint32),
        )


def decode_cost(rows: int, *, steps: int, prefix_caching: bool) -> DecodeCost:
    """Times `steps` steps of `rows` decoding requests."""
    core = Scheduler(Config(enable_prefix_caching=prefix_caching), SHA256)
    max_tokens = steps + 2 * _BLOCK_SIZE
    total = _PROMPT_TOKENS + _BLOCK_SIZE + max_tokens
    spec, _, _ = core.attach(
        WorkerSpec(
            worker_id="echo",
            num_blocks=rows * (total // _BLOCK_SIZE + 2),
            block_size=_BLOCK_SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * 2 * _PROMPT_TOKENS,
            max_model_len=total,
            vocab_size=_VOCAB,
            eos_token_ids=(2,),
            max_in_flight=2,
            model_digest=b"benchmark",
        ),
        0,
    )
    worker = _EchoWorker()
    prompts = np.random.default_rng(0).integers(10, _VOCAB, (rows, _PROMPT_TOKENS + _BLOCK_SIZE))
    for row in range(rows):
        # Different lengths, so that block borders are spread over the steps.
        prompt = prompts[row, : _PROMPT_TOKENS + row % _BLOCK_SIZE].astype(np.uint32)
        core.add(
            AddRequest(
                request_id=str(row),
                handle=row,
                attempt=0,
                prompt=prompt,
                max_tokens=max_tokens,
                ignore_eos=True,
                sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
            ),
            0,
        )
    open_step = _steady(core, worker, spec)
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = core.plan("echo", 0)
        planned = time.perf_counter() - started
        assert plan is not None, "two steps in flight: the next one is planned before the answer"
        result = worker.answer(open_step)
        started = time.perf_counter()
        core.apply("echo", result, 0)
        times.append(planned + time.perf_counter() - started)
        open_step = plan
    micros = np.array(times) * 1e6
    return DecodeCost(
        rows=rows,
        prefix_caching=prefix_caching,
        us_per_step=float(np.median(micros)),
        us_per_step_p99=float(np.percentile(micros, 99)),
        us_per_row=float(np.median(micros)) / rows,
    )


def _steady(core: Scheduler, worker: _EchoWorker, spec: WorkerSpec) -> StepPlan:
    """Runs until every request decodes; returns the one open step."""
    while True:
        plan = core.plan(spec.worker_id, 0)
        assert plan is not None
        if plan.slots.size == spec.max_num_seqs and not plan.new_rows:
            return plan
        core.apply(spec.worker_id, worker.answer(plan), 0)


def _row_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers >= 1 with commas, got {text!r}")
    return counts


def _step_count(text: str) -> int:
    steps = int(text) if text.isdecimal() else 0
    if steps < 10:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 10, got {text!r}")
    return steps


class SchedulerBench:
    """The subcommand."""

    name = "scheduler"
    help = "cost of a step in the scheduler core"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        parser.add_argument(
            "--rows",
            type=_row_counts,
            default=(1, 32, 256, 1024),
            help="row counts, comma separated, each >= 1 (default: 1,32,256,1024)",
        )
        parser.add_argument(
            "--steps",
            type=_step_count,
            default=400,
            help="steps timed per row count, >= 10 (default: 400)",
        )
        parser.add_argument(
            "--long-prompts",
            type=int,
            default=5,
            metavar="TRIALS",
            help="trials of long prompts that come while others decode; 0: none (default: 5)",
        )
        parser.add_argument(
            "--blocks",
            type=_pool_sizes,
            default=(1000, 1_000_000),
            metavar="SIZES",
            help=f"cached blocks, comma separated, each 0 or >= {SMALLEST}; 0: none "
            "(default: 1000,1000000)",
        )
        parser.add_argument("--json", type=Path, help="also write the figures to this file")

    def run(self, args: argparse.Namespace) -> int:
        """Measures and prints."""
        gc.collect()
        gc.freeze()
        costs = [
            decode_cost(rows, steps=args.steps, prefix_caching=caching)
            for rows in args.rows
            for caching in (True, False)
        ]
        table = Table(title="plan + apply, decode steady state")
        for heading in ("rows", "prefix cache", "µs / step", "p99", "µs / row"):
            table.add_column(heading, justify="right")
        for cost in costs:
            table.add_row(
                str(cost.rows),
                "on" if cost.prefix_caching else "off",
                f"{cost.us_per_step:.0f}",
                f"{cost.us_per_step_p99:.0f}",
                f"{cost.us_per_row:.2f}",
            )
        Console().print(table)
        hashes = hash_costs()
        Console().print(hash_table(hashes))
        long_prompts = long_prompt_costs(args.long_prompts) if args.long_prompts > 0 else []
        if long_prompts:
            Console().print(long_prompt_table(long_prompts))
        blocks = block_costs(args.blocks)
        if blocks:
            Console().print(block_table(blocks))
        if args.json:
            figures = {
                "decode": [asdict(cost) for cost in costs],
                "hash": [asdict(cost) for cost in hashes],
                "long_prompt": [asdict(cost) for cost in long_prompts],
                "blocks": [asdict(cost) for cost in blocks],
            }
            args.json.write_text(json.dumps(figures, indent=1))
        return 0


def _pool_sizes(text: str) -> tuple[int, ...]:
    sizes = [int(part) for part in text.split(",")]
    if any(0 != size < SMALLEST for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: pools of fewer than {SMALLEST} blocks")
    return tuple(size for size in sizes if size)


COMMAND = SchedulerBench()
