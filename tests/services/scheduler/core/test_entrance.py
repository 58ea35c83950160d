"""Bounds of the queue and quotas: what is just allowed is taken, one more is refused."""

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.chain import Hashing
from services.scheduler.core.config import Config, TenantPolicy
from services.scheduler.core.plan import AddRequest, EndReason, Refused, Sampling, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker

SPEC = WorkerSpec(
    worker_id="w",
    num_blocks=16,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    vocab_size=13,
    eos_token_ids=(),
    max_in_flight=1,
    model_digest=b"model",
)
POISON = 11


def request(handle: int, *, tokens: int = 4, first: int = 0, **fields: object) -> AddRequest:
    values: dict[str, object] = {
        "request_id": str(handle),
        "handle": handle,
        "attempt": 0,
        "prompt": (np.arange(tokens, dtype=np.uint32) + first) % 13,
        "max_tokens": 4,
        "ignore_eos": True,
        "sampling": Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        **fields,
    }
    return AddRequest(**values)


@pytest.mark.parametrize(
    ("config", "tenant", "reason", "limit"),
    [
        (Config(max_queued_requests=3), "b", "QUEUE_REQUESTS", 3),
        (Config(max_queued_tokens=12), "b", "QUEUE_TOKENS", 12),
        (Config(other_tenants=TenantPolicy(max_queued_requests=3)), "a", "TENANT_REQUESTS", 3),
        (Config(other_tenants=TenantPolicy(max_queued_tokens=12)), "a", "TENANT_TOKENS", 12),
        (Config(tenants=(("a", TenantPolicy(max_live_requests=3)),)), "a", "TENANT_LIVE", 3),
    ],
)
def test_one_more_than_the_bound_is_refused(
    config: Config, tenant: str, reason: str, limit: int
) -> None:
    core = Scheduler(config, SHA256)
    for handle in range(3):
        core.add(request(handle, tenant="a"), 0)
    with pytest.raises(Refused) as refused:
        core.add(request(3, tenant=tenant), 0)
    refusal = refused.value.refusal
    assert (refusal.reason, refusal.limit) == (reason, limit)
    assert refusal.got == (16 if "TOKENS" in reason else 4)
    assert refusal.retry_after_us > 0
    assert core.loads().counters.refused == 1
    core.abort(0, 0)
    core.add(request(3, tenant=tenant), 0)
    core.check_invariants()


def test_what_was_admitted_leaves_the_queue_but_stays_live() -> None:
    policy = TenantPolicy(max_queued_requests=1, max_live_requests=2)
    core = Scheduler(Config(other_tenants=policy), SHA256)
    core.attach(SPEC, 0)
    core.add(request(0), 0)
    assert core.plan("w", 0) is not None
    core.add(request(1), 0)
    with pytest.raises(Refused) as refused:
        core.add(request(2), 0)
    assert refused.value.refusal.reason == "TENANT_LIVE"


def test_what_returns_is_not_refused() -> None:
    core = Scheduler(Config(max_queued_requests=1), SHA256)
    core.add(request(0), 0)
    core.add(request(1, attempt=1), 0)
    (end,) = core.add(request(2, request_id="0", attempt=1), 0).ended
    assert (end.handle, end.reason) == (0, EndReason.REPLACED)
    assert core.loads().waiting == 2


@pytest.mark.parametrize(
    ("config", "reason", "limit"),
    [
        # Twice the bound and the four seats; twice the bound and the 64 tokens of the cache.
        (Config(max_queued_requests=3), "QUEUE_REQUESTS", 10),
        (Config(max_queued_tokens=12), "QUEUE_TOKENS", 88),
        (Config(other_tenants=TenantPolicy(max_queued_requests=2)), "TENANT_REQUESTS", 8),
        (Config(other_tenants=TenantPolicy(max_queued_tokens=4)), "TENANT_TOKENS", 72),
        (Config(other_tenants=TenantPolicy(max_live_requests=3)), "TENANT_LIVE", 6),
    ],
)
def test_who_says_that_it_returns_has_wider_bounds(config: Config, reason: str, limit: int) -> None:
    core = Scheduler(config, SHA256)
    core.attach(SPEC, 0)
    taken = limit // 4 if "TOKENS" in reason else limit
    for handle in range(taken):
        core.add(request(handle, attempt=1), 0)
    with pytest.raises(Refused) as refused:
        core.add(request(taken, attempt=1), 0)
    refusal = refused.value.refusal
    assert (refusal.reason, refusal.limit) == (reason, limit)
    assert refusal.retry_after_us > 0
    core.check_invariants()


