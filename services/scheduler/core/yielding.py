"""Who gives way: how important running requests are beside each other, and whose blocks are taken.

Importance has three parts, compared in order: the **rank** of the class (under PRIORITY one better
for each ageing time since the request arrived), the **level** within the tenant (its first running
request of a class has level 0, its second 1, …, divided by the tenant's weight; 0 but under FAIR),
and the arrival. A request gives way only to one that is strictly more important, so equals never
push each other out in turns; and where a seat is at stake, arrival does not count. After a
displacement by level the two tenants' levels are nearer to each other, so that one cannot be undone
by the next. Where classes have shares (policy FAIR) the planner spares those that had less of
theirs than the one that waits.

Pure functions over the columns of one worker.
"""

from dataclasses import dataclass

import numpy as np

from services.scheduler.core.config import Config, Policy
from services.scheduler.core.order import WaitingQueue
from services.scheduler.core.plan import IntArray
from services.scheduler.core.request import Request
from services.scheduler.core.worker_state import WorkerState

_MOST_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Standing:
    """How important running rows are; columns in the order of `slots`.

    Args:
        slots: int64 [n], in order of arrival.
        ranks: int64 [n], of the class, aged; 0 is the most important.
        levels: int64 [n], within the tenant, per mille of a request.
    """

    slots: IntArray
    ranks: IntArray
    levels: IntArray


def standing(worker: WorkerState, queue: WaitingQueue, config: Config, now: int) -> Standing:
    """The standing of all running requests of a worker."""
    rows, slots = worker.rows, worker.rows.order
    nothing = np.zeros(slots.size, np.int64)
    if config.policy is Policy.FCFS or not queue.is_shared:
        return Standing(slots, nothing, nothing)
    if config.policy is Policy.PRIORITY:
        ages = (now - rows.arrived[slots]) // config.ageing_us
        return Standing(slots, np.maximum(rows.rank[slots] - ages, 0), nothing)
    by_flow = np.argsort(rows.flow[slots], kind="stable")
    flows = rows.flow[slots[by_flow]]
    starts = np.flatnonzero(np.diff(flows, prepend=-1))
    sizes = np.diff(starts, append=slots.size)
    weights = np.array([queue.flow(flow).weight for flow in flows[starts].tolist()], np.int64)
    before = np.arange(slots.size) - np.repeat(starts, sizes)
    levels = np.empty(slots.size, np.int64)
    levels[by_flow] = before * 1_000_000 // np.repeat(weights, sizes)
    return Standing(slots, rows.rank[slots], levels)


def standing_of(
    request: Request, worker: WorkerState, queue: WaitingQueue, config: Config, now: int, ahead: int
) -> tuple[int, int]:
    """The rank and the level that a waiting request would have on a worker.

    Args:
        request: waiting.
        worker: where it would run.
        queue: the request's.
        config: in force.
        now: microseconds.
        ahead: requests of its tenant's that were given a seat there and do not hold it yet.
    """
    if config.policy is Policy.FCFS or not queue.is_shared:
        return 0, 0
    rank = queue.aged_rank(request, now)
    if config.policy is Policy.PRIORITY:
        return rank, 0
    rows = worker.rows
    held = int(np.count_nonzero(rows.flow[rows.order] == request.flow)) + ahead
    return rank, held * 1_000_000 // queue.flow(request.flow).weight


def below(standing: Standing, rank: int, level: int) -> IntArray:
    """The places of all rows that are strictly less important than (rank, level)."""
    ranks, levels = standing.ranks, standing.levels
    places: IntArray = ((ranks > rank) | ((ranks == rank) & (levels > level))).nonzero()[0]
    return places


def later(standing: Standing, worker: WorkerState, slot: int) -> IntArray:
    """The places of all rows that are less important than the one in `slot`, arrival included."""
    ranks, levels = standing.ranks, standing.levels
    arrivals = worker.rows.arrival[standing.slots]
    (own,) = (standing.slots == slot).nonzero()[0].tolist()
    rank, level, arrival = ranks[own], levels[own], arrivals[own]
    by_level = (levels > level) | ((levels == level) & (arrivals > arrival))
    places: IntArray = ((ranks > rank) | ((ranks == rank) & by_level)).nonzero()[0]
    return places


def cheapest_first(standing: Standing, places: IntArray, worker: WorkerState) -> list[int]:
    """Slots of these rows in the order in which they should give way.

    The least important class first; within it the one that costs least to compute again, net of
    the blocks that others hold as well; then the latest arrival. Of more than `_MOST_COMPARED` rows
    only those with the fewest computed tokens are looked at.
    """
    rows, size = worker.rows, worker.spec.block_size
    if places.size > _MOST_COMPARED:
        computed = rows.computed[standing.slots[places]]
        cheapest = np.lexsort((computed, -standing.ranks[places]))[:_MOST_COMPARED]
        places = places[cheapest]
    slots = standing.slots[places]
    costs = np.array(
        [
            int(rows.computed[slot]) - size * worker.pool.shared(rows.block_table(slot))
            for slot in slots.tolist()
        ],
        np.int64,
    )
    order = np.lexsort((-rows.arrival[slots], costs, -standing.ranks[places]))
    chosen: list[int] = slots[order].tolist()
    return chosen
