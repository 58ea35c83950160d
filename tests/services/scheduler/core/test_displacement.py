"""The more important take seats and blocks of the less important; equals leave each other be."""

import random

import pytest

from services.scheduler.core.config import Policy, PriorityClass, TenantPolicy
from tests.fakes.simulated_run import Course, SimulatedRun

CLASSES = (
    PriorityClass(name="high", share=700, floor=700),
    PriorityClass(name="mid", share=250, floor=50),
    PriorityClass(name="low", share=50, floor=10),
)
RANKED = {"classes": CLASSES, "default_class": "mid"}
BOTH = pytest.mark.parametrize("policy", [Policy.FAIR, Policy.PRIORITY])


@BOTH
@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")])
def test_the_more_important_takes_a_seat_in_the_next_step(
    policy: Policy, tenants: tuple[str, str]
) -> None:
    run = SimulatedRun(num_blocks=128, max_num_seqs=4, policy=policy, check=True, **RANKED)
    low = [run.add(32, 300, tenant=tenants[0], priority_class="low") for _ in range(8)]
    run.run(20)
    high = run.add(32, 4, tenant=tenants[1], priority_class="high")
    run.run(6)
    assert high.ttft_steps == 1
    assert run.core.loads().counters.displaced == 1
    run.drain(4000)
    assert all(course.finished for course in low)


@BOTH
def test_the_more_important_takes_blocks_in_the_next_step(policy: Policy) -> None:
    run = SimulatedRun(num_blocks=40, max_num_seqs=8, policy=policy, **RANKED, check=True)
    low = [run.add(64, 90, priority_class="low") for _ in range(4)]
    run.run(75)
    assert run.core.loads().workers[0].blocks_free <= 8
    high = run.add(256, 4, priority_class="high")
    run.run(6)
    assert high.ttft_steps == 1
    assert run.core.loads().counters.displaced >= 1
    run.drain(4000)
    assert all(course.finished for course in low)


def test_by_order_of_arrival_nobody_is_displaced() -> None:
    run = SimulatedRun(max_num_seqs=2, policy=Policy.FCFS, **RANKED)
    for _ in range(2):
        run.add(32, 100, priority_class="low")
    run.run(5)
    run.add(32, 4, priority_class="high")
    run.drain(400)
    assert run.core.loads().counters.displaced == 0


def cost(course: Course) -> int:
    """Tokens computed so far, which is what giving way costs."""
    return sum(course.chunks)


@BOTH
def test_the_cheapest_of_the_least_important_gives_way(policy: Policy) -> None:
    run = SimulatedRun(max_num_seqs=5, budget=2048, policy=policy, **RANKED)
    mid = run.add(16, 200, priority_class="mid")
    low = [run.add(size, 200, priority_class="low") for size in (900, 300, 64, 500)]
    run.run(10)
    run.add(32, 4, priority_class="high")
    run.run(1)
    given_way = [c for c in (mid, *low) if not _runs(run, c)]
    assert given_way == [low[2]]


def test_shared_blocks_cost_nothing() -> None:
    run = SimulatedRun(max_num_seqs=3, budget=2048, prefill_chunk_size=2048, **RANKED)
    prefix = list(range(800))
    first = run.add([*prefix, 1, 2], 200, priority_class="low")
    run.run(3)
    second = run.add([*prefix, 3, 4], 200, priority_class="low")
    alone = run.add(300, 200, priority_class="low")
    run.run(10)
    run.add(32, 4, priority_class="high")
    run.run(1)
    assert not _runs(run, second)
    assert _runs(run, first)
    assert _runs(run, alone)


def _runs(run: SimulatedRun, course: Course) -> bool:
    rows = run.core._workers["w"].rows
    return course.handle in rows.handle[rows.order].tolist()


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_b058_equals_do_not_push_each_other_out(policy: Policy, in_flight: int) -> None:
    run = SimulatedRun(
        num_blocks=64, max_num_seqs=8, in_flight=in_flight, policy=policy, check=True
    )
    courses = [run.add(64, 180) for _ in range(8)]
    steps = run.drain(4000)
    # 8 requests of 16 blocks in 64: two rounds of four.
    ideal = 2 * (180 + 1)
    assert steps <= 2 * ideal
    for course in courses:
        assert course.end is not None
        assert course.end.preemptions <= 2


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_b062_no_thrash_at_three_times_the_pool(policy: Policy, in_flight: int) -> None:
    run = SimulatedRun(
        num_blocks=64, max_num_seqs=12, in_flight=in_flight, policy=policy, check=True
    )
    # 12 x 16 blocks; the first would be the cheapest to compute again, and never has to be.
    courses = [run.add(8, 248), *(run.add(32, 224) for _ in range(11))]
    run.drain(6000)
    assert courses[0].end is not None
    assert courses[0].end.preemptions == 0
    for course in courses:
        assert course.finished
        assert course.end is not None
        assert course.end.preemptions <= 4
    samples = run.step_samples
    windows = [sum(samples[at : at + 20]) for at in range(len(samples) - 20)]
    assert min(windows) > 0


