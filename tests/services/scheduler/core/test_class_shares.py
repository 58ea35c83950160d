"""Classes beside each other: shares under backlog, floors while targets are missed, ageing."""

import pytest

from services.scheduler.core.config import Policy, PriorityClass
from tests.fakes.simulated_run import SimulatedRun


def classes(target_us: int | None = None) -> dict[str, object]:
    return {
        "classes": (
            PriorityClass(name="high", share=500, floor=500, ttft_target_us=target_us),
            PriorityClass(name="mid", share=300, floor=60),
            PriorityClass(name="low", share=200, floor=20),
        ),
        "default_class": "mid",
    }


def backlog(run: SimulatedRun, names: tuple[str, ...], prompt: int, output: int) -> None:
    """Keeps 30 requests of each class waiting or running."""
    live = dict.fromkeys(names, 0)
    for course in run.courses.values():
        if course.end is None and course.priority_class in live:
            live[course.priority_class] += 1
    for name, count in live.items():
        for _ in range(count, 30):
            run.add(prompt, output, priority_class=name)


NAMES = ("high", "mid", "low")


@pytest.mark.parametrize(
    ("prompt", "output", "seats"), [(200, 4, 16), (700, 8, 16), (20, 30, 4), (40, 60, 16)]
)
def test_tokens_under_backlog_go_by_share(prompt: int, output: int, seats: int) -> None:
    """Also where requests are displaced long before their end."""
    run = SimulatedRun(max_num_seqs=seats, ageing_us=1 << 40, **classes())
    run.run(100, lambda _: backlog(run, NAMES, prompt, output))
    before = [run.computed_tokens(cls=name) for name in NAMES]
    run.run(
        500 if seats == 16 and prompt > 100 else 1500, lambda _: backlog(run, NAMES, prompt, output)
    )
    spent = [run.computed_tokens(cls=name) - old for name, old in zip(NAMES, before, strict=True)]
    total = sum(spent)
    for share, tokens in zip((0.5, 0.3, 0.2), spent, strict=True):
        assert tokens / total == pytest.approx(share, rel=0.15)


def weights(run: SimulatedRun) -> list[int]:
    return [load.weight for load in run.core.loads().classes]


def test_weights_shrink_to_floors_lowest_first_and_grow_back() -> None:
    run = SimulatedRun(ageing_us=1 << 40, **classes(target_us=20_000))
    seen = [weights(run)]

    def each(_: int) -> None:
        backlog(run, NAMES, 200, 4)
        if weights(run) != seen[-1]:
            seen.append(weights(run))

    run.run(250, each)
    assert seen[0] == [500, 300, 200]
    assert seen[-1] == [500, 60, 20]
    for _, mid, low in seen:
        assert mid == 300 or low == 20, "the lowest class shrinks first"
    run.drain(1000)
    grown = [weights(run)]
    for _ in range(200):
        run.add(16, 2, priority_class="high")
        run.drain(10)
        if weights(run) != grown[-1]:
            grown.append(weights(run))
    assert grown[0][1:] == [60, 20]
    assert grown[-1] == [500, 300, 200]
    for _, mid, low in grown:
        assert mid == 300 or low == 20, "the more important class grows first"


def test_floors_hold_while_targets_are_missed() -> None:
    run = SimulatedRun(ageing_us=1 << 40, **classes(target_us=1_000))
    run.run(300, lambda _: backlog(run, NAMES, 200, 4))
    before = [run.computed_tokens(cls=name) for name in NAMES]
    run.run(600, lambda _: backlog(run, NAMES, 200, 4))
    spent = [run.computed_tokens(cls=name) - old for name, old in zip(NAMES, before, strict=True)]
    for floor, tokens in zip((500, 60, 20), spent, strict=True):
        assert tokens / sum(spent) == pytest.approx(floor / 580, rel=0.3)


def test_a_class_that_was_idle_saves_nothing_up() -> None:
    run = SimulatedRun(ageing_us=1 << 40, **classes())
    run.run(300, lambda _: backlog(run, ("high", "mid"), 200, 4))
    before = [run.computed_tokens(cls=name) for name in NAMES]
    run.run(200, lambda _: backlog(run, NAMES, 200, 4))
    spent = [run.computed_tokens(cls=name) - old for name, old in zip(NAMES, before, strict=True)]
    assert spent[2] / sum(spent) == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.PRIORITY])
@pytest.mark.parametrize("load", [90, 150])
def test_b059_the_low_one_finishes_under_endless_high_load(policy: Policy, load: int) -> None:
    """Per cent of what the worker could do, in short requests of the highest class."""
    run = SimulatedRun(max_num_seqs=4, policy=policy, ageing_us=100_000, **classes())
    low = run.add(32, 30, priority_class="low")
    sent = 0

    def each(number: int) -> None:
        nonlocal sent
        # A request of 8 tokens keeps a seat for 8 steps: 4 seats end one in two steps.
        while sent < (number + 1) * load / 200:
            run.add(16, 8, priority_class="high")
            sent += 1

    run.run(2000, each)
    assert low.finished
    assert low.token_times[-1] < 20 * 100_000


def test_without_time_to_age_strict_priority_keeps_the_low_one_waiting() -> None:
    run = SimulatedRun(max_num_seqs=4, policy=Policy.PRIORITY, ageing_us=1 << 40, **classes())
    low = run.add(32, 30, priority_class="low")
    run.run(400, lambda _: run.add(16, 8, priority_class="high"))
    assert not low.finished
