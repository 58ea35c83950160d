"""What follows when an attempt at an answer fails: another server, once more later, or the end.

Owns the tally of one answer over all its attempts. No I/O, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.endpoints import Endpoint, Endpoints, may_go_elsewhere
from quire.errors import (
    AlreadyExists,
    AnswerCut,
    Overloaded,
    QuireError,
    Unavailable,
    Unreachable,
)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Cut:
    """An attempt that failed.

    Attributes:
        endpoint: whom it was made at.
        connected: there was a connection when it began, so that the server may have begun.
        progressed: it brought tokens.
        attempt: its number, from 0.
    """

    endpoint: Endpoint
    connected: bool
    progressed: bool
    attempt: int


class Course:
    """The attempts at one answer.

    An answer has begun when it brought tokens, or when a connection was lost on which it may have
    begun: such a one is taken up again, since the higher attempt takes the place of what may still
    run. One that has not begun is offered to every server once. What a server refuses is refused,
    but for an answer that has begun and finds no room where it would go on: that one waits.

    Args:
        endpoints: where it can be tried.
        most_cuts: how often it may be taken up again.
    """

    def __init__(self, endpoints: Endpoints, most_cuts: int) -> None:
        self.tried: set[Endpoint] = set()
        """Servers not to try again before the others."""
        self.last: QuireError
        self._endpoints = endpoints
        self._most_cuts = most_cuts
        self._cuts = 0
        self._begun = False
        self._failures: list[Unavailable] = []

    def after(self, failure: QuireError, cut: Cut, *, cause: BaseException) -> float:
        """Takes a failed attempt.

        Returns:
            How long to wait before the next one, seconds.

        Raises:
            QuireError: there is none; `failure`, or what all servers said.
        """
        self.last = failure
        if isinstance(failure, AlreadyExists) and cut.attempt > 0:
            # An attempt before this one is still being cleared away, at the server that was lost.
            return self._once_more(failure, cause, retry_after_s=None)
        if isinstance(failure, Overloaded) and self._waits_for_room(failure, cut):
            return self._once_more(failure, cause, retry_after_s=failure.retry_after_s)
        if not isinstance(failure, Unavailable):
            raise failure from cause
        lost = isinstance(failure, Unreachable) and cut.connected
        self._begun = self._begun or lost or cut.progressed
        if cut.progressed:
            self.tried.clear()
            self._failures.clear()
        self.tried.add(cut.endpoint)
        self._failures.append(failure)
        elsewhere = may_go_elsewhere(failure)
        if not (self._begun or elsewhere):
            raise failure from cause
        if elsewhere and self._endpoints.has_more(self.tried):
            if self._begun and cut.connected:
                self._count_cut(failure, cause)
            return 0.0
        if not self._begun:
            raise all_of(self._failures) from cause
        pause_s = self._once_more(
            all_of(self._failures), cause, retry_after_s=failure.retry_after_s
        )
        self.tried.clear()
        self._failures.clear()
        return pause_s

    def _waits_for_room(self, failure: Overloaded, cut: Cut) -> bool:
        self._begun = self._begun or cut.progressed
        return self._begun and failure.retry_after_s is not None and not failure.was_shed

    def _once_more(
        self, failure: QuireError, cause: BaseException, *, retry_after_s: float | None
    ) -> float:
        self._count_cut(failure, cause)
        if retry_after_s is not None:
            return min(retry_after_s, _LONGEST_PAUSE_S)
        return min(_FIRST_PAUSE_S * (1 << (self._cuts - 1)), _LONGEST_PAUSE_S)

    def _count_cut(self, failure: QuireError, cause: BaseException) -> None:
        if self._cuts >= self._most_cuts:
            if isinstance(failure, Unreachable):
                message = f"the answer was cut and cannot be taken up again: {failure.message}"
                raise AnswerCut(message) from cause
            raise failure from cause
        self._cuts += 1


def all_of(failures: Sequence[Unavailable]) -> Unavailable:
    """One error for what several servers said, the last of them last."""
    last = failures[-1]
    if len(failures) == 1:
        return last
    message = "; ".join(dict.fromkeys(failure.message for failure in failures))
    return type(last)(message, reason=last.reason, retry_after_s=last.retry_after_s)
