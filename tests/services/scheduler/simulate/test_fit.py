"""Fitting of step models."""

from collections.abc import Iterator

import numpy as np
import pytest

from services.scheduler.core.step_time import StepShape
from services.scheduler.simulate.fit import fit_steps, fitted_model
from services.scheduler.simulate.step_model import load_model


def steps(count: int, noise: float, *, row_us: float = 30.0) -> Iterator[tuple[StepShape, int]]:
    draw = np.random.default_rng(1)
    for _ in range(count):
        rows = int(draw.integers(1, 64))
        prefill = int(draw.integers(1, 500)) if draw.random() < 0.3 else 0
        context = int(rows * draw.integers(50, 2000))
        shape = StepShape(tokens=rows + prefill, rows=rows, context=context)
        micros = 8000 + 40 * shape.tokens + row_us * rows + 0.02 * context
        yield shape, round(micros * draw.normal(1, noise))


def test_exact_steps_give_the_coefficients_back() -> None:
    fit = fit_steps(steps(500, 0.0))
    assert fit.base_us == pytest.approx(8000, rel=0.001)
    assert fit.per_token_us == pytest.approx(40, rel=0.001)
    assert fit.per_row_us == pytest.approx(30, rel=0.01)
    assert fit.per_context_us == pytest.approx(0.02, rel=0.01)
    assert fit.steps == 500
    assert fit.median_error < 0.001


def test_noise_and_hiccups_hardly_matter() -> None:
    noisy = list(steps(2000, 0.05))
    for place in range(0, 2000, 100):
        shape, micros = noisy[place]
        noisy[place] = (shape, 40 * micros)
    fit = fit_steps(noisy)
    assert fit.left_out == 20
    assert fit.base_us == pytest.approx(8000, rel=0.05)
    assert fit.per_token_us == pytest.approx(40, rel=0.05)
    assert 0.02 < fit.median_error < 0.05


def test_coefficients_are_never_negative() -> None:
    fit = fit_steps(steps(500, 0.0, row_us=-20.0))
    assert fit.per_row_us == 0.0
    assert min(fit.base_us, fit.per_token_us, fit.per_context_us) >= 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 32 steps with a duration, got 31"):
        fit_steps(steps(31, 0.0))


def test_a_model_has_the_limits_of_the_worker_and_says_what_it_is_from() -> None:
    worker = load_model("smollm2-2cpu").spec("w")
    model = fitted_model(fit_steps(steps(100, 0.02)), worker, "mine", "Recorded run x")
    assert (model.blocks, model.max_num_seqs) == (worker.num_blocks, worker.max_num_seqs)
    assert model.name == "mine"
    assert model.sources[0].startswith("Recorded run x: least squares over 100 steps")
