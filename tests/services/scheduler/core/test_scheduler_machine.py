"""Random sequences of every input beside a plain model, invariants after each, down to rest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.scheduler.core.chain import Hashing
from services.scheduler.core.config import Config, Eviction, Policy, PriorityClass, TenantPolicy
from services.scheduler.core.plan import (
    AddRequest,
    EndReason,
    LinkFault,
    Pin,
    Refused,
    Sampling,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.core_model import CoreModel
from tests.fakes.kv_worker import KvWorker

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 13
POISON = VOCAB
EOS = (5,)
SALTS = (b"tA", b"tB", b"sX")


def _block(parent: bytes, tokens: bytes) -> bytes:
    if POISON in np.frombuffer(tokens, "<u4"):
        raise ValueError("poison")
    return SHA256.block(parent, tokens)


HASHING = Hashing(name="poisonable", root=SHA256.root, block=_block)


def spec(worker_id: str, num_blocks: int = 16, digest: bytes = b"model") -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=64,
        vocab_size=VOCAB + 1,
        eos_token_ids=EOS,
        max_in_flight=2,
        model_digest=digest,
    )


def kv_worker(lowered: WorkerSpec, epoch: int) -> KvWorker:
    """A worker that never gives the poisonous token."""
    return KvWorker(replace(lowered, vocab_size=VOCAB), epoch)


def hashes(tokens: list[int], salt: bytes, digest: bytes) -> bytes:
    parent, found = SHA256.root(digest, salt), b""
    for start in range(0, len(tokens) - 3, 4):
        parent = SHA256.block(parent, np.array(tokens[start : start + 4], "<u4").tobytes())
        found += parent
    return found


CLASSES = st.sampled_from(
    [
        (
            PriorityClass(name="high", share=700, floor=700),
            PriorityClass(name="low", share=300, floor=20),
        ),
        (
            PriorityClass(name="high", share=500, floor=400, ttft_target_us=40),
            PriorityClass(name="mid", share=400, floor=50, ttft_target_us=90),
            PriorityClass(name="low", share=100, floor=10),
        ),
        (PriorityClass(name="low", share=1, floor=1, ttft_target_us=25),),
    ]
)
BOUND = st.one_of(st.none(), st.none(), st.integers(1, 6))
TOKENS = st.one_of(st.none(), st.none(), st.integers(5, 80))
POLICIES = st.builds(
    TenantPolicy,
    weight=st.sampled_from([1000, 1000, 3000, 1]),
    max_queued_requests=BOUND,
    max_queued_tokens=TOKENS,
    max_live_requests=BOUND,
)
CONFIGS = st.builds(
    Config,
    check_block_tables=st.just(True),
    max_num_seqs=st.sampled_from([4, 4, 2, 1]),
    max_num_batched_tokens=st.sampled_from([None, None, 5, 1]),
    prefill_chunk_size=st.sampled_from([6, 6, 3, 1]),
    max_new_tokens_per_step=st.sampled_from([1 << 17, 20]),
    worker_grace_us=st.just(50),
    policy=st.sampled_from(list(Policy)),
    classes=CLASSES,
    default_class=st.just("low"),
    tenants=st.lists(st.tuples(st.just("A"), POLICIES), max_size=1).map(tuple),
    other_tenants=st.one_of(st.just(TenantPolicy()), POLICIES),
    tpot_target_us=st.sampled_from([None, None, 4, 30]),
    ageing_us=st.sampled_from([1 << 40, 20]),
    max_queued_requests=st.one_of(st.none(), st.none(), st.integers(1, 8)),
    max_queued_tokens=TOKENS,
    max_pinned_share=st.sampled_from([250, 1000, 0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.workers: dict[str, KvWorker] = {}
        self.next_handle = 0

    @initialize(
        config=CONFIGS,
        caching=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(list(Eviction)),
        partial=st.booleans(),
    )
    def start(self, config: Config, caching: bool, eviction: Eviction, partial: bool) -> None:
        self.fixed = {
            "enable_prefix_caching": caching,
            "eviction": eviction,
            "time_wheel_slots": 4,
            "partial_block_reuse": partial,
        }
        config = replace(config, **self.fixed)
        self.core = Scheduler(config, HASHING)
        self.model = CoreModel(config, VOCAB, POISON)

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        poison=st.sampled_from([None] * 9 + [0]),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (), (3,), (7, 11), EOS]),
        priority_class=st.sampled_from(["", "high", "low", "low", "mid"]),
        tenant=st.sampled_from(["A", "B", "C"]),
        wishes=st.fixed_dictionaries(
            {
                "deadline": st.one_of(st.none(), st.none(), st.integers(0, 200)),
                "ttft_target_us": st.one_of(st.none(), st.integers(1, 200)),
                "tpot_target_us": st.one_of(st.none(), st.none(), st.integers(1, 40)),
                "shed_late": st.booleans(),
                "read_prefix_cache": st.sampled_from([True, True, True, False]),
                "salt": st.sampled_from(SALTS),
            }
        ),
        with_hashes=st.booleans(),
    )
    def add(
        self,
        *,
        shared: int,
        own: list[int],
        poison: int | None,
        max_tokens: int | None,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
        priority_class: str,
        tenant: str,
        wishes: dict[str, object],
        with_hashes: bool,
    ) -> None:
        prompt = [i % VOCAB for i in range(shared)] + own
        if poison is not None:
            prompt[len(prompt) // 2] = POISON
        if wishes["deadline"] is not None:
            wishes["deadline"] += self.now
        known = b""
        if with_hashes and self.core.limits is not None and poison is None:
            known = hashes(prompt, wishes["salt"], self.core.limits.model_digest)
        handle = self.next_handle
        self.submit(
            AddRequest(
                request_id=f"r{handle}",
                handle=handle,
                attempt=0,
                prompt=np.array(prompt, np.uint32),
                prompt_hashes=known,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                stop_token_ids=stop_token_ids,
                sampling=replace(GREEDY, seed=handle),
                priority_class=priority_class,
                tenant=tenant,
                **wishes,
            )
        )

    def submit(self, request: AddRequest) -> bool:
        self.next_handle += 1
        try:
            events = self.core.add(request, self.now)
        except Refused as error:
            self.model.refuse(request, error, self.now)
            return False
        self.model.accept(request, self.now)
        self.model.take(events, self.now)
        return True

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """A higher attempt replaces the live one and goes on from the tokens delivered."""
        old = data.draw(st.sampled_from(self.model.live))
        handle, before = self.next_handle, old.spec
        with pytest.raises(Refused):
            self.core.add(before, self.now)
        taken = self.submit(
            replace(
                before,
                handle=handle,
                attempt=before.attempt + 1,
                resumed=np.array(old.output, np.uint32),
                sampling=replace(GREEDY, seed=handle),
            )
        )
        if taken:
            assert old.end is not None
            assert old.end.reason is EndReason.REPLACED

    @precondition(lambda self: self.model.ended)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A request that ended without an answer comes again, as from a scheduler that died."""
        entries = [one for one in self.model.entries.values() if one.end is not None]
        old = data.draw(st.sampled_from(entries))
        if old.end.reason in (EndReason.STOP, EndReason.LENGTH):
            return
        handle, before = self.next_handle, old.spec
        self.submit(
            replace(
                before,
                request_id=f"r{handle}",
                handle=handle,
                attempt=before.attempt + 1,
                resumed=np.array(old.output, np.uint32),
                sampling=replace(GREEDY, seed=handle),
                deadline=None,
            )
        )

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.model.entries.values())))
        was_live = entry.end is None
        events = self.core.abort(entry.spec.handle, self.now)
        assert len(events.ended) == was_live
        self.model.let_go(entry.spec.handle, events, self.now)

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(list(self.model.entries.values())))
        kept = data.draw(st.integers(0, len(entry.output) + 2))
        events = self.core.finish(entry.spec.handle, kept, self.now)
        for end in events.ended:
            assert end.completion_tokens == min(kept, len(entry.output))
        self.model.take(events, self.now)

    @rule(
        worker_id=st.sampled_from(["a", "b"]),
        num_blocks=st.sampled_from([16, 16, 12]),
        other_model=st.booleans(),
    )
    def attach(self, worker_id: str, num_blocks: int, other_model: bool) -> None:
        if worker_id in self.workers:
            return
        offered = spec(worker_id, num_blocks, b"other" if other_model else b"model")
        if self.core.compatible(offered):
            self.join(offered)

    def join(self, offered: WorkerSpec) -> None:
        lowered, epoch, events = self.core.attach(offered, self.now)
        self.workers[offered.worker_id] = kv_worker(lowered, epoch)
        self.model.attach(lowered)
        self.model.take(events, self.now)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[worker_id]
        self.core.lost(worker_id, self.now)
        self.model.lose(worker_id, self.now)

    @rule(config=CONFIGS)
    def configure(self, config: Config) -> None:
        config = replace(config, **self.fixed)
        with pytest.raises(ValueError, match="time_wheel_slots"):
            self.core.configure(replace(config, time_wheel_slots=5), self.now)
        self.model.configure(config)
        self.model.take(self.core.configure(config, self.now), self.now)

    @rule(
        name=st.sampled_from(["p", "q"]),
        salt=st.sampled_from(SALTS),
        tokens=st.integers(4, 20),
        ttl=st.one_of(st.none(), st.integers(1, 60)),
    )
    def pin(self, name: str, salt: bytes, tokens: int, ttl: int | None) -> None:
        prefix = hashes([i % VOCAB for i in range(tokens)], salt, b"model")
        pin = Pin(name=name, hashes=prefix, expires=None if ttl is None else self.now + ttl)
        limit = self.model.pin_refusal(pin)
        if limit is not None:
            with pytest.raises(Refused) as error:
                self.core.pin(pin, self.now)
            assert (error.value.refusal.reason, error.value.refusal.limit) == ("PIN_LIMIT", limit)
            return
        cached = self.core.cached_hashes()
        places = [cached[at : at + 32] for at in range(0, len(cached), 32)]
        wanted = [prefix[at : at + 32] for at in range(0, len(prefix), 32)]
        assert self.core.pin(pin, self.now) == sum(digest in places for digest in wanted)
        self.model.pins[name] = pin

    @rule(name=st.sampled_from(["p", "q"]))
    def unpin(self, name: str) -> None:
        there = self.model.pins.pop(name, None) is not None
        assert self.core.unpin(name, self.now) is there

    @rule()
    def flush(self) -> None:
        before = self.core.loads().workers
        assert self.core.flush(self.now) == sum(load.blocks_evictable for load in before)
        for was, load in zip(before, self.core.loads().workers, strict=True):
            assert load.blocks_evictable == 0
            assert load.blocks_free == was.blocks_free + was.blocks_evictable
            assert load.blocks_pinned == was.blocks_pinned

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), repeat=st.integers(1, 6), pause=st.integers(0, 3))
    def run(self, data: st.DataObject, repeat: int, pause: int) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        for _ in range(repeat):
            self.plan(worker_id)
            if data.draw(st.booleans()):
                self.plan(worker_id)
            self.now += pause
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
        self.expire()

    def expire(self) -> None:
        self.model.take(self.core.expire(self.now), self.now, timed=True)
        self.model.expired(self.now, self.core.next_wakeup(self.now))

    def plan(self, worker_id: str) -> bool:
        plan = self.core.plan(worker_id, self.now)
        fault = self.core.broken(worker_id)
        assert fault is None, fault
        if plan is not None:
            self.workers[worker_id].send(plan)
            loads = {load.worker_id: load.running for load in self.core.loads().workers}
            self.model.planned(plan, worker_id, loads[worker_id])
        wakeup = self.core.next_wakeup(self.now)
        if wakeup is not None and wakeup <= self.now:
            self.expire()  # ends that came about while planning
        self.core.check_invariants()
        return plan is not None

    def answer(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        if worker.unanswered:
            result = worker.step()
            tokens = int(worker.sent[-1 - worker.unanswered].num_tokens.sum())
            result = replace(result, execute_us=2 + tokens)
            self.model.take(self.core.apply(worker_id, result, self.now), self.now)

    @invariant()
    def agrees(self) -> None:
        self.core.check_invariants()
        self.model.agrees(self.core.loads(), self.core.pins())

    def teardown(self) -> None:
        """Everything left runs to its end, and nothing stays behind."""
        if not hasattr(self, "core"):
            return
        digest = self.core.limits.model_digest if self.core.limits else b"model"
        self.join(spec("big", digest=digest))
        bound = 100 + 100 * len(self.model.live)
        for _ in range(bound):
            if self.core.is_idle and not any(w.unanswered for w in self.workers.values()):
                break
            self.now += 1
            self.expire()
            for worker_id in self.workers:
                self.plan(worker_id)
                self.answer(worker_id)
        self.core.check_invariants()
        self.model.at_rest(self.core.loads())
        for worker_id in self.workers:
            if self.plan(worker_id):  # released slots are told once
                self.answer(worker_id)
            assert self.core.plan(worker_id, self.now) is None
        expiring = [pin.expires for pin in self.core.pins() if pin.expires is not None]
        assert self.core.next_wakeup(self.now) == min(expiring, default=None)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=25,
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
