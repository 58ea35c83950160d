"""`quire simulate fit`: a step model from the steps of a recorded run.

Least squares of relative errors over (1, tokens, rows, context), non-negative by dropping the most
negative feature in turn, as active set methods do (Lawson and Hanson, "Solving Least Squares
Problems", 1974, chapter 23). Steps that took more than four times as long as a first fit says
(first calls, hiccups) are left out of the second one.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from services.scheduler.core.plan import WorkerSpec
from services.scheduler.core.step_time import StepShape
from services.scheduler.journal_codec import JournalError
from services.scheduler.journal_reader import read_workers, step_samples
from services.scheduler.simulate.step_model import InputError, StepModel, write_model

_FEWEST = 32
_OUTLIER = 4.0

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients, all >= 0, and how well they say what was seen.

    Args:
        base_us: see StepModel, here and below.
        steps: used.
        left_out: taken for hiccups.
        median_error: relative error of a step, absolute, median.
        p90_error: the same, 90th percentile.
    """

    base_us: float
    per_token_us: float
    per_row_us: float
    per_context_us: float
    steps: int
    left_out: int
    median_error: float
    p90_error: float


def fit_steps(samples: Iterable[tuple[StepShape, int]]) -> Fit:
    """Fits the durations of steps, in microseconds, by their shapes.

    Raises:
        ValueError: fewer than 32 steps.
    """
    rows = [
        (1.0, shape.tokens, shape.rows, shape.context, micros)
        for shape, micros in samples
        if micros > 0 and shape.tokens > 0
    ]
    if len(rows) < _FEWEST:
        raise ValueError(f"needs at least {_FEWEST} steps with a duration, got {len(rows)}")
    table = np.array(rows, np.float64)
    features, micros = table[:, :4], table[:, 4]
    first = _non_negative(features, micros)
    kept = micros <= _OUTLIER * np.maximum(features @ first, 1.0)
    if np.count_nonzero(kept) < _FEWEST:
        kept[:] = True
    features, micros = features[kept], micros[kept]
    found = _non_negative(features, micros)
    errors = np.abs(features @ found - micros) / micros
    base, token, row, context = (float(f"{value:.6g}") for value in found)
    return Fit(
        base_us=base,
        per_token_us=token,
        per_row_us=row,
        per_context_us=context,
        steps=int(micros.size),
        left_out=int(kept.size - micros.size),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
    )


def fitted_model(fit: Fit, worker: WorkerSpec, name: str, source: str) -> StepModel:
    """The model of a fit, with the limits of the worker that it was seen on."""
    return StepModel(
        name=name,
        base_us=fit.base_us,
        per_token_us=fit.per_token_us,
        per_row_us=fit.per_row_us,
        per_context_us=fit.per_context_us,
        blocks=worker.num_blocks,
        block_size=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        sources=(
            f"{source}: least squares over {fit.steps} steps ({fit.left_out} left out as hiccups); "
            f"relative error {fit.median_error:.1%} at the median, {fit.p90_error:.1%} at p90.",
        ),
    )


def _non_negative(features: _Floats, micros: _Floats) -> _Floats:
    """Coefficients >= 0 that make the sum of squared relative errors least."""
    weighted = features / micros[:, None]
    scale = np.sqrt((weighted**2).sum(axis=0))
    active = [place for place in range(features.shape[1]) if scale[place] > 0]
    found = np.zeros(features.shape[1])
    while active:
        columns = weighted[:, active] / scale[active]
        solution = np.linalg.lstsq(columns, np.ones(micros.size), rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0:
            found[active] = solution / scale[active]
            break
        del active[worst]
    return found


class FitCommand:
    """The command."""

    name = "fit"
    help = "make a step model of a recorded run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        parser.add_argument("recording", type=Path, metavar="RECORDING", help="file of --record")
        parser.add_argument(
            "-o", "--output", type=Path, required=True, metavar="FILE", help="YAML file to write"
        )
        parser.add_argument("--name", metavar="NAME", help="of the model (default: of the file)")

    def run(self, args: argparse.Namespace) -> int:
        """Fits and writes."""
        path: Path = args.recording
        try:
            workers = read_workers(path)
            fit = fit_steps(step_samples(path))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        except (JournalError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error
        if not workers:
            raise InputError(f"{path}: no worker was attached")
        name = args.name or args.output.stem
        write_model(fitted_model(fit, workers[0], name, f"Recorded run {path.name}"), args.output)
        Console(markup=False, emoji=False).print(
            f"{args.output}: {fit.base_us:g} µs + {fit.per_token_us:g} a token + "
            f"{fit.per_row_us:g} a row + {fit.per_context_us:g} a token of context, from "
            f"{fit.steps} steps; relative error {fit.median_error:.1%} at the median, "
            f"{fit.p90_error:.1%} at p90",
            highlight=False,
            soft_wrap=True,
        )
        return 0


COMMAND = FitCommand()
