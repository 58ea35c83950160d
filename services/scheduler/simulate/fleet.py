"""`quire simulate fleet`: many schedulers, each with workers of its own, and a million requests.

Schedulers know nothing of one another, so each process runs some of them; within a process they
advance in the order of their simulated times, so that all requests really are live at once.
"""

import argparse
import heapq
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from rich.table import Table

from services.scheduler.core.config import Config
from services.scheduler.simulate.core_flags import add_core_flags, core_config
from services.scheduler.simulate.flags import add_common_flags, positive, write_json
from services.scheduler.simulate.load import OpenLoop, Prompts
from services.scheduler.simulate.loop import Simulation
from services.scheduler.simulate.memory import (
    mebibytes,
    named_if_too_big,
    peak_bytes,
    resident_bytes,
)
from services.scheduler.simulate.metrics import Histogram, Spread
from services.scheduler.simulate.policies import POLICIES, engine_for, shortened
from services.scheduler.simulate.report import console, millis
from services.scheduler.simulate.step_model import StepModel, load_model
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What to simulate.

    Args:
        schedulers: how many.
        workers: of each.
        requests: in all, spread evenly; all come at time 0.
        prompt_tokens: of each.
        output_tokens: of each.
        policy: one of POLICIES.
        config: of each scheduler.
        model: of all workers.
        seed: of the prompts.
    """

    schedulers: int
    workers: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    policy: str
    config: Config
    model: StepModel
    seed: int

    def requests_of(self, scheduler: int) -> int:
        """How many requests one scheduler gets."""
        return self.requests // self.schedulers + (scheduler < self.requests % self.schedulers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process found.

    Args:
        schedulers: it ran.
        completed: requests.
        output_tokens: of them.
        ends: how many ended in which way, refusals included.
        most_live: requests, at one time.
        steps: of all its workers.
        duration_us: simulated time of the scheduler that took longest.
        wall_s: seconds it took.
        peak_bytes: most resident memory.
        queued_bytes: by how much resident memory grew when all requests came, less their tables.
        ttft: microseconds.
        tpot: microseconds.
    """

    schedulers: int
    completed: int
    output_tokens: int
    ends: Counter[str]
    most_live: int
    steps: int
    duration_us: int
    wall_s: float
    peak_bytes: int
    queued_bytes: int
    ttft: Histogram
    tpot: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """What the fleet gave; times of its requests, and what simulating it cost."""

    schedulers: int
    requests: int
    completed: int
    ends: dict[str, int]
    most_live: int
    duration_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    steps: int
    processes: int
    wall_s: float
    simulated_requests_per_s: float
    peak_bytes: tuple[int, ...]
    bytes_per_queued_request: float


def run_part(fleet: Fleet, schedulers: Sequence[int]) -> Part:
    """Runs some of the schedulers in this process."""
    started = time.perf_counter()
    model = shortened(fleet.model, fleet.prompt_tokens + fleet.output_tokens)
    prompts = Prompts(fleet.seed, model.max_model_len)
    simulations = [_simulation(fleet, number, model, prompts) for number in schedulers]
    before = resident_bytes()
    for simulation in simulations:
        simulation.advance()  # everything comes at time 0
    queued_bytes = resident_bytes() - before
    most_live = _run_together(simulations)
    ttft, tpot = Histogram(), Histogram()
    for simulation in simulations:
        ttft.merge(simulation.figures.all.ttft)
        tpot.merge(simulation.figures.all.tpot)
    reports = [simulation.report(fleet.policy) for simulation in simulations]
    return Part(
        schedulers=len(schedulers),
        completed=sum(report.completed for report in reports),
        output_tokens=sum(report.output_tokens for report in reports),
        ends=sum((Counter(report.ends) for report in reports), Counter()),
        most_live=most_live,
        steps=sum(report.steps for report in reports),
        duration_us=max(simulation.now for simulation in simulations),
        wall_s=time.perf_counter() - started,
        peak_bytes=peak_bytes(),
        queued_bytes=queued_bytes,
        ttft=ttft,
        tpot=tpot,
    )


def run_fleet(fleet: Fleet, processes: int) -> FleetReport:
    """Runs all schedulers, in several processes; with 1 in this one."""
    started = time.perf_counter()
    processes = min(processes, fleet.schedulers)
    shares = [range(first, fleet.schedulers, processes) for first in range(processes)]
    if processes == 1:
        parts = [run_part(fleet, shares[0])]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = list(pool.map(run_part, [fleet] * processes, shares))
    wall = time.perf_counter() - started
    ttft, tpot = Histogram(), Histogram()
    for part in parts:
        ttft.merge(part.ttft)
        tpot.merge(part.tpot)
    seconds = max(part.duration_us for part in parts) / 1e6
    completed = sum(part.completed for part in parts)
    most_live = sum(part.most_live for part in parts)
    return FleetReport(
        schedulers=fleet.schedulers,
        requests=fleet.requests,
        completed=completed,
        ends=dict(sorted(sum((part.ends for part in parts), Counter()).items())),
        most_live=most_live,
        duration_s=seconds,
        output_tokens_per_s=sum(part.output_tokens for part in parts) / seconds,
        ttft_ms=ttft.spread(),
        tpot_ms=tpot.spread(),
        steps=sum(part.steps for part in parts),
        processes=processes,
        wall_s=wall,
        simulated_requests_per_s=completed / wall,
        peak_bytes=tuple(part.peak_bytes for part in parts),
        bytes_per_queued_request=sum(part.queued_bytes for part in parts) / max(1, most_live),
    )


