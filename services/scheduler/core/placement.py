"""Where a request goes when several workers could take it: pure functions over their state.

Placement is late: a request waits in the one queue and binds to a worker when it is planned there.
The worker that is planning takes it unless another one, which could take it just as well, would
have it done for less work. Work is counted in tokens: those of the request that are not in that
worker's prefix cache, and those that the requests there want computed already. So a prefix hit
draws a request to its worker, and a worker that is busier than the hit is worth lets it go, which
copies a prefix in demand to further workers.
"""

from collections.abc import Sequence

from services.scheduler.core.admission import fits
from services.scheduler.core.request import Request
from services.scheduler.core.worker_state import WorkerState

_MOST_DEFERRALS = 16
"""After that whoever can take the request does: a worker may be slower than its load says."""


def belongs_elsewhere(
    request: Request, computed: int, here: WorkerState, others: Sequence[WorkerState]
) -> bool:
    """Whether one of `others` should take a request that `here` could take now.

    Args:
        request: waiting; its hashes are known as far as `here` looked them up.
        computed: its leading tokens that are cached here.
        here: the worker that is planning.
        others: all other workers, of the same block size and chain of hashes.
    """
    if request.deferrals >= _MOST_DEFERRALS:
        return False
    cost_here: tuple[int, int, int] | None = None
    for other in others:
        if not _has_seat(other, request):
            continue
        if cost_here is None:
            cost_here = _cost(request.num_tokens - computed, here)
        hits = _expected_hits(request, other)
        size = other.spec.block_size
        cost = _cost(request.num_tokens - hits * size, other)
        if cost < cost_here and _has_room(other, request):
            request.deferrals += 1
            return True
    return False


def _cost(to_compute: int, worker: WorkerState) -> tuple[int, int, int]:
    """Tokens until the request is done computing there; ties go by requests, then by epoch."""
    return to_compute + worker.outstanding_tokens, int(worker.rows.order.size), worker.epoch


def _has_seat(worker: WorkerState, request: Request) -> bool:
    assert request.limit is not None
    return (
        fits(request.limit, worker.spec)
        and worker.rows.order.size < worker.seat_cap
        and worker.rows.has_free_slot
    )


def _expected_hits(request: Request, worker: WorkerState) -> int:
    """Blocks of the request's cached prefix there, those that open steps are filling included."""
    if not worker.caches_prefixes:
        return 0
    most = min((request.num_tokens - 1) // worker.spec.block_size, len(request.chain))
    hits = worker.pool.match(request.chain, most).size
    while hits < most and (
        request.chain[hits] in worker.pending or worker.pool.has(request.chain[hits])
    ):
        hits += 1
    return hits


def _has_room(worker: WorkerState, request: Request) -> bool:
    """By the gate of admission (`planning`), but as if nothing of it were cached there."""
    assert request.limit is not None
    if not worker.rows.order.size:
        return True
    size = worker.spec.block_size
    ahead = -(-min(request.num_tokens + size, request.limit - 1) // size)
    return ahead <= worker.room_beyond_running()
