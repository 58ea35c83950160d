import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.step_time import StepShape, StepTimeModel

# All products of one step of a small model on a CPU: tokens, milliseconds.
CURVE = ((1, 32.0), (8, 57.0), (32, 89.0), (128, 160.0), (512, 750.0), (2048, 3100.0))


def curve_us(shape: StepShape) -> float:
    for (low, before), (high, after) in itertools.pairwise(CURVE):
        if shape.tokens <= high:
            part = (shape.tokens - low) / (high - low)
            return 1000 * (before + part * (after - before)) + 5 * shape.context
    raise AssertionError(shape)


def linear_us(shape: StepShape) -> int:
    return 20_000 + 700 * shape.tokens + 300 * shape.rows + 2 * shape.context


def shapes(seed: int) -> Iterator[StepShape]:
    """Decodes of a changing batch, a chunk of some size in every fourth step."""
    draw = random.Random(seed)
    while True:
        rows = draw.randint(1, 32)
        context = sum(draw.randint(1, 500) for _ in range(rows))
        chunk = draw.randint(1, 256) if draw.random() < 0.25 else 0
        yield StepShape(rows + chunk, rows + (chunk > 0), context + chunk)


def learned(steps: int, seed: int = 1, factor: float = 1) -> StepTimeModel:
    model = StepTimeModel()
    for shape, _ in zip(shapes(seed), range(steps), strict=False):
        model.observe(shape, int(linear_us(shape) * factor))
    return model


class Serving:
    """Rows that decode, prompts that come and are cut by the model, and a noisy machine."""

    def __init__(self, *, target_ms: int, rows: int, arrivals: float, noise: float) -> None:
        self.model = StepTimeModel()
        self.target_us = 1000 * target_ms
        self.rows = rows
        self.arrivals = arrivals
        self.noise = noise
        self.factor = 1.0
        self.left = 0
        self.computed = 0
        self._draw = random.Random(5)

    def step(self) -> tuple[int, int]:
        """Prefill tokens of one step, and how long it took."""
        if not self.left and self._draw.random() < self.arrivals:
            self.left, self.computed = 2000, 0
        decodes = StepShape(self.rows, self.rows, 300 * self.rows)
        chunk = 0
        if self.left:
            most = self.model.tokens_within(self.target_us, decodes, self.computed)
            chunk = min(self.left, 512 if most is None else most)
        shape = decodes
        if chunk:
            self.left -= chunk
            self.computed += chunk
            shape = StepShape(
                decodes.tokens + chunk, decodes.rows + 1, decodes.context + self.computed
            )
        noise = self._draw.uniform(1 - self.noise, 1 + self.noise)
        took = int(curve_us(shape) * noise * self.factor)
        self.model.observe(shape, took)
        return chunk, took

    def run(self, steps: int) -> list[tuple[int, int]]:
        return [self.step() for _ in range(steps)]


def test_nothing_is_known_before_there_is_data() -> None:
    model = StepTimeModel()
    shape = StepShape(4, 4, 100)
    assert model.predict_us(shape) is None
    assert model.tokens_within(10**6, shape, 0) is None
    assert model.coefficients is None
    assert model.margin_us == 0
    for _ in range(20):
        model.observe(shape, 50_000)
    assert model.predict_us(shape) is None, "all steps were alike"
    for _ in range(20):
        model.observe(shape, 50_000)
    assert model.predict_us(shape) == pytest.approx(50_000, rel=0.01), "they stay alike"


def test_eight_steps_of_different_sizes_are_enough() -> None:
    model = learned(9)
    assert model.predict_us(StepShape(16, 16, 4000)) == pytest.approx(43_900, rel=0.25)


def test_a_linear_machine_is_learned() -> None:
    model = learned(600)
    coefficients = model.coefficients
    assert coefficients is not None
    assert coefficients.base_us == pytest.approx(20_000, rel=0.02)
    assert coefficients.per_token_us == pytest.approx(700, rel=0.01)
    assert coefficients.per_row_us == pytest.approx(300, rel=0.2)
    assert coefficients.per_context_us == pytest.approx(2, rel=0.2)
    assert model.margin_us <= 300
    shape = StepShape(100, 20, 3000)
    assert model.predict_us(shape) == pytest.approx(linear_us(shape), rel=0.005)