def _simulation(fleet: Fleet, number: int, model: StepModel, prompts: Prompts) -> Simulation:
    load = Load(
        requests=fleet.requests_of(number),
        prompt=Lengths(mean=fleet.prompt_tokens),
        output=Lengths(mean=fleet.output_tokens),
        seed=fleet.seed + number,
    )
    engine = engine_for(fleet.policy, fleet.config)
    return Simulation(engine, OpenLoop(arrivals(load)), model, prompts, workers=fleet.workers)


def _run_together(simulations: Sequence[Simulation]) -> int:
    """Runs all to their ends by their times; returns the most requests live at one time."""
    order = [(simulation.now, place) for place, simulation in enumerate(simulations)]
    heapq.heapify(order)
    live = most = sum(simulation.figures.live for simulation in simulations)
    while order:
        _, place = heapq.heappop(order)
        simulation = simulations[place]
        before = simulation.figures.live
        if simulation.advance():
            heapq.heappush(order, (simulation.now, place))
        live += simulation.figures.live - before
        most = max(most, live)
    return most


class FleetCommand:
    """The command."""

    name = "fleet"
    help = "many schedulers with a million requests in all"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        add_common_flags(parser)
        for flag, default, text in (
            ("--schedulers", 8, "how many"),
            ("--workers", 1, "of each scheduler"),
            ("--requests", 1_000_000, "in all; all come at time 0"),
            ("--prompt-tokens", 128, "of each request"),
            ("--output-tokens", 128, "of each request"),
            ("--processes", os.cpu_count() or 1, "that run schedulers"),
        ):
            parser.add_argument(
                flag,
                type=positive,
                default=default,
                metavar="N",
                help=f"{text} (default: %(default)s)",
            )
        parser.add_argument(
            "--policy", choices=POLICIES, default="fair", help="(default: %(default)s)"
        )
        # All requests are to be live at once.
        add_core_flags(parser, is_queue_bounded=False)
        # No two prompts of a fleet share a beginning, so a prefix cache would only take its time.
        parser.set_defaults(core_enable_prefix_caching=["false"])

    def run(self, args: argparse.Namespace) -> int:
        """Runs it and prints the table."""
        fleet = Fleet(
            schedulers=min(args.schedulers, args.requests),
            workers=args.workers,
            requests=args.requests,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            policy=args.policy,
            config=core_config(args, "quire simulate fleet"),
            model=load_model(args.model),
            seed=args.seed,
        )
        with named_if_too_big(f"--model {args.model}"):
            report = run_fleet(fleet, args.processes)
        console().print(_table(fleet, report))
        write_json(args.json, asdict(report))
        return 0


def _table(fleet: Fleet, report: FleetReport) -> Table:
    lengths = f"{fleet.prompt_tokens}/{fleet.output_tokens}"
    table = Table(
        title=f"{report.schedulers} schedulers of {fleet.workers} {fleet.model.name}, {lengths}"
    )
    table.add_column("")
    table.add_column(fleet.policy, justify="right")
    peaks = ", ".join(mebibytes(peak) for peak in report.peak_bytes)
    for name, text in (
        ("requests completed of all", f"{report.completed} / {report.requests}"),
        ("ends", ", ".join(f"{end} {count}" for end, count in report.ends.items())),
        ("live at once at most", str(report.most_live)),
        ("simulated time", f"{report.duration_s:.1f} s"),
        ("output tokens / s", f"{report.output_tokens_per_s:.0f}"),
        ("TTFT p50 / p99", f"{millis(report.ttft_ms.p50)} / {millis(report.ttft_ms.p99)}"),
        ("TPOT p50 / p99", f"{millis(report.tpot_ms.p50)} / {millis(report.tpot_ms.p99)}"),
        ("steps", str(report.steps)),
        ("wall time", f"{report.wall_s:.1f} s on {report.processes} processes"),
        ("requests simulated / s", f"{report.simulated_requests_per_s:.0f}"),
        ("peak memory of each process", peaks),
        ("memory per queued request", f"{report.bytes_per_queued_request:.0f} bytes"),
    ):
        table.add_row(name, text)
    return table


COMMAND = FleetCommand()