@pytest.mark.parametrize("tenants", [1, 4])
def test_b062_with_tenants(tenants: int) -> None:
    run = SimulatedRun(num_blocks=64, max_num_seqs=12, check=True)
    courses = [run.add(32, 224, tenant=str(number % tenants)) for number in range(12)]
    run.drain(6000)
    for course in courses:
        assert course.end is not None
        assert course.end.preemptions <= 4


def test_b061_a_head_that_does_not_fit_strands_nobody() -> None:
    run = SimulatedRun(num_blocks=16, max_num_seqs=8, check=True)
    run.add(100, 60)
    run.run(10)
    head = run.add(200, 8)
    small = [run.add(16, 4) for _ in range(6)]
    waited = 0
    for _ in range(400):
        if not run.step():
            break
        loads = run.core.loads()
        waited = waited + 1 if loads.waiting and not loads.running else 0
        assert waited < 3
    assert run.core.is_idle
    assert all(course.finished for course in (head, *small))


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_displacements_are_bounded_by_arrivals_of_the_more_important(
    policy: Policy, seed: int
) -> None:
    """Each request takes at most its seat from one, so nothing swings to and fro."""
    dice = random.Random(seed)
    run = SimulatedRun(num_blocks=128, max_num_seqs=4, policy=policy, **RANKED)
    arrived = 0

    def each(_: int) -> None:
        nonlocal arrived
        if dice.random() < 0.15:
            name = dice.choice(["high", "mid", "low"])
            run.add(dice.randint(8, 200), dice.randint(1, 40), priority_class=name)
            arrived += name != "low"

    run.run(1000, each)
    # A displaced one of the middle may displace a low one itself.
    assert run.core.loads().counters.displaced <= 2 * arrived
    run.drain(4000)
    assert all(course.finished for course in run.courses.values())


@pytest.mark.parametrize("seed", range(2))
def test_tenants_do_not_swing_to_and_fro(seed: int) -> None:
    dice = random.Random(seed)
    run = SimulatedRun(max_num_seqs=6, num_blocks=80, tenants=(("b", TenantPolicy(weight=2000)),))

    def each(_: int) -> None:
        if dice.random() < 0.1:
            run.add(dice.randint(8, 100), dice.randint(1, 60), tenant=dice.choice("abc"))

    run.run(1000, each)
    assert run.core.loads().counters.displaced <= len(run.courses)
    run.drain(4000)
    assert all(course.finished for course in run.courses.values())


def test_a_tenant_without_a_seat_takes_one_and_no_more_than_its_part() -> None:
    run = SimulatedRun(num_blocks=200, max_num_seqs=8, check=True)
    big = [run.add(32, 300, tenant="big") for _ in range(16)]
    run.run(10)
    small = [run.add(32, 300, tenant="small") for _ in range(16)]
    run.run(10)
    seats = [sum(_runs(run, course) for course in group) for group in (big, small)]
    assert seats == [4, 4]
    displaced = run.core.loads().counters.displaced
    assert displaced == 4
    run.run(150)
    assert run.core.loads().counters.displaced == displaced
    run.drain(6000)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_prefill_gives_way_to_the_decodes_of_its_own_step(policy: Policy) -> None:
    run = SimulatedRun(
        num_blocks=27, max_num_seqs=16, prefill_chunk_size=1, policy=policy, check=True, **RANKED
    )
    high = [run.add(4, 60, priority_class="high") for _ in range(8)]
    run.run(6)
    low = run.add(150, 4, priority_class="low")
    run.drain(4000)
    assert low.admissions > 1
    assert low.finished
    assert all(course.finished for course in high)
