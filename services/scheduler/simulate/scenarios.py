"""The four mixes of prompt and output lengths at several levels of concurrency, v0 against ours."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from services.scheduler.core.config import Config
from services.scheduler.simulate.load import ClosedLoop
from services.scheduler.simulate.policies import V0, run_policy
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.step_model import StepModel
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals

MIXES = ((128, 128), (8192, 128), (128, 2048), (8192, 2048))
"""Tokens of prompt and output."""

CONCURRENCIES = (1, 8, 32, 64, 128)

OUTPUT_SIGMA = 0.5
"""How outputs vary unless asked otherwise. Where all are equal a static batch ends at once and
wastes nothing, which no real load gives it.
"""

_FEWEST_REQUESTS = 8
_LONGEST_OUTPUT = 2
"""Of outputs that vary: times their mean; it is also the bound that each request carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the table.

    Args:
        prompt_tokens: of each request.
        output_tokens: of each request, or their mean.
        concurrency: clients of the closed loop.
        policy: "v0" or an order of the core's queue.
        rounds: requests of each client.
        output_sigma: outputs vary log-normally by it; each request then carries the longest as its
            bound.
        reserve_context: v0 reserves the model's longest context for each request.
        seed: decides lengths and tokens.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    policy: str
    rounds: int = 4
    output_sigma: float = OUTPUT_SIGMA
    reserve_context: bool = False
    seed: int = 0

    @property
    def load(self) -> Load:
        """What the cell's clients ask for."""
        most = _LONGEST_OUTPUT * self.output_tokens
        return Load(
            requests=max(_FEWEST_REQUESTS, self.rounds * self.concurrency),
            prompt=Lengths(mean=self.prompt_tokens),
            output=Lengths(mean=self.output_tokens, sigma=self.output_sigma, most=most),
            bound_output=self.output_sigma > 0,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell and what it gave."""

    cell: Cell
    report: Report


def cells(
    mixes: Sequence[tuple[int, int]],
    concurrencies: Sequence[int],
    ours: str,
    **options: int | float | bool,
) -> list[Cell]:
    """All cells of a table, v0 before ours; `options` are fields of Cell."""
    return [
        Cell(
            prompt_tokens=prompt,
            output_tokens=output,
            concurrency=concurrency,
            policy=policy,
            **options,  # type: ignore[arg-type]  # fields by name
        )
        for prompt, output in mixes
        for concurrency in concurrencies
        for policy in (V0, ours)
    ]


def run_cell(cell: Cell, model: StepModel, config: Config) -> Result:
    """Runs one cell."""
    source = ClosedLoop(arrivals(cell.load), cell.concurrency)
    report = run_policy(
        cell.policy,
        source,
        model,
        config=config,
        longest=cell.load.longest,
        seed=cell.seed,
        reserve_context=cell.reserve_context,
    )
    return Result(cell=cell, report=report)


def run_cells(
    wanted: Sequence[Cell],
    model: StepModel,
    config: Config,
    *,
    processes: int,
    done: Callable[[], None],
) -> list[Result]:
    """Runs cells, in several processes; results in the order of the cells.

    Args:
        wanted: the cells.
        model: of the workers.
        config: of the core.
        processes: how many; 1: this one alone.
        done: called after each.
    """
    if processes == 1:
        return _counted((run_cell(cell, model, config) for cell in wanted), done)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(wanted)), mp_context=context) as pool:
        # Long ones first, so that no process is left with one at the end.
        order = sorted(range(len(wanted)), key=lambda place: -_cost(wanted[place]))
        futures = {place: pool.submit(run_cell, wanted[place], model, config) for place in order}
        return _counted((futures[place].result() for place in range(len(wanted))), done)


def _counted(results: Iterable[Result], done: Callable[[], None]) -> list[Result]:
    found = []
    for result in results:
        found.append(result)
        done()
    return found


def _cost(cell: Cell) -> int:
    rounds = cell.rounds * cell.concurrency
    return rounds * (cell.prompt_tokens // 16 + cell.output_tokens)