def test_the_chunk_fills_the_target_and_no_more() -> None:
    model = learned(600)
    decodes = StepShape(8, 8, 2000)
    chunk = model.tokens_within(150_000, decodes, 500)
    assert chunk is not None
    assert 140_000 <= linear_us(StepShape(8 + chunk, 9, 2500 + chunk)) <= 150_000


def test_no_chunk_where_decodes_exceed_the_target_alone() -> None:
    model = learned(600)
    assert model.tokens_within(20_000, StepShape(8, 8, 2000), 0) == 0
    assert model.tokens_within(0, StepShape(1, 1, 1), 0) == 0


def test_steps_without_a_duration_or_tokens_are_ignored() -> None:
    model = learned(100)
    before = repr(model.coefficients)
    for _ in range(100):
        model.observe(StepShape(4, 4, 100), 0)
        model.observe(StepShape(4, 4, 100), -5)
        model.observe(StepShape(0, 0, 0), 100)
    assert repr(model.coefficients) == before


def test_the_first_step_is_ignored() -> None:
    slow = StepTimeModel()
    slow.observe(StepShape(100, 1, 100), 60_000_000)
    usual = StepTimeModel()
    usual.observe(StepShape(100, 1, 100), 1)
    for shape, _ in zip(shapes(3), range(50), strict=False):
        slow.observe(shape, linear_us(shape))
        usual.observe(shape, linear_us(shape))
    assert slow.coefficients == usual.coefficients is not None


def test_one_hiccup_hardly_changes_the_prediction() -> None:
    model = learned(600)
    shape = StepShape(16, 16, 4000)
    chunk = model.tokens_within(200_000, shape, 0)
    model.observe(shape, 100 * linear_us(shape))
    for other, _ in zip(shapes(9), range(32), strict=False):
        model.observe(other, linear_us(other))
    assert model.predict_us(shape) == pytest.approx(linear_us(shape), rel=0.15)
    after = model.tokens_within(200_000, shape, 0)
    assert chunk is not None
    assert after is not None
    assert after >= 0.8 * chunk


@pytest.mark.parametrize("factor", [0.3, 2, 3, 20])
def test_a_lasting_change_is_followed_within_a_hundred_steps(factor: float) -> None:
    model = learned(600)
    for shape, _ in zip(shapes(2), range(100), strict=False):
        model.observe(shape, int(factor * linear_us(shape)))
    shape = StepShape(16, 16, 4000)
    assert model.predict_us(shape) == pytest.approx(factor * linear_us(shape), rel=0.25)
    shape = StepShape(150, 16, 4000)
    assert model.predict_us(shape) == pytest.approx(factor * linear_us(shape), rel=0.25)