def test_what_returns_waits_for_a_worker_like_the_one_that_held_it() -> None:
    core = Scheduler(Config(worker_grace_us=1000, check_block_tables=True), SHA256)
    resumed = np.full(12, 3, np.uint32)
    # 44 tokens in all; and 16 so far, as many as there is place for.
    core.add(request(0, attempt=1, max_tokens=40, resumed=resumed), 0)
    core.add(request(1, attempt=1, max_tokens=None, resumed=resumed), 0)
    small = replace(SPEC, num_blocks=3)
    assert not core.attach(small, 10)[2].ended
    # One that comes after the small worker waits as well; a new one is refused by the true limit.
    core.add(request(2, attempt=1, max_tokens=40), 20)
    with pytest.raises(Refused) as refused:
        core.add(request(3, max_tokens=40), 20)
    refusal = refused.value.refusal
    assert (refusal.reason, refusal.limit) == ("EXCEEDS_KV_CAPACITY", 9)
    assert core.plan("w", 20) is None
    core.check_invariants()
    worker = KvWorker(*core.attach(replace(SPEC, worker_id="large"), 30)[:2])
    ends = {}
    for _ in range(80):
        step = core.plan("large", 30)
        if step is not None:
            worker.send(step)
            ends |= {end.handle: end for end in core.apply("large", worker.step(), 30).ended}
        core.check_invariants()
    assert {end.reason for end in ends.values()} == {EndReason.LENGTH}
    assert [ends[handle].completion_tokens for handle in range(3)] == [40, 60, 40]


def test_what_returns_waits_for_the_grace_time() -> None:
    core = Scheduler(Config(worker_grace_us=1000), SHA256)
    core.attach(replace(SPEC, num_blocks=3), 0)
    core.add(request(0, attempt=1, max_tokens=40), 20)
    assert core.next_wakeup(20) == 1020
    (end,) = core.expire(1020).ended
    assert end.reason is EndReason.NO_WORKER
    core.check_invariants()


def test_tenants_do_not_meet_each_others_ids() -> None:
    core = Scheduler(Config(), SHA256)
    core.add(request(0, request_id="same", tenant="a"), 0)
    assert not core.add(request(1, request_id="same", tenant="b", attempt=1), 0).ended
    with pytest.raises(Refused) as refused:
        core.add(request(2, request_id="same", tenant="b", attempt=1), 0)
    assert refused.value.refusal.reason == "DUPLICATE"
    assert core.abort(0, 0).ended
    (end,) = core.add(request(3, request_id="same", tenant="b", attempt=2), 0).ended
    assert (end.handle, end.reason) == (1, EndReason.REPLACED)
    core.check_invariants()


def test_more_resumed_tokens_than_there_is_place_for_are_refused() -> None:
    core = Scheduler(Config(), SHA256)
    core.attach(SPEC, 0)
    resumed = np.full(61, 3, np.uint32)
    with pytest.raises(Refused) as refused:
        core.add(request(0, max_tokens=None, resumed=resumed), 0)
    refusal = refused.value.refusal
    assert (refusal.field, refusal.reason) == ("request.resumed", "CONTEXT_LENGTH")
    assert (refusal.limit, refusal.got) == (60, 61)
    assert core.add(request(1, max_tokens=None, resumed=resumed[1:]), 0).ended


def test_a_block_that_cannot_be_hashed_ends_its_request_alone() -> None:
    def block(parent: bytes, tokens: bytes) -> bytes:
        if POISON in np.frombuffer(tokens, "<u4").tolist():
            raise ValueError("poisoned")
        return SHA256.block(parent, tokens)

    core = Scheduler(
        Config(check_block_tables=True), Hashing(name="poisoned", root=SHA256.root, block=block)
    )
    spec, epoch, _ = core.attach(SPEC, 0)
    worker = KvWorker(spec, epoch)
    # One is met when it is looked up, the other has the token in a block that fills while it runs.
    core.add(request(0, first=POISON), 0)
    core.add(request(1, tokens=3, first=1, max_tokens=30), 0)
    core.add(request(2, tokens=3, first=5), 0)
    ends = {}
    for _ in range(60):
        step = core.plan("w", 0)
        assert core.broken("w") is None
        ended = list(core.expire(0).ended)
        if step is not None:
            worker.send(step)
            ended += core.apply("w", worker.step(), 0).ended
        ends |= {end.handle: end.reason for end in ended}
        core.check_invariants()
    assert ends[0] is EndReason.FAULT
    assert ends[2] in (EndReason.LENGTH, EndReason.FAULT)
    faults = sum(reason is EndReason.FAULT for reason in ends.values())
    assert core.loads().counters.isolated_faults == faults
    assert len(ends) == 3
    assert ends[1] is EndReason.FAULT, "its 30 tokens are to hold the poisoned one"
