"""What a terminal event tells of the request's course: instants, places, computing time."""

import numpy as np
import pytest

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    EndReason,
    Sampling,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256


def spec_of(worker_id: str) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        num_blocks=16,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=(),
        max_in_flight=1,
        model_digest=b"model",
    )


class Course:
    """A core whose steps are answered by hand, each at a time of its own."""

    def __init__(self) -> None:
        self.core = Scheduler(Config(), SHA256)
        self.ended: dict[int, Ended] = {}
        self._known: dict[int, int] = {}

    def attach(self, worker_id: str, now: int = 0) -> None:
        self.core.attach(spec_of(worker_id), now)
        self._known.clear()

    def add(
        self, handle: int, prompt: int, max_tokens: int, now: int, deadline: int | None = None
    ) -> None:
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.arange(prompt, dtype=np.uint32) + handle,
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
            tenant="acme",
            traceparent="trace",
            deadline=deadline,
        )
        self.core.add(request, now)

    def plan(self, worker_id: str, now: int) -> StepPlan:
        step = self.core.plan(worker_id, now)
        assert step is not None
        return step

    def answer(self, worker_id: str, step: StepPlan, now: int, execute_us: int) -> None:
        result = StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=np.ones(step.slots.size, np.uint8),  # no prompt here is longer than a step
            token_ids=np.full(step.slots.size, 50, np.uint32),
            execute_us=execute_us,
        )
        for end in self.core.apply(worker_id, result, now).ended:
            self.ended[end.handle] = end


@pytest.fixture
def course() -> Course:
    return Course()


def test_the_account_of_two_that_share_their_steps(course: Course) -> None:
    course.attach("w")
    course.add(1, prompt=10, max_tokens=2, now=100)
    course.add(2, prompt=30, max_tokens=1, now=150)
    first = course.plan("w", 200)
    assert [row.handle for row in first.new_rows] == [1, 2]
    course.answer("w", first, 1_200, execute_us=1_000)
    course.answer("w", course.plan("w", 1_300), 1_800, execute_us=400)

    one, two = course.ended[1], course.ended[2]
    assert (one.arrived, one.admitted, one.first_token, one.ended) == (100, 200, 1_200, 1_800)
    assert (two.arrived, two.admitted, two.first_token, two.ended) == (150, 200, 1_200, 1_200)
    # By tokens: 10 and 30 of the first step's 40, and all of the second.
    assert (one.worker_us, two.worker_us) == (250 + 400, 750)
    assert (one.worker_id, one.requeues, one.tenant) == ("w", 0, "acme")
    assert (one.class_name, one.traceparent) == ("standard", "trace")


def test_a_request_that_never_ran(course: Course) -> None:
    course.add(1, prompt=3, max_tokens=1, now=100)
    (end,) = course.core.abort(1, 700).ended
    assert (end.arrived, end.admitted, end.first_token, end.ended) == (100, None, None, 700)
    assert (end.worker_id, end.worker_us) == ("", 0)


def test_a_lost_worker_is_counted_and_its_time_is_kept(course: Course) -> None:
    course.attach("old")
    course.add(1, prompt=8, max_tokens=3, now=0)
    course.answer("old", course.plan("old", 10), 500, execute_us=300)
    course.plan("old", 600)
    course.core.lost("old", 700)
    course.attach("new", 800)
    course.answer("new", course.plan("new", 900), 1_500, execute_us=500)
    course.answer("new", course.plan("new", 1_600), 1_700, execute_us=70)
    end = course.ended[1]
    assert (end.worker_id, end.requeues, end.preemptions) == ("new", 1, 0)
    assert end.worker_us == 300 + 500 + 70
    assert (end.admitted, end.first_token) == (10, 500), "the first ones count"
    assert end.requeued_us == 200, "from the loss to the next admission"


def test_who_lets_go_when_the_deadline_passes_ends_it_by_that(course: Course) -> None:
    """Its owner sees the deadline pass a moment earlier than the core."""
    course.add(1, prompt=3, max_tokens=1, now=0, deadline=1_000_000)
    course.add(2, prompt=3, max_tokens=1, now=0, deadline=1_000_000)
    (early,) = course.core.abort(1, 899_999).ended
    (late,) = course.core.abort(2, 900_000).ended
    assert (early.reason, late.reason) == (EndReason.ABORT, EndReason.DEADLINE)


def test_the_wait_of_one_that_ends_in_the_queue_counts(course: Course) -> None:
    course.attach("w")
    course.add(1, prompt=8, max_tokens=3, now=0)
    course.answer("w", course.plan("w", 10), 500, execute_us=300)
    course.core.lost("w", 700)
    assert course.core.loads().tenants[0].waiting == 1, "it waits again"
    (end,) = course.core.abort(1, 1_000).ended
    assert end.requeued_us == 300