@pytest.mark.parametrize("noise", [0, 0.2])
@pytest.mark.parametrize("arrivals", [0.02, 1])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("target_ms", [100, 200, 400, 700])
def test_steps_stay_within_the_target_on_a_machine_that_is_not_linear(
    target_ms: int, rows: int, arrivals: float, noise: float
) -> None:
    serving = Serving(target_ms=target_ms, rows=rows, arrivals=arrivals, noise=noise)
    serving.run(300)
    steps = serving.run(1500)
    late = sum(took > serving.target_us for _, took in steps)
    assert late <= 0.02 * len(steps)
    assert max(took for _, took in steps) <= 1.2 * serving.target_us
    chunks = sorted(chunk for chunk, _ in steps if chunk)
    most = max(
        n
        for n in range(1, 1000)
        if curve_us(StepShape(rows + n, rows + 1, 300 * rows)) <= serving.target_us
    )
    assert chunks[len(chunks) // 2] >= most * (0.2 if noise else 0.7)


def test_prompts_are_not_shut_out_by_a_slow_time_that_has_passed() -> None:
    serving = Serving(target_ms=200, rows=8, arrivals=1, noise=0.1)
    serving.run(500)
    serving.factor = 10
    slow = serving.run(200)
    assert sum(chunk for chunk, _ in slow[100:]) == 0, "decodes alone exceed the target"
    serving.factor = 1
    serving.run(300)
    assert sum(chunk for chunk, _ in serving.run(100)) >= 100 * 70


def test_what_a_prompt_token_costs_outlasts_a_long_time_of_decodes() -> None:
    serving = Serving(target_ms=200, rows=8, arrivals=1, noise=0.1)
    serving.run(500)
    serving.left, serving.arrivals = 0, 0
    serving.run(20_000)
    serving.arrivals = 1
    steps = serving.run(20)
    assert max(took for _, took in steps) <= 1.3 * serving.target_us
    assert sum(chunk for chunk, _ in steps) >= 20 * 50


def test_larger_chunks_are_tried_step_by_step() -> None:
    model = StepTimeModel()
    draw = random.Random(1)
    for _ in range(200):
        rows = draw.randint(1, 32)
        model.observe(StepShape(rows, rows, 100 * rows), 1000 + 10 * rows)
    decodes = StepShape(8, 8, 800)
    sizes = []
    for _ in range(6):
        chunk = model.tokens_within(10**9, decodes, 0)
        assert chunk is not None
        sizes.append(chunk)
        model.observe(StepShape(8 + chunk, 9, 800 + chunk), 1100 + 10 * chunk)
    assert sizes[0] == 16
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert sizes[-1] >= 400


def test_a_second_chunk_of_a_step_gets_what_the_first_left() -> None:
    model = learned(600)
    decodes = StepShape(8, 8, 2000)
    first = model.tokens_within(150_000, decodes, 0)
    assert first is not None
    half = StepShape(8 + first // 2, 9, 2000 + first // 2)
    second = model.tokens_within(150_000, half, 0)
    assert second is not None
    assert first // 2 - 4 <= second <= first - first // 2


step_shapes = st.builds(
    lambda rows, chunk, per_row: StepShape(
        rows + chunk, rows + (chunk > 0), (rows + (chunk > 0)) * per_row + chunk
    ),
    st.integers(1, 512),
    st.one_of(st.just(0), st.integers(1, 8192)),
    st.integers(1, 200_000),
)
observations = st.lists(st.tuples(step_shapes, st.integers(-10, 10**8)), max_size=150)


@given(observations, step_shapes, st.integers(0, 10**6), st.lists(st.integers(0, 10**9)))
def test_any_observations_give_sane_answers(
    seen: list[tuple[StepShape, int]], shape: StepShape, context: int, targets: list[int]
) -> None:
    model, again = StepTimeModel(), StepTimeModel()
    for observed, took in seen:
        model.observe(observed, took)
        again.observe(observed, took)
        assert model.margin_us >= 0
    assert repr(again.coefficients) == repr(model.coefficients)
    coefficients = model.coefficients
    if coefficients is None:
        assert model.predict_us(shape) is None
        return
    assert coefficients.base_us >= 0
    assert coefficients.per_token_us >= 0
    assert coefficients.per_row_us >= 0
    assert coefficients.per_context_us >= 0
    chunks = [model.tokens_within(target, shape, context) for target in sorted(targets)]
    assert all(chunk is not None and chunk >= 0 for chunk in chunks)
    assert chunks == sorted(chunks, key=lambda chunk: chunk or 0), "more time, no fewer tokens"


@given(observations, step_shapes, st.integers(0, 10**6), st.integers(0, 10**9))
def test_the_prediction_and_the_margin_stay_within_the_target(
    seen: list[tuple[StepShape, int]], shape: StepShape, context: int, target: int
) -> None:
    model = StepTimeModel()
    for observed, took in seen:
        model.observe(observed, took)
    model.observe(StepShape(65, 2, 65), 1000)
    chunk = model.tokens_within(target, shape, context)
    if chunk:
        predicted = model.predict_us(
            StepShape(shape.tokens + chunk, shape.rows + 1, shape.context + context + chunk)
        )
        assert predicted is not None
        assert predicted + model.margin_us <= target
