"""What must happen at an instant unless the request has ended by then: deadlines and sheddings."""

import enum
import heapq

from services.scheduler.core.request import Request, Status

_SLACK = 64


class Alarm(enum.IntEnum):
    """What an instant is for."""

    DEADLINE = 0
    """The request ends."""
    SHED = 1
    """It ends unless it has its first token, or is about to."""


class Timers:
    """Instants of live requests, earliest first. Those of ended ones drop out lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._compact_at = _SLACK

    def set(self, instant: int, alarm: Alarm, request: Request) -> None:
        """Notes an instant, microseconds."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if entry[3].status is not Status.ENDED]
            heapq.heapify(self._heap)
            self._compact_at = _SLACK + 2 * len(self._heap)
        heapq.heappush(self._heap, (instant, int(alarm), request.arrival, request))

    def pop(self, now: int) -> tuple[Alarm, Request] | None:
        """Takes the next alarm that is due, or None."""
        if (instant := self.next()) is None or instant > now:
            return None
        _, alarm, _, request = heapq.heappop(self._heap)
        return Alarm(alarm), request

    def next(self) -> int | None:
        """The earliest instant, microseconds, or None."""
        while self._heap and self._heap[0][3].status is Status.ENDED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
