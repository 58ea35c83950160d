"""The simulated clock with the real core: what goes in comes out, always the same."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from services.scheduler.core.config import Config, TenantPolicy
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from services.scheduler.simulate.load import Arrival, OpenLoop, Prompts
from services.scheduler.simulate.loop import Simulation, Stuck, simulate
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.step_model import StepModel
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals

MODEL = StepModel(
    name="small",
    base_us=10_000.0,
    per_token_us=100.0,
    per_row_us=0.0,
    per_context_us=0.0,
    blocks=64,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=512,
)

MIXED = Load(
    requests=120,
    prompt=Lengths(mean=60, sigma=0.7, most=200),
    output=Lengths(mean=30, sigma=0.7, most=100),
    bound_output=True,
    rate=12.0,
    shared=0.4,
    shared_tokens=40,
    prefixes=3,
    classes=("interactive", "batch"),
    tenants=("a", "b"),
    cancelled=0.15,
    cancel_after_us=500_000,
    seed=3,
)


def of(at_us: int, prompt: int, output: int, **fields: object) -> Arrival:
    return Arrival(at_us=at_us, prompt_tokens=prompt, output_tokens=output, **fields)


def run(coming: Iterable[Arrival], config: Config | None = None, **options: object) -> Report:
    return simulate(coming, config or Config(), MODEL, **options)


def test_one_request_takes_its_own_steps() -> None:
    report = run([of(5_000, 32, 3)])
    # A prefill of 32 tokens, then two steps of one: 13.2, 10.1, 10.1 ms.
    assert report.ttft_ms.mean == 13.2
    assert report.tpot_ms.mean == 10.1
    assert report.e2e_ms.mean == 33.4
    assert report.ends == {"length": 1}
    assert report.duration_s == pytest.approx(0.0384, abs=2e-6)
    assert (report.prompt_tokens, report.output_tokens, report.steps) == (32, 3, 4)


def test_all_tokens_are_accounted_for() -> None:
    drawn = list(arrivals(replace(MIXED, cancelled=0.0)))
    report = run(drawn)
    assert report.completed == report.arrived == 120
    assert report.ends.keys() <= {"length", "stop"}
    assert report.prompt_tokens == sum(one.prompt_tokens for one in drawn)
    assert report.output_tokens == sum(one.output_tokens for one in drawn)
    assert report.cached_tokens > 0, "prefixes are shared"
    assert sum(group.output_tokens for group in report.groups) == report.output_tokens
    assert [group.name for group in report.groups] == [
        f"{name}/{tenant}" for name in ("batch", "interactive") for tenant in ("a", "b")
    ]


def test_every_request_ends_once_whatever_happens_to_it() -> None:
    report = run(arrivals(replace(MIXED, rate=60.0)))
    assert sum(report.ends.values()) == report.arrived == 120
    assert report.ends["abort"] > 0
    assert report.preemptions > 0, "the pool is small"
    assert report.recomputed_tokens > 0


def test_the_core_is_empty_in_the_end() -> None:
    engine = Scheduler(Config(), SHA256)
    simulation = Simulation(engine, OpenLoop(arrivals(MIXED)), MODEL, Prompts(0, 512), workers=2)
    simulation.run()
    engine.check_invariants()
    assert engine.is_idle
    assert simulation.figures.live == 0


def test_the_same_load_gives_the_same_report() -> None:
    first, again = (run(arrivals(MIXED)) for _ in range(2))
    assert first == again
    assert run(arrivals(replace(MIXED, seed=4))) != first


def test_a_closed_loop_never_has_more_requests_than_clients() -> None:
    report = run((of(0, 30, 10) for _ in range(50)), concurrency=5)
    assert report.completed == 50
    assert report.most_live == 5


def test_more_workers_take_more_at_a_time() -> None:
    one, two = (run((of(0, 30, 30) for _ in range(48)), workers=workers) for workers in (1, 2))
    assert two.duration_s < 0.7 * one.duration_s
    assert two.completed == 48
    assert two.most_running > one.most_running


def test_kv_usage_is_that_of_what_runs() -> None:
    report = run([of(0, 160, 100)])
    # 10 blocks of 64 after the prefill, 17 in the end, hardly any of them half filled.
    assert 10 / 64 < report.kv_held < 17 / 64
    assert report.kv_most_held == pytest.approx(17 / 64, abs=1.01 / 64)
    assert report.filled_of_held == pytest.approx(0.95, abs=0.05)


def test_what_is_refused_is_counted_by_its_reason() -> None:
    report = run([of(0, 600, 5), of(0, 30, 5)])
    assert report.ends == {"length": 1, "refused: CONTEXT_LENGTH": 1}
    config = Config(other_tenants=TenantPolicy(max_queued_requests=2))
    report = run([of(0, 30, 5, tenant="a") for _ in range(4)], config)
    assert report.ends == {"length": 2, "refused: TENANT_REQUESTS": 2}


def test_a_closed_loop_goes_on_after_refusals() -> None:
    report = run([of(0, 600, 5), of(0, 30, 5), of(0, 30, 5)], concurrency=1)
    assert report.completed == 2


def test_a_policy_that_never_plans_is_told() -> None:
    class Idle(Scheduler):
        def plan(self, worker_id: str, now: int) -> StepPlan | None:
            return None

    simulation = Simulation(
        Idle(Config(), SHA256), OpenLoop([of(0, 30, 5)]), MODEL, Prompts(0, 512)
    )
    with pytest.raises(Stuck, match=r"stuck at [0-9.]+ s: 1 requests wait, 0 run"):
        simulation.run(until=10_000_000_000)


def test_a_run_can_be_cut_at_a_time() -> None:
    simulation = Simulation(
        Scheduler(Config(), SHA256), OpenLoop(arrivals(MIXED)), MODEL, Prompts(0, 512)
    )
    simulation.run(until=1_000_000)
    assert 1_000_000 <= simulation.now < 1_100_000
    assert simulation.figures.arrived < 40
    simulation.run()
    assert simulation.figures.arrived == 120
