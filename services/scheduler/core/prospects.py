"""What the admission of a waiting request would take: its cached prefix, the blocks it needs.

Looks only; nothing is held or given here.
"""

from dataclasses import dataclass

from services.scheduler.core.admission import fits
from services.scheduler.core.config import Config
from services.scheduler.core.draft import NO_INTS
from services.scheduler.core.plan import IntArray
from services.scheduler.core.request import Request
from services.scheduler.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the admission of a waiting request would take.

    Args:
        hits: int64 [n], its cached prefix.
        partial: a block whose first tokens are the next ones, and how many those are.
        computed: tokens that need not be computed.
        ahead: blocks it needs besides `hits` until it has one block's worth of output.
        idle_hits: blocks of `hits` that nobody holds.
    """

    hits: IntArray
    partial: tuple[int, int] | None
    computed: int
    ahead: int
    idle_hits: int

    @property
    def blocks(self) -> int:
        """Blocks that are then no longer there for others."""
        return self.ahead + self.idle_hits


def may_enter(request: Request, worker: WorkerState) -> bool:
    """Whether a waiting request can be admitted there, seats and blocks aside."""
    if request.limit is None:
        return False  # it returned, and is too long for every attached worker
    # Tokens of a preempted request that are still being sampled must come home first.
    return not request.in_flight and fits(request.limit, worker.spec)


def prospect_of(request: Request, worker: WorkerState, config: Config) -> Prospect | None:
    """What the admission would take; None while an open step fills the request's next block."""
    size = worker.spec.block_size
    assert request.limit is not None
    total = request.num_tokens
    hits, partial = NO_INTS, None
    if worker.caches_prefixes:
        if len(request.chain) < total // size:
            worker.extend_hashes(request, request.token_ids())
        if request.spec.read_prefix_cache:
            # At least one token is computed, for there must be something to sample from.
            most = (total - 1) // size
            hits = worker.pool.match(request.chain, most)
            if hits.size < most and request.chain[hits.size] in worker.pending:
                return None
            if config.partial_block_reuse:
                partial = _partial_hit(request, worker, hits.size, total)
    computed = hits.size * size + (partial[1] if partial else 0)
    ahead = -(-min(total + size, request.limit - 1) // size) - hits.size
    idle_hits = worker.pool.unreferenced(hits)
    if partial is not None and ahead + idle_hits >= worker.pool.available:
        # Its source is held while the step is made; that must not stand in the way.
        partial, computed = None, hits.size * size
    return Prospect(hits, partial, int(computed), int(ahead), idle_hits)


def _partial_hit(
    request: Request, worker: WorkerState, hits: int, total: int
) -> tuple[int, int] | None:
    size = worker.spec.block_size
    parent = request.chain[hits - 1] if hits else worker.root(request)
    tokens = request.token_ids()[hits * size : min(hits * size + size, total - 1)]
    return worker.pool.partial_match(parent, tokens)
