"""A watcher with a fault costs its own telling and no request."""

import pytest

from services.scheduler.core.plan import AddRequest, Ended, StepPlan
from services.scheduler.watching import Watching
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running
from tests.services.scheduler.test_worker_link import collect, generate


class Faulty(Watching):
    """Fails at one of its calls, and notes what it is told."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.told: list[str] = []

    def adding(self, request: AddRequest, now: int) -> AddRequest:
        self._note("adding")
        return request

    def planned(self, worker_id: str, step: StepPlan, now: int, took_us: int) -> StepPlan:
        self._note("planned")
        return step

    def ended(self, end: Ended, now: int) -> None:
        self._note("ended")

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what == self._at:
            raise RuntimeError("the watcher's own fault")


@pytest.mark.parametrize("at", ["adding", "planned", "ended"])
async def test_a_watcher_with_a_fault_leaves(
    scheduler: Running, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, other = Faulty(at), Faulty("")
    scheduler.loop.watch(faulty)
    scheduler.loop.watch(other)
    async with attached(scheduler.target) as worker:
        for _ in range(2):
            call = generate(scheduler, [5, 6], max_tokens=1)
            await worker.answer(await worker.step())
            tokens, _ = await collect(call)
            assert tokens == [7]
            await worker.answer(await worker.step())  # releases the slot
        await scheduler.quiesced()
    assert faulty.told[-1] == at
    assert faulty.told.count(at) == 1
    assert other.told == ["adding", "planned", "ended", "planned"] * 2
    assert caplog.text.count("Faulty met a fault and tells nothing any more") == 1
