"""Time limits of requests: in the queue and while running, with shedding and honest refusals."""

import pytest

from services.scheduler.core.config import Config, PriorityClass
from services.scheduler.core.plan import EndReason
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.simulated_run import SimulatedRun


def test_a_deadline_ends_it_in_the_queue_and_while_it_runs() -> None:
    run = SimulatedRun(max_num_seqs=1, check=True)
    running = run.add(16, 1000, deadline=50_000)
    run.run(2)
    queued = run.add(16, 10, deadline=30_000)
    patient = run.add(16, 10)
    while run.now < 29_000:
        run.run(1)
    assert queued.end is None
    while run.now < 30_000:
        run.run(1)
    assert queued.end is not None
    assert queued.end.reason is EndReason.DEADLINE
    assert queued.end.completion_tokens == 0
    assert running.end is None
    while run.now < 50_000:
        run.run(1)
    assert running.end is not None
    assert running.end.reason is EndReason.DEADLINE
    assert running.end.completion_tokens == len(running.token_times) > 30
    run.drain(100)
    assert patient.finished
    assert run.core.loads().counters.deadline_exceeded == 2


def test_expire_is_exact_and_announced() -> None:
    run = SimulatedRun()
    run.add(16, 10, deadline=700)
    assert run.core.next_wakeup(0) == 700
    assert not run.core.expire(699).ended
    (end,) = run.core.expire(700).ended
    assert end.reason is EndReason.DEADLINE
    assert run.core.next_wakeup(700) is None


def test_a_deadline_that_has_passed_is_refused() -> None:
    run = SimulatedRun()
    run.now = 500
    refusal = run.refusal(16, 4, deadline=500)
    assert refusal is not None
    assert (refusal.reason, refusal.field) == ("DEADLINE", "request.scheduling.deadline_ms")
    assert refusal.retry_after_us == 0


def test_what_cannot_meet_its_target_any_more_is_shed() -> None:
    run = SimulatedRun(max_num_seqs=1, check=True)
    run.add(16, 100)
    run.run(1)
    shed = run.add(16, 4, ttft_target_us=20_000, shed_late=True)
    kept = run.add(16, 4, ttft_target_us=20_000)
    while run.now < 20_000 + 1_500:
        run.run(1)
    assert shed.end is not None
    assert shed.end.reason is EndReason.SHED
    assert shed.end.retry_after_us > 0
    run.drain(400)
    assert kept.finished
    assert run.core.loads().counters.shed == 1
    (standard,) = [one for one in run.core.loads().classes if one.name == "standard"]
    assert (standard.ttft_met, standard.ttft_missed) == (0, 2)
    assert (standard.targets_met, standard.targets_missed) == (0, 2)


def test_what_has_its_first_token_is_not_shed() -> None:
    run = SimulatedRun()
    course = run.add(16, 100, ttft_target_us=20_000, shed_late=True)
    run.drain(200)
    assert course.finished
    assert run.core.loads().counters.shed == 0


def test_targets_of_a_class_that_go_shed_nobody() -> None:
    named = PriorityClass(name="only", share=1, floor=1, ttft_target_us=20_000)
    config = {"classes": (named,), "default_class": "only"}
    run = SimulatedRun(max_num_seqs=1, **config)
    run.add(16, 60)
    run.run(1)
    waiting = run.add(16, 4, shed_late=True)
    without = PriorityClass(name="only", share=1, floor=1)
    run.core.configure(Config(classes=(without,), default_class="only"), run.now)
    run.drain(200)
    assert waiting.finished


@pytest.mark.parametrize(("before", "after"), [(None, 20_000), (500_000, 20_000)])
def test_targets_of_a_class_that_come_shed_in_time(before: int | None, after: int) -> None:
    def config(target: int | None) -> dict[str, object]:
        named = PriorityClass(name="only", share=1, floor=1, ttft_target_us=target)
        return {"classes": (named,), "default_class": "only", "max_num_seqs": 1}

    run = SimulatedRun(**config(before))
    run.add(16, 200)
    run.run(1)
    waiting = run.add(16, 4, shed_late=True)
    run.core.configure(Config(**config(after)), run.now)
    run.run(30)
    assert waiting.end is not None
    assert waiting.end.reason is EndReason.SHED


def test_a_request_that_is_too_late_from_the_start_is_refused() -> None:
    run = SimulatedRun(max_num_seqs=4)
    for _ in range(60):
        run.add(200, 4)
    run.run(40)
    refusal = run.refusal(200, 4, ttft_target_us=2_000, shed_late=True)
    assert refusal is not None
    assert refusal.reason == "TTFT_TARGET"
    assert refusal.limit == 2
    assert refusal.got > 2
    assert refusal.retry_after_us > 0
    assert run.refusal(200, 4, ttft_target_us=9_000_000, shed_late=True) is None


def test_retry_after_grows_with_the_queue() -> None:
    """By how much the queue has to shrink, and never none at all."""
    run = SimulatedRun(max_num_seqs=4, budget=8192)
    for _ in range(120):
        run.add(200, 4)
    run.run(40)
    waiting = run.core.loads().waiting_tokens
    times = []
    for most in (waiting, waiting * 3 // 4, waiting // 2, waiting // 8, 200):
        run.core.configure(Config(max_num_seqs=4, max_queued_tokens=most), run.now)
        refusal = run.refusal(200, 4)
        assert refusal is not None
        assert (refusal.reason, refusal.limit) == ("QUEUE_TOKENS", most)
        assert refusal.got == waiting + 200
        times.append(refusal.retry_after_us)
    run.core.configure(Config(max_queued_tokens=199), run.now)
    refusal = run.refusal(200, 4)
    assert refusal is not None
    assert (refusal.reason, refusal.limit, refusal.got) == ("EXCEEDS_QUEUE", 199, 200)
    assert refusal.retry_after_us == 0, "it can never be taken"
    assert times == sorted(times)
    assert 0 < times[0] < times[2] < times[4] <= 60_000_000


def test_idle_there_is_nothing_to_plan_and_nothing_to_wake_for() -> None:
    core = Scheduler(Config(), SHA256)
    run = SimulatedRun()
    assert core.next_wakeup(0) is None
    assert run.core.plan("w", 0) is None
    assert run.core.next_wakeup(0) is None
    run.add(16, 4, deadline=10_000_000, ttft_target_us=10_000_000, shed_late=True)
    run.drain(20)
    assert run.core.plan("w", run.now) is None
    assert run.core.next_wakeup(run.now) is None
