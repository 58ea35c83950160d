"""Running streams keep their time between tokens while long prompts arrive, and prompts start."""

import pytest

from services.scheduler.core.config import Policy
from tests.fakes.simulated_run import SimulatedRun, percentile

TARGET_US = 12_000


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_prompts_do_not_stretch_the_gaps_of_streams(
    noise: float, by_request: bool, seed: int
) -> None:
    """A step of 2,000 prompt tokens would take 42 ms; the target between tokens is 12 ms."""
    config = {} if by_request else {"tpot_target_us": TARGET_US}
    wish = {"tpot_target_us": TARGET_US} if by_request else {}
    run = SimulatedRun(
        budget=2048,
        base_us=2_000,
        per_token_us=20,
        noise=noise,
        seed=seed,
        prefill_chunk_size=256,
        **config,
    )
    streams = [run.add(32, 1500, **wish) for _ in range(8)]
    run.run(40)
    start = run.steps
    prompts = []

    def each(number: int) -> None:
        if number % 20 == 0:
            prompts.append(run.add(2000, 4, priority_class="standard"))

    run.run(1200, each)
    gaps = [
        gap
        for stream in streams
        for gap, step in zip(stream.gaps, stream.token_steps[1:], strict=False)
        if step > start
    ]
    assert len(gaps) > 8_000
    assert percentile(gaps, 99) <= TARGET_US
    done = [course for course in prompts if course.token_steps]
    assert len(done) >= len(prompts) - 2
    assert max(course.ttft_steps for course in done) <= 60
    # The time that decodes leave is used: some 490 prompt tokens fit without noise.
    assert percentile(run.step_tokens[start:], 90) >= 200


@pytest.mark.parametrize("policy", list(Policy))
def test_b064_a_new_prompt_starts_though_the_decodes_alone_miss_the_target(
    policy: Policy,
) -> None:
    run = SimulatedRun(
        base_us=2_000, per_token_us=20, policy=policy, tpot_target_us=1_000, max_num_seqs=8
    )
    for _ in range(3):
        run.add(16, 5000)
    run.run(100)
    short = run.add(40, 4)
    run.run(70)
    assert short.token_steps
    assert short.ttft_steps <= 17 * 3
    long = run.add(160, 4)
    run.run(17 * 10 + 1)
    assert long.token_steps


def test_without_a_target_prompts_take_what_there_is() -> None:
    run = SimulatedRun(budget=2048, prefill_chunk_size=2048)
    run.add(16, 100)
    run.run(10)
    prompt = run.add(2000, 4)
    run.run(3)
    assert prompt.ttft_steps == 1
