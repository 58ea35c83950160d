"""`quire bench recording`: what `--record` adds to a step of the scheduler core.

The same decoding requests in a bare core, a recorded one and one recorded without token ids, a step
of each in turn, as the engine loop drives them: expire, plan, plan in vain, apply. The thread that
writes the file is counted by its processor time.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from services.scheduler import journal_codec
from services.scheduler.core.config import Config
from services.scheduler.core.plan import AddRequest, Sampling, StepPlan, StepResult, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from services.scheduler.journal import Journal, clocks
from services.scheduler.recording import RecordingScheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64
_WORKER = "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingCost:
    """Medians over the steps timed, microseconds.

    Args:
        rows: requests that decode.
        mode: "off", "tokens" or "hashes".
        us_per_step: of the core, or of the recorded core.
        added_us_per_step: median difference to the bare core's step beside it.
        writer_us_per_step: processor time of all other threads, mean.
        bytes_per_step: of the file, mean.
    """

    rows: int
    mode: str
    us_per_step: float
    added_us_per_step: float
    writer_us_per_step: float
    bytes_per_step: float


class _Subject:
    """One core with its requests, in decode steady state with a step open."""

    def __init__(self, core: Scheduler | RecordingScheduler, rows: int, steps: int) -> None:
        self._core = core
        max_tokens = steps + 2 * _BLOCK_SIZE
        total = _PROMPT_TOKENS + _BLOCK_SIZE + max_tokens
        spec = WorkerSpec(
            worker_id=_WORKER,
            num_blocks=rows * (total // _BLOCK_SIZE + 2),
            block_size=_BLOCK_SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * 2 * _PROMPT_TOKENS,
            max_model_len=total,
            vocab_size=50_000,
            eos_token_ids=(2,),
            max_in_flight=2,
            model_digest=b"benchmark",
        )
        core.attach(spec, 0)
        draw = np.random.default_rng(0)
        for row in range(rows):
            size = _PROMPT_TOKENS + row % _BLOCK_SIZE  # borders of blocks spread over the steps
            core.add(
                AddRequest(
                    request_id=str(row),
                    handle=row,
                    attempt=0,
                    prompt=draw.integers(10, 50_000, size).astype(np.uint32),
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
                ),
                0,
            )
        self._computed = np.zeros(spec.num_slots, np.int64)
        self._known = np.zeros(spec.num_slots, np.int64)
        self._open = self._planned()
        while self._open.slots.size < rows or self._open.new_rows:
            core.apply(_WORKER, self._answer(self._open), 0)
            self._open = self._planned()

    def step(self, now: int) -> float:
        """Seconds of one turn of the engine loop."""
        result = self._answer(self._open)
        started = time.perf_counter()
        self._core.expire(now)
        step = self._core.plan(_WORKER, now)
        self._core.plan(_WORKER, now)
        self._core.apply(_WORKER, result, now)
        taken = time.perf_counter() - started
        assert step is not None, "two steps in flight: one is planned before the other's answer"
        self._open = step
        return taken

    def _planned(self) -> StepPlan:
        step = self._core.plan(_WORKER, 0)
        assert step is not None, "there is always something to do"
        return step

    def _answer(self, step: StepPlan) -> StepResult:
        for row in step.new_rows:
            self._known[row.slot] = row.token_ids.size
            self._computed[row.slot] = row.num_computed
        self._computed[step.slots] += step.num_tokens
        samples = self._computed[step.slots] == self._known[step.slots]
        self._known[step.slots] += samples
        return StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=samples.astype(np.uint8),
            token_ids=np.full(int(samples.sum()), 7, np.uint32),
        )


def recording_costs(rows: int, *, steps: int, folder: Path) -> list[RecordingCost]:
    """Times `steps` steps of each kind beside each other."""
    config = Config()
    bare = _Subject(Scheduler(config, SHA256), rows, 3 * steps)
    costs: list[RecordingCost] = []
    for mode in ("tokens", "hashes"):
        hash_only = mode == "hashes"
        header = journal_codec.header(
            config=config, prefix_hash="sha256", hash_key=b"", hash_only=hash_only, clocks=clocks()
        )
        journal = Journal(folder / f"{mode}-{rows}", header)
        core = RecordingScheduler(config, SHA256, journal, hash_only=hash_only)
        recorded = _Subject(core, rows, steps)
        before = journal.path.stat().st_size
        off, on = [], []
        others = time.process_time() - time.thread_time()
        for number in range(steps):
            # Each goes first in half of the pairs.
            first, second = (bare, recorded) if number % 2 else (recorded, bare)
            pair = {id(first): first.step(number), id(second): second.step(number)}
            off.append(pair[id(bare)] * 1e6)
            on.append(pair[id(recorded)] * 1e6)
        core.finish_recording()
        journal.close()
        others = time.process_time() - time.thread_time() - others
        if not costs:
            costs.append(_cost(rows, "off", off, off, 0.0, 0.0))
        size = journal.path.stat().st_size - before
        costs.append(_cost(rows, mode, on, off, others * 1e6 / steps, size / steps))
    return costs


def _cost(
    rows: int, mode: str, on: list[float], off: list[float], writer: float, size: float
) -> RecordingCost:
    added = [with_it - without for with_it, without in zip(on, off, strict=True)]
    return RecordingCost(
        rows=rows,
        mode=mode,
        us_per_step=statistics.median(on),
        added_us_per_step=statistics.median(added),
        writer_us_per_step=writer,
        bytes_per_step=size,
    )


class RecordingBench:
    """The subcommand."""

    name = "recording"
    help = "what recording adds to a step of the scheduler core"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        parser.add_argument("--rows", default="1,32,256", help="row counts, comma separated")
        parser.add_argument("--steps", type=int, default=1000, help="steps timed per row count")
        parser.add_argument("--json", type=Path, help="also write the figures to this file")

    def run(self, args: argparse.Namespace) -> int:
        """Measures and prints."""
        gc.collect()
        gc.freeze()
        with tempfile.TemporaryDirectory() as folder:
            costs = [
                cost
                for rows in args.rows.split(",")
                for cost in recording_costs(int(rows), steps=args.steps, folder=Path(folder))
            ]
        table = Table(title="a step of the core, recorded")
        for heading in ("rows", "record", "µs / step", "added", "writer thread", "bytes / step"):
            table.add_column(heading, justify="right")
        for cost in costs:
            table.add_row(
                str(cost.rows),
                cost.mode,
                f"{cost.us_per_step:.0f}",
                f"{cost.added_us_per_step:.1f}",
                f"{cost.writer_us_per_step:.1f}",
                f"{cost.bytes_per_step:.0f}",
            )
        Console().print(table)
        if args.json:
            args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1))
        return 0


COMMAND = RecordingBench()
