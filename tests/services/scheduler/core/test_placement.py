"""Which of several workers a request goes to, and what happens when one of them leaves."""

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    EndReason,
    Events,
    Refused,
    Sampling,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker, expected_output

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 1000
GRACE_US = 100


class Fleet:
    """A scheduler and several checking workers; `turn` plans on all and lets each answer a step."""

    def __init__(self) -> None:
        config = Config(check_block_tables=True, worker_grace_us=GRACE_US)
        self.core = Scheduler(config, SHA256)
        self.workers: dict[str, KvWorker] = {}
        self.prompts: dict[int, list[int]] = {}
        self.output: dict[int, list[int]] = {}
        self.ended: dict[int, EndReason] = {}
        self.places: dict[int, list[str]] = {}
        self.now = 0

    def attach(self, worker_id: str, **changes: int) -> None:
        sizes = {
            "num_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            **changes,
        }
        spec = WorkerSpec(
            worker_id=worker_id,
            block_size=4,
            vocab_size=VOCAB,
            eos_token_ids=(),
            max_in_flight=2,
            model_digest=b"model",
            **sizes,
        )
        lowered, epoch, events = self.core.attach(spec, self.now)
        self.workers[worker_id] = KvWorker(lowered, epoch)
        self.take(events)

    def lose(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.core.lost(worker_id, self.now)
        self.core.check_invariants()

    def add(self, handle: int, prompt: list[int], max_tokens: int | None = 4) -> None:
        self.prompts[handle], self.output[handle], self.places[handle] = prompt, [], []
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.array(prompt, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=GREEDY,
        )
        self.take(self.core.add(request, self.now))

    def take(self, events: Events) -> None:
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            self.output[handle].append(token)
        for end in events.ended:
            assert end.handle not in self.ended
            self.ended[end.handle] = end.reason

    def plan(self) -> None:
        """As the engine loop does: a step each in turn until nobody has more to plan."""
        planned = True
        while planned:
            planned = False
            for worker_id, worker in self.workers.items():
                plan = self.core.plan(worker_id, self.now)
                if plan is None:
                    continue
                worker.send(plan)
                planned = True
                handles = self.core._workers[worker_id].rows.handle
                for row in plan.new_rows:
                    self.places[int(handles[row.slot])].append(worker_id)
            self.core.check_invariants()

    def turn(self, *only: str) -> None:
        self.plan()
        for worker_id in only or tuple(self.workers):
            if self.workers[worker_id].unanswered:
                self.take(self.core.apply(worker_id, self.workers[worker_id].step(), self.now))
        self.core.check_invariants()

    def run(self) -> None:
        for _ in range(2000):
            self.turn()
            if self.core.is_idle and not any(w.unanswered for w in self.workers.values()):
                break
        for handle, prompt in self.prompts.items():
            wanted = expected_output(prompt, len(self.output[handle]), VOCAB)
            assert self.output[handle] == wanted


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.attach("a")
    made.attach("b")
    return made


def test_requests_without_a_common_prefix_are_spread_by_load(fleet: Fleet) -> None:
    for handle in range(6):
        fleet.add(handle, [handle] * 10)
    fleet.plan()
    placed = [place for places in fleet.places.values() for place in places]
    assert sorted(placed) == ["a"] * 3 + ["b"] * 3
    fleet.run()


def test_load_is_counted_in_tokens_not_in_requests(fleet: Fleet) -> None:
    fleet.add(0, [1] * 60)
    for handle in range(1, 5):
        fleet.add(handle, [handle + 1] * 5)
    fleet.plan()
    assert fleet.places == {0: ["a"], 1: ["b"], 2: ["b"], 3: ["b"], 4: ["b"]}
    fleet.run()


def test_a_prefix_draws_a_request_to_the_worker_that_holds_it(fleet: Fleet) -> None:
    prefix = list(range(40))
    fleet.add(0, [*range(100, 110)])
    fleet.add(1, [*prefix, 500])
    fleet.run()
    (home,) = fleet.places[1]
    assert home == "b"
    for handle in range(2, 5):
        fleet.add(handle, [*prefix, 500 + handle])
    fleet.run()
    assert [fleet.places[handle] for handle in range(2, 5)] == [["b"]] * 3
    assert fleet.core.loads().counters.prefix_hit_tokens == 3 * 40


def test_a_burst_of_one_prefix_computes_it_at_most_once_on_each_worker(fleet: Fleet) -> None:
    prefix = list(range(60))
    for handle in range(8):
        fleet.add(handle, [*prefix, 500 + handle])
    fleet.run()
    places = [place for places in fleet.places.values() for place in places]
    assert sorted(places) == ["a"] * 4 + ["b"] * 4
    assert fleet.core.loads().counters.prompt_tokens == 2 * 60 + 8


def test_a_prefix_on_a_busy_worker_is_computed_again_elsewhere(fleet: Fleet) -> None:
    prefix = list(range(8))
    fleet.add(0, [*prefix, 500], 2)
    fleet.run()
    assert fleet.places[0] == ["a"]
    fleet.attach("c")
    fleet.lose("b")
    fleet.add(1, [7] * 64, 4)  # busies a, which is the first by epoch
    fleet.plan()
    assert fleet.places[1] == ["a"]
    fleet.add(2, [*prefix, 501], 2)
    fleet.plan()
    assert fleet.places[2] == ["c"]
    fleet.run()


def test_a_full_worker_leaves_its_prefix_to_another(fleet: Fleet) -> None:
    prefix = list(range(40))
    fleet.add(0, [*prefix, 500], 60)
    fleet.turn()
    fleet.turn()
    assert fleet.places[0] == ["a"]
    for handle in range(1, 12):
        fleet.add(handle, [*prefix, 600 + handle], 20)
    fleet.run()
    counts = [sum(p == [w] for p in fleet.places.values()) for w in ("a", "b")]
    assert sum(counts) == 12
    assert min(counts) > 0
    assert set(fleet.ended.values()) == {EndReason.LENGTH}


def test_a_worker_that_does_not_answer_does_not_keep_a_request_for_ever(fleet: Fleet) -> None:
    prefix = list(range(40))
    fleet.add(0, [*prefix, 500], 60)
    fleet.turn()
    assert fleet.places[0] == ["a"]
    fleet.plan()
    assert fleet.workers["a"].unanswered == 2
    fleet.add(1, [*prefix, 501], 2)
    fleet.add(2, [9] * 4, 100)  # keeps b busy, so that it plans again and again
    for _ in range(60):
        fleet.turn("b")
    assert fleet.places[1] == ["b"]
    assert fleet.ended[1] is EndReason.LENGTH
    fleet.run()


def test_a_lost_worker_costs_no_request_and_recomputes_no_more_than_was_there(
    fleet: Fleet,
) -> None:
    for handle in range(12):
        fleet.add(handle, [handle] * (5 + handle), 20)
    for _ in range(3):
        for _ in range(4):
            fleet.turn()
        before = fleet.core.loads()
        held = {load.worker_id: load.running for load in before.workers}
        assert min(held.values()) > 0
        most = sum(
            len(fleet.prompts[handle]) + len(fleet.output[handle])
            for handle in fleet.prompts
            if handle not in fleet.ended
        )
        fleet.lose("a")
        fleet.turn()
        fleet.attach("a")
        counters = fleet.core.loads().counters
        assert counters.requeues - before.counters.requeues == held["a"]
        assert counters.recomputed_tokens - before.counters.recomputed_tokens <= most
    fleet.run()
    assert set(fleet.ended.values()) == {EndReason.LENGTH}
    assert all(len(fleet.output[handle]) == 20 for handle in fleet.output)


def test_the_limits_are_those_of_one_worker_not_of_several_together() -> None:
    fleet = Fleet()
    fleet.attach("long", num_blocks=8, max_model_len=128)
    fleet.attach("wide", num_blocks=64, max_model_len=60)
    with pytest.raises(Refused) as refused:
        fleet.add(0, [1] * 62)
    assert (refused.value.refusal.reason, refused.value.refusal.limit) == ("CONTEXT_LENGTH", 59)
    fleet.prompts.clear()
    fleet.add(1, [1] * 50, 10)
    fleet.run()
    assert fleet.places[1] == ["wide"]


def test_a_request_whose_only_worker_left_waits_without_blocking_and_then_ends() -> None:
    fleet = Fleet()
    fleet.attach("large")
    fleet.attach("small", num_blocks=8)
    fleet.add(0, [1] * 60, 20)
    fleet.turn()
    fleet.lose("large")
    fleet.add(1, [2] * 8, 4)
    fleet.run()
    assert fleet.ended == {1: EndReason.LENGTH}
    assert fleet.core.next_wakeup(fleet.now) == GRACE_US
    fleet.now = GRACE_US
    fleet.take(fleet.core.expire(fleet.now))
    assert fleet.ended[0] is EndReason.NO_WORKER
    assert fleet.core.next_wakeup(fleet.now) is None


def test_a_request_whose_only_worker_returns_in_time_goes_on() -> None:
    fleet = Fleet()
    fleet.attach("large")
    fleet.attach("small", num_blocks=8)
    fleet.add(0, [1] * 60, 20)
    for _ in range(3):
        fleet.turn()
    fleet.lose("large")
    fleet.now = GRACE_US - 1
    fleet.take(fleet.core.expire(fleet.now))
    fleet.attach("large")
    assert fleet.core.next_wakeup(fleet.now) is None
    fleet.run()
    assert fleet.ended == {0: EndReason.LENGTH}
    assert fleet.places[0] == ["large", "large"]


def test_a_request_without_a_limit_of_its_own_goes_on_where_less_fits() -> None:
    fleet = Fleet()
    fleet.attach("large")
    fleet.attach("small", num_blocks=8)
    fleet.add(0, [1] * 10, None)
    for _ in range(3):
        fleet.turn()
    assert fleet.places[0] == ["large"]
    fleet.lose("large")
    fleet.run()
    assert fleet.places[0] == ["large", "small"]
    assert fleet.ended == {0: EndReason.LENGTH}
    assert len(fleet.output[0]) == 8 * 4 + 1 - 10


@pytest.mark.parametrize("changes", [{"vocab_size": 999}, {"eos_token_ids": (5,)}])
def test_workers_that_would_answer_differently_do_not_go_together(
    changes: dict[str, object],
) -> None:
    fleet = Fleet()
    fleet.attach("a")
    spec = replace(fleet.workers["a"].spec, worker_id="b")
    assert fleet.core.compatible(spec)
    assert not fleet.core.compatible(replace(spec, **changes))


def test_a_request_without_a_limit_of_its_own_takes_what_the_next_worker_holds() -> None:
    fleet = Fleet()
    fleet.attach("large")
    fleet.add(0, [1] * 10, None)
    fleet.turn()
    fleet.lose("large")
    fleet.attach("small", num_blocks=8)
    fleet.run()
    assert fleet.ended == {0: EndReason.LENGTH}
    assert len(fleet.output[0]) == 8 * 4 + 1 - 10


def test_who_waits_for_another_worker_is_no_stall() -> None:
    fleet = Fleet()
    fleet.attach("small", num_blocks=8)
    fleet.attach("large")
    fleet.add(0, [1] * 60, max_tokens=20)
    fleet.lose("large")
    timeout = fleet.core.config.stall_timeout_us
    fleet.now = 10 * timeout
    assert fleet.core.stall(fleet.now) is None, "nothing to do for the worker that is there"
    fleet.add(1, [2, 3, 4], max_tokens=2)
    assert fleet.core.stall(fleet.now) is None, "it has just come"
    stall = fleet.core.stall(fleet.now + timeout)
    assert stall is not None
    assert stall.request_id == "1"
