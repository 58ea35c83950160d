"""Tenants beside each other: who floods waits, weights are kept, nothing is saved up."""

from collections.abc import Callable

import pytest

from services.scheduler.core.config import Policy, TenantPolicy
from tests.fakes.simulated_run import Course, SimulatedRun, percentile


def probes(
    flood: Callable[[SimulatedRun, int], None], *, prompt: int, run: SimulatedRun
) -> list[Course]:
    """15 requests of a small tenant, far below its share, beside what `flood` sends."""
    found: list[Course] = []
    every = 9 if prompt < 100 else 63

    def each(number: int) -> None:
        flood(run, number)
        if number >= 20 and number % every == 0 and len(found) < 15:
            found.append(run.add(prompt, 4, tenant="small"))

    run.run(15 * every + 60, each)
    assert len(found) == 15
    assert all(course.finished for course in found)
    return found


def nobody(_run: SimulatedRun, _number: int) -> None:
    return


def seats_full(run: SimulatedRun, number: int) -> None:
    if number == 0:
        for _ in range(400):
            run.add(32, 200, tenant="big")
    elif number % 9 == 0:
        for _ in range(10):
            run.add(32, 200, tenant="big")


def budget_full(run: SimulatedRun, number: int) -> None:
    for _ in range(400 if number == 0 else 11 if number % 9 == 0 else 0):
        run.add(500, 2, tenant="big")


def long_prompts(run: SimulatedRun, number: int) -> None:
    for _ in range(100 if number == 0 else 11 if number % 9 == 0 else 0):
        run.add(4000, 8, tenant="big")


@pytest.mark.parametrize("flood", [seats_full, budget_full, long_prompts])
@pytest.mark.parametrize(("prompt", "in_flight"), [(16, 1), (16, 2), (700, 2)])
def test_a_tenant_that_floods_does_not_delay_another(
    flood: Callable[[SimulatedRun, int], None], prompt: int, in_flight: int
) -> None:
    alone = probes(nobody, prompt=prompt, run=SimulatedRun(in_flight=in_flight))
    beside = probes(flood, prompt=prompt, run=SimulatedRun(in_flight=in_flight))
    quiet = percentile([course.ttft_steps for course in alone], 95)
    loud = percentile([course.ttft_steps for course in beside], 95)
    assert loud <= quiet + 3


def test_who_waits_long_behind_his_own_flood_gains_nothing_by_it() -> None:
    """Each request of the flood is older than many ageing times when it runs."""
    alone = probes(nobody, prompt=16, run=SimulatedRun(ageing_us=1000))
    beside = probes(seats_full, prompt=16, run=SimulatedRun(ageing_us=1000))
    quiet = percentile([course.ttft_steps for course in alone], 95)
    assert percentile([course.ttft_steps for course in beside], 95) <= quiet + 3


def backlog(run: SimulatedRun, tenants: tuple[str, ...], prompt: int, output: int) -> None:
    """Keeps 40 requests of each tenant waiting or running."""
    live = dict.fromkeys(tenants, 0)
    for course in run.courses.values():
        if course.end is None and course.tenant in live:
            live[course.tenant] += 1
    for tenant, count in live.items():
        for _ in range(count, 40):
            run.add(prompt, output, tenant=tenant)


@pytest.mark.parametrize(("prompt", "output"), [(200, 4), (16, 60), (900, 30)])
def test_tokens_under_backlog_go_by_weight(prompt: int, output: int) -> None:
    run = SimulatedRun(tenants=(("heavy", TenantPolicy(weight=3000)),))
    run.run(100, lambda _: backlog(run, ("light", "heavy"), prompt, output))
    before = [run.computed_tokens(tenant=name) for name in ("heavy", "light")]
    run.run(600, lambda _: backlog(run, ("light", "heavy"), prompt, output))
    heavy, light = (
        run.computed_tokens(tenant=name) - old
        for name, old in zip(("heavy", "light"), before, strict=True)
    )
    assert heavy / light == pytest.approx(3, rel=0.15)


def test_an_idle_tenant_saves_nothing_up() -> None:
    run = SimulatedRun()
    run.add(16, 2, tenant="idle")
    run.run(400, lambda _: backlog(run, ("busy",), 200, 4))
    before = {name: run.computed_tokens(tenant=name) for name in ("busy", "idle")}
    run.run(100, lambda _: backlog(run, ("busy", "idle"), 200, 4))
    busy, idle = (run.computed_tokens(tenant=name) - old for name, old in before.items())
    assert idle / busy == pytest.approx(1, rel=0.2)


def test_many_tenant_names_leave_nothing_behind() -> None:
    run = SimulatedRun(max_num_seqs=128, budget=4096)
    most = 0
    for number in range(10_000):
        run.add(16, 2, tenant=f"tenant {number}")
        if number % 100 == 99:
            run.drain(200)
            most = max(most, len(run.core._waiting._flows))
    assert most <= 600
    assert sum(len(group.flows) for group in run.core._waiting.classes) <= 600
    assert not run.core._backlog._by_tenant
    assert not run.core.loads().tenants


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.PRIORITY])
def test_within_a_tenant_the_earliest_target_goes_first(policy: Policy) -> None:
    run = SimulatedRun(max_num_seqs=1, policy=policy)
    run.add(16, 8)
    run.step()
    targets = [50_000, 9_000_000, 20_000, 30_000_000, 100_000]
    waiting = [run.add(16, 2, ttft_target_us=target) for target in targets]
    waiting.append(run.add(16, 2))  # without a target: as if in a minute
    run.drain(100)
    order = sorted(waiting, key=lambda course: course.token_steps[0])
    places = [waiting.index(course) for course in order]
    assert places == [2, 0, 4, 1, 3, 5]


def test_a_target_set_long_ago_comes_before_a_short_one_set_now() -> None:
    run = SimulatedRun(max_num_seqs=1)
    run.add(16, 200)
    old = run.add(16, 2, ttft_target_us=150_000)
    run.run(100)
    assert run.now > 100_000
    late = run.add(16, 2, ttft_target_us=100_000)
    run.drain(400)
    assert old.token_steps[0] < late.token_steps[0]


def test_a_preempted_request_keeps_its_turn() -> None:
    """It comes back before others of its tenant that arrived after it."""
    run = SimulatedRun(num_blocks=24, max_num_seqs=4, check=True)
    first = [run.add(64, 100) for _ in range(3)]
    later = [run.add(64, 100) for _ in range(6)]
    run.drain(3000)
    preempted = [course for course in first if course.admissions > 1]
    assert preempted
    for course in preempted:
        assert course.end is not None
        assert all(course.token_times[-1] < other.token_times[-1] for other in later[2:])
