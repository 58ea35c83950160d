"""What the core shows of itself: gauges, counters, and what blocks. Reads only."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.scheduler.core.admission import Backlog
from services.scheduler.core.order import ClassQueue, WaitingQueue
from services.scheduler.core.plan import (
    ClassLoad,
    Counters,
    Loads,
    Stall,
    TenantLoad,
    WorkerLoad,
)
from services.scheduler.core.worker_state import WorkerState

_MOST_TENANTS = 64
"""Tenants told of; their number is the callers', so all of them cannot be."""


def loads(
    *,
    workers: Mapping[str, WorkerState],
    waiting: WaitingQueue,
    backlog: Backlog,
    counters: Counters,
    accepted: int,
    ended: int,
) -> Loads:
    """Gauges and counters."""
    each = tuple(_worker_load(worker) for _, worker in sorted(workers.items()))
    running = np.zeros(len(waiting.classes), np.int64)
    for worker in workers.values():
        ranks = worker.rows.rank[worker.rows.order]
        running += np.bincount(ranks, minlength=running.size)
    # One by one: which tenants have flows of their own depends on the policy.
    seated = Counter(
        worker.rows.request(slot).spec.tenant
        for worker in workers.values()
        for slot in worker.rows.order.tolist()
    )
    pools = [worker.pool for worker in workers.values()]
    return Loads(
        running=sum(load.running for load in each),
        waiting=len(waiting),
        waiting_tokens=backlog.tokens,
        accepted=accepted,
        ended=ended,
        workers=each,
        classes=tuple(_class_load(group, int(running[group.rank])) for group in waiting.classes),
        tenants=tuple(
            TenantLoad(
                name=name,
                running=seated[name],
                waiting=live - seated[name],
                served_tokens=waiting.served_tokens(name),
            )
            for name, live in backlog.tenants(_MOST_TENANTS)
        ),
        counters=replace(
            counters,
            evicted_blocks=counters.evicted_blocks + sum(p.evicted_blocks for p in pools),
            evicted_lifetime_us=counters.evicted_lifetime_us
            + sum(pool.evicted_lifetime_us for pool in pools),
            evicted_idle_us=counters.evicted_idle_us + sum(pool.evicted_idle_us for pool in pools),
        ),
    )


def stall(
    workers: Sequence[WorkerState], waiting: WaitingQueue, homeless: Collection[int], since: int
) -> Stall | None:
    """What blocks, given that nothing has moved since then.

    Args:
        workers: at least one.
        waiting: the queue.
        homeless: handles of queued requests that wait for another worker than these.
        since: microseconds.
    """
    owing = [worker for worker in workers if worker.open]
    for worker in owing:
        step = worker.open[0]
        name = f"worker {worker.spec.worker_id}"
        reason = f"{name} owes the answer to step {step.step_id} of {step.slots.size} requests"
        live = worker.rows.generation[step.slots] == step.generations
        for slot in step.slots[live].tolist():
            request_id = worker.rows.request(slot).spec.request_id
            return Stall(request_id=request_id, reason=reason, since=since)
        return Stall(request_id="", reason=reason, since=since)
    heads = [head for head in waiting.heads() if head.spec.handle not in homeless]
    others = (one for one in waiting if one.spec.handle not in homeless)
    for head in heads or itertools.islice(others, 1):
        needed = -(-(head.num_tokens + 1) // workers[0].spec.block_size)
        free = max(worker.pool.available for worker in workers)
        return Stall(
            request_id=head.spec.request_id,
            reason=f"it is next and is not admitted: its tokens take {needed} blocks, "
            f"the freest worker has {free}",
            since=since,
        )
    for worker in workers:
        for slot in worker.rows.order.tolist():
            return Stall(
                request_id=worker.rows.request(slot).spec.request_id,
                reason=f"it runs on worker {worker.spec.worker_id} and nothing is planned for it",
                since=since,
            )
    return None


def _worker_load(worker: WorkerState) -> WorkerLoad:
    return WorkerLoad(
        worker_id=worker.spec.worker_id,
        epoch=worker.epoch,
        running=int(worker.rows.order.size),
        blocks_total=worker.pool.num_blocks,
        blocks_free=worker.pool.num_free,
        blocks_evictable=worker.pool.num_evictable,
        blocks_pinned=worker.pool.num_pinned,
        steps=worker.next_step_id - 1,
        steps_in_flight=len(worker.open),
        max_num_seqs=worker.seat_cap,
        max_num_batched_tokens=worker.token_budget,
        computed_tokens=worker.computed_tokens,
        execute_us=worker.execute_us,
    )


def _class_load(group: ClassQueue, running: int) -> ClassLoad:
    return ClassLoad(
        name=group.spec.name,
        running=running,
        waiting=group.waiting,
        weight=group.weight,
        ttft_met=group.ttft_met,
        ttft_missed=group.ttft_missed,
        targets_met=group.targets_met,
        targets_missed=group.targets_missed,
    )
