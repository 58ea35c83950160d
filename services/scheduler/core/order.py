"""Who goes next and who gives way: pure functions and the waiting queue.

One global queue in order of arrival. A preempted request keeps its arrival, so it goes before all
that came later, and equals never push each other out in turns.
"""

import heapq
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import IntArray
from services.scheduler.core.request import Request, Status


class WaitingQueue:
    """Requests that hold no blocks, earliest arrival first. Ended ones drop out lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in order of arrival."""
        return (r for _, r in sorted(self._heap) if r.status is Status.WAITING)

    def push(self, request: Request) -> None:
        """Queues a request whose status is WAITING."""
        heapq.heappush(self._heap, (request.arrival, request))
        self._size += 1

    def pop(self) -> Request | None:
        """Takes the first request, or None."""
        while self._heap:
            request = heapq.heappop(self._heap)[1]
            if request.status is Status.WAITING:
                self._size -= 1
                return request
        return None

    def push_back(self, requests: Iterable[Request]) -> None:
        """Queues again what `pop` gave."""
        for request in requests:
            self.push(request)

    def ended(self) -> None:
        """Counts out one queued request whose status has just become ENDED."""
        self._size -= 1


def victim_for(requester: int, running: IntArray, arrival: npt.NDArray[np.int64]) -> int:
    """Which slot gives up its blocks so that `requester` can go on.

    Args:
        requester: slot that needs blocks; one of `running`.
        running: slots that hold blocks, in order of arrival.
        arrival: order of arrival by slot.

    Returns:
        The latest arrival if it came after the requester, else the requester itself.
    """
    last = int(running[-1])
    return last if arrival[last] > arrival[requester] else requester
