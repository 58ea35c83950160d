"""Random sequences of every input, with the invariants checked after each, down to quiesce."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    EndReason,
    Events,
    LinkFault,
    Refused,
    Sampling,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker, expected_output

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 13
EOS = (5,)


def spec(worker_id: str, num_blocks: int = 16) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=64,
        vocab_size=VOCAB,
        eos_token_ids=EOS,
        max_in_flight=2,
        model_digest=b"model",
    )


def ending(request: AddRequest) -> tuple[int, ...]:
    """The tokens that end a request."""
    return (*(() if request.ignore_eos else EOS), *request.stop_token_ids)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        config = Config(
            check_block_tables=True, prefill_chunk_size=6, worker_grace_us=50, max_num_seqs=4
        )
        self.core = Scheduler(config, SHA256)
        self.workers: dict[str, KvWorker] = {}
        self.requests: dict[int, AddRequest] = {}
        self.output: dict[int, list[int]] = {}
        self.ended: dict[int, EndReason] = {}
        self.next_handle = 0

    def take(self, events: Events) -> None:
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            assert handle not in self.ended, "a token after the end"
            self.output[handle].append(token)
        for end in events.ended:
            assert end.handle not in self.ended, "two ends"
            self.ended[end.handle] = end.reason
            request = self.requests[end.handle]
            output = self.output[end.handle]
            if end.reason in (EndReason.STOP, EndReason.LENGTH):
                self.check_output(request, output)
                stopped = output[-1] in ending(request)
                assert end.reason is (EndReason.STOP if stopped else EndReason.LENGTH)
                assert end.stop_token_id == (output[-1] if stopped else None)
                assert end.completion_tokens == len(output)
                assert end.prompt_tokens == request.prompt.size

    def check_output(self, request: AddRequest, output: list[int]) -> None:
        wanted = expected_output(
            request.prompt.tolist(),
            request.max_tokens or 64 - request.prompt.size,
            VOCAB,
            ending(request),
        )
        if request.max_tokens is None and len(output) < len(wanted):
            # Capped to what the largest pool held when it was admitted: 12 blocks and one token.
            assert request.prompt.size + len(output) == 12 * 4 + 1
            wanted = wanted[: len(output)]
        assert output == wanted

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (), (3,), (7, 11), EOS]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        max_tokens: int | None,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        prompt = [i % VOCAB for i in range(shared)] + own
        handle = self.next_handle
        self.next_handle += 1
        request = AddRequest(
            request_id=f"r{handle}",
            handle=handle,
            attempt=0,
            prompt=np.array(prompt, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            sampling=GREEDY,
        )
        self.requests[handle] = request
        self.output[handle] = []
        try:
            self.take(self.core.add(request, self.now))
        except Refused:
            del self.requests[handle], self.output[handle]

    @precondition(lambda self: len(self.ended) < len(self.requests))
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """A higher attempt replaces the live one and goes on from the tokens delivered."""
        old = data.draw(st.sampled_from([h for h in self.requests if h not in self.ended]))
        before = self.requests[old]
        handle = self.next_handle
        self.next_handle += 1
        request = AddRequest(
            request_id=before.request_id,
            handle=handle,
            attempt=before.attempt + 1,
            prompt=before.prompt,
            resumed=np.array(self.output[old], np.uint32),
            max_tokens=before.max_tokens,
            ignore_eos=before.ignore_eos,
            stop_token_ids=before.stop_token_ids,
            sampling=GREEDY,
        )
        with pytest.raises(Refused):
            self.core.add(before, self.now)
        self.requests[handle] = request
        self.output[handle] = list(self.output[old])
        self.take(self.core.add(request, self.now))
        assert self.ended[old] is EndReason.REPLACED

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.take(self.core.abort(data.draw(st.sampled_from(sorted(self.requests))), self.now))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        for end in self.core.finish(handle, 0, self.now).ended:
            assert end.completion_tokens == 0
            self.ended[end.handle] = end.reason

    @rule(worker_id=st.sampled_from(["a", "b"]), num_blocks=st.sampled_from([16, 16, 12]))
    def attach(self, worker_id: str, num_blocks: int) -> None:
        if worker_id in self.workers:
            return
        lowered, epoch, events = self.core.attach(spec(worker_id, num_blocks), self.now)
        self.workers[worker_id] = KvWorker(lowered, epoch)
        self.take(events)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[worker_id]
        self.core.lost(worker_id, self.now)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), repeat=st.integers(1, 6))
    def run(self, data: st.DataObject, repeat: int) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        for _ in range(repeat):
            self.plan(worker_id)
            if data.draw(st.booleans()):
                self.plan(worker_id)
            self.answer(worker_id)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def fail_rows(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[worker_id]
        slots = sorted(worker._rows)
        if slots:
            worker.failing_slots = {data.draw(st.sampled_from(slots))}
            self.plan(worker_id)
            while worker.unanswered:
                self.answer(worker_id)
            worker.failing_slots = set()

    @rule(step=st.integers(1, 30))
    def pass_time(self, step: int) -> None:
        self.now += step
        self.take(self.core.expire(self.now))
        wakeup = self.core.next_wakeup(self.now)
        assert wakeup is None or wakeup > self.now

    def plan(self, worker_id: str) -> None:
        plan = self.core.plan(worker_id, self.now)
        if plan is not None:
            self.workers[worker_id].send(plan)
        self.core.check_invariants()

    def answer(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        if worker.unanswered:
            self.take(self.core.apply(worker_id, worker.step(), self.now))

    @invariant()
    def agrees(self) -> None:
        self.core.check_invariants()
        loads = self.core.loads()
        assert loads.running + loads.waiting == len(self.requests) - len(self.ended)

    def teardown(self) -> None:
        """Everything left runs to its end, and nothing stays behind."""
        if "big" not in self.workers:
            lowered, epoch, events = self.core.attach(spec("big"), self.now)
            self.workers["big"] = KvWorker(lowered, epoch)
            self.take(events)
        for _ in range(2000):
            if self.core.is_idle and not any(w.unanswered for w in self.workers.values()):
                break
            for worker_id in self.workers:
                self.plan(worker_id)
                self.answer(worker_id)
        assert len(self.ended) == len(self.requests), "a request did not end"
        self.core.check_invariants()
        for load in self.core.loads().workers:
            assert load.running == 0
            assert load.blocks_free + load.blocks_evictable == load.blocks_total


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_a_result_of_another_step_is_a_link_fault() -> None:
    core = Scheduler(Config(check_block_tables=True), SHA256)
    lowered, epoch, _ = core.attach(spec("a"), 0)
    worker = KvWorker(lowered, epoch)
    core.add(
        AddRequest(
            request_id="r",
            handle=1,
            attempt=0,
            prompt=np.array([1, 2, 3], np.uint32),
            max_tokens=4,
            ignore_eos=True,
            sampling=GREEDY,
        ),
        0,
    )
    plan = core.plan("a", 0)
    assert plan is not None
    worker.send(plan)
    result = worker.step()
    core.apply("a", result, 0)
    with pytest.raises(LinkFault):
        core.apply("a", result, 0)
