"""Waiting requests that are more important take seats and blocks from running ones.

Whose turn it is comes from `order`, who is how important from `yielding`. Here is decided whether
anybody has to give way, and that nobody does in vain.
"""

import numpy as np

from services.scheduler.core.config import Policy
from services.scheduler.core.making import Making
from services.scheduler.core.order import WaitingQueue
from services.scheduler.core.placement import belongs_elsewhere
from services.scheduler.core.plan import IntArray, Mask
from services.scheduler.core.prospects import may_enter
from services.scheduler.core.request import Request
from services.scheduler.core.yielding import below, cheapest_first, standing_of

_MAX_DISPLACING = 8
"""Waiting requests that displace running ones in one step; bounds the time of `plan`."""


class Displacement:
    """Makes room for waiting requests in one step.

    Args:
        making: the step; its decodes are known.
    """

    def __init__(self, making: Making) -> None:
        self._making = making
        self._waiting = making.around.waiting
        self._seated: list[Request] = []
        self._blocks = 0
        self._tokens = 0
        """What they need, and want computed in this step."""

    def run(self) -> list[Request]:
        """The requests for which others gave way, taken out of the queue to be admitted first."""
        making = self._making
        if making.around.config.policy is Policy.FCFS or not making.worker.rows.order.size:
            return self._seated
        blocked: set[int] = set()
        while self._tokens < making.prefill_left and len(self._seated) < _MAX_DISPLACING:
            for request in self._waiting.contenders():
                if request.flow in blocked:
                    continue
                if self._make_way(request):
                    break
                blocked.add(request.flow)
            else:
                break
        return self._seated

    def _make_way(self, request: Request) -> bool:
        """Takes a seat, and the blocks it needs, for a waiting request. False: none are to be."""
        making, worker = self._making, self._making.worker
        rows, promised = worker.rows, len(self._seated)
        if not may_enter(request, worker) or rows.num_free_slots <= promised:
            return False
        places = self._less_important(request)
        if not places.size:
            return False
        prospect = making.assess(request)
        if prospect is None:
            return False
        lacks_seat = rows.order.size + promised >= worker.seat_cap
        lacking = prospect.blocks + self._blocks - making.room()
        if not lacks_seat and lacking <= 0:
            return False
        others = making.around.others
        if others and belongs_elsewhere(request, prospect.computed, worker, others):
            return False
        victims: list[int] = []
        for slot in cheapest_first(making.standing(), places, worker):
            if not (lacks_seat and not victims) and lacking <= 0:
                break
            victims.append(slot)
            lacking -= worker.blocks_freed_by(slot)
        if lacking > 0:
            return False
        for slot in victims:
            making.around.counters.displaced += 1
            making.preempt(slot)
        self._waiting.remove(request)
        self._seated.append(request)
        self._blocks += prospect.blocks
        self._tokens += min(request.num_tokens - prospect.computed, making.chunk_size)
        return True

    def _less_important(self, request: Request) -> IntArray:
        """Places of the running requests that would give way to this one."""
        making, around = self._making, self._making.around
        ahead = sum(one.flow == request.flow for one in self._seated)
        rank, level = standing_of(
            request, making.worker, self._waiting, around.config, around.now, ahead
        )
        standings = making.standing()
        places = below(standings, rank, level)
        if making.is_fair:
            ranks = making.worker.rows.rank[standings.slots[places]]
            places = places[~is_owed(request, ranks, self._waiting)]
        return places


def is_owed(request: Request, ranks: IntArray, waiting: WaitingQueue) -> Mask:
    """Which running requests of these classes are safe from a waiting one of a better class.

    Those of classes that had less of their share of the tokens than its class has: else
    displacement alone would give all tokens to the best class that has a backlog.
    """
    served = np.array([group.served for group in waiting.classes], np.int64)
    owed: Mask = (ranks > request.rank) & (served[ranks] < served[request.rank])
    return owed
