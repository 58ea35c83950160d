"""`quire simulate soak`: simulated hours of mixed load; does resident memory stay flat?

The load has three classes, four tenants, varying lengths, shared prefixes, bounds that are longer
than the answers, and clients that go away, on a worker with little memory, so that requests are
preempted and cached blocks evicted all the time.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from quire.cli.command import EXIT_FAILED
from services.scheduler.core.config import DEFAULT_CLASSES, Config
from services.scheduler.simulate.core_flags import add_core_flags, core_config
from services.scheduler.simulate.flags import above_zero, add_common_flags, write_json
from services.scheduler.simulate.load import OpenLoop, Prompts
from services.scheduler.simulate.loop import Simulation
from services.scheduler.simulate.memory import mebibytes, resident_bytes
from services.scheduler.simulate.policies import engine_for
from services.scheduler.simulate.report import refusals
from services.scheduler.simulate.step_model import StepModel
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals

_HOUR_US = 3_600_000_000
_MOST_GROWTH = 0.02
_MOST_GROWTH_BYTES = 8 << 20

_SEQS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state at one simulated time."""

    hours: float
    resident_bytes: int
    completed: int
    ends: dict[str, int]
    live: int
    steps: int
    preemptions: int
    wall_s: float


def soak_model(step_ms: float) -> StepModel:
    """A worker whose steps all take so long, with a KV cache that 64 requests just overfill."""
    return StepModel(
        name="soak",
        base_us=step_ms * 1000,
        per_token_us=0.0,
        per_row_us=0.0,
        per_context_us=0.0,
        blocks=800,
        block_size=16,
        max_num_seqs=_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )


def soak_load(step_ms: float, seed: int) -> Load:
    """About four fifths of what `soak_model` can do."""
    output = Lengths(mean=96, sigma=0.7, most=512)
    per_second = 1000 / step_ms
    return Load(
        requests=None,
        prompt=Lengths(mean=160, sigma=0.8, most=1024),
        output=output,
        bound_output=True,
        rate=0.8 * _SEQS * per_second / (output.mean + 4),
        shared=0.4,
        shared_tokens=96,
        prefixes=50,
        classes=tuple(one.name for one in DEFAULT_CLASSES),
        tenants=("a", "b", "c", "d"),
        cancelled=0.1,
        cancel_after_us=round(5000 * step_ms * 10),
        seed=seed,
    )


def run_soak(
    hours: float, *, step_ms: float, config: Config, seed: int, told: Callable[[Look], None]
) -> list[Look]:
    """Simulates so many hours.

    Args:
        hours: simulated.
        step_ms: of each step.
        config: of the core.
        seed: of the load.
        told: called with each look, of which there are 24.
    """
    model = soak_model(step_ms)
    simulation = Simulation(
        engine_for("fair", config),
        OpenLoop(arrivals(soak_load(step_ms, seed))),
        model,
        Prompts(seed, model.max_model_len),
    )
    started = time.perf_counter()
    looks: list[Look] = []
    for part in range(1, 25):
        simulation.run(until=round(part * hours * _HOUR_US / 24))
        gc.collect()
        counters = simulation.engine.loads().counters
        looks.append(
            Look(
                hours=part * hours / 24,
                resident_bytes=resident_bytes(),
                completed=simulation.figures.all.completed,
                ends=dict(sorted(simulation.figures.ends.items())),
                live=simulation.figures.live,
                steps=counters.steps,
                preemptions=counters.preemptions,
                wall_s=time.perf_counter() - started,
            )
        )
        told(looks[-1])
    return looks


def growth(looks: Sequence[Look]) -> int:
    """Bytes between the means of the second and of the last quarter of the time."""
    quarter = len(looks) // 4
    second, last = looks[quarter : 2 * quarter], looks[-quarter:]
    return round(_mean(last) - _mean(second))


def is_flat(looks: Sequence[Look]) -> bool:
    """Growth within 2 % or 8 MiB, whichever is more."""
    quarter = len(looks) // 4
    bound = max(_MOST_GROWTH * _mean(looks[quarter : 2 * quarter]), _MOST_GROWTH_BYTES)
    return growth(looks) <= bound


def _mean(looks: Sequence[Look]) -> float:
    return sum(look.resident_bytes for look in looks) / len(looks)


class Soak:
    """The command."""

    name = "soak"
    help = "hours of mixed load; is resident memory flat?"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        add_common_flags(parser, model=False)
        parser.add_argument(
            "--hours",
            type=above_zero,
            default=24.0,
            metavar="X",
            help="simulated (default: %(default)s)",
        )
        parser.add_argument(
            "--step-ms",
            type=above_zero,
            default=100.0,
            metavar="X",
            help="how long each step takes (default: %(default)s)",
        )
        add_core_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Runs it; 1 where memory grew."""
        console = Console()
        config = core_config(args, "quire simulate soak")

        def tell(look: Look) -> None:
            refused = refusals(look.ends)
            console.print(
                f"{look.hours:6.2f} h  {mebibytes(look.resident_bytes):>9} resident  "
                f"{look.completed:>8} requests  {look.live:>4} live  {look.steps:>8} steps  "
                f"{look.preemptions:>7} preemptions  {look.wall_s:7.1f} s"
                f"{'  refused: ' if refused else ''}{refused}",
                highlight=False,
                soft_wrap=True,
            )

        looks = run_soak(args.hours, step_ms=args.step_ms, config=config, seed=args.seed, told=tell)
        flat = is_flat(looks)
        verdict = "flat" if flat else "NOT flat"
        grown = growth(looks) / (1 << 20)
        console.print(f"resident memory is {verdict}: {grown:+.1f} MiB from the second quarter on")
        write_json(args.json, {"flat": flat, "looks": [asdict(look) for look in looks]})
        return 0 if flat else EXIT_FAILED


COMMAND = Soak()
