"""What was changed in the running scheduler, by whom: kept for a while, and logged for good."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)

KEPT_CHANGES = 1000
"""Changes that are kept to be listed; older ones are in the log alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose change it is.

    Args:
        actor: who, as they say.
        peer: where the call came from.
        reason: why, or "".
    """

    actor: str
    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value that was changed.

    Args:
        time_us: when, microseconds since 1970 (UTC).
        origin: by whom.
        field: which one.
        old: its value before, as text.
        new: its value since.
        version: of the configuration since.
    """

    time_us: int
    origin: Origin
    field: str
    old: str
    new: str
    version: int


def _unix_us() -> int:
    return time.time_ns() // 1000


class AuditLog:
    """The latest changes, and the version of the configuration, which counts them.

    Args:
        clock: microseconds since 1970.
    """

    def __init__(self, clock: Callable[[], int] = _unix_us) -> None:
        self._clock = clock
        self._kept: deque[Change] = deque(maxlen=KEPT_CHANGES)
        self._total = 0
        self._version = 1

    @property
    def version(self) -> int:
        """Of the configuration in force; 1 is the one at the start."""
        return self._version

    @property
    def total(self) -> int:
        """Changes since the start, those that are no longer kept included."""
        return self._total

    def configured(
        self, origin: Origin, differences: Iterable[tuple[str, str, str]]
    ) -> tuple[Change, ...]:
        """Notes a new configuration.

        Args:
            origin: by whom.
            differences: field, old and new value of each.
        """
        self._version += 1
        return tuple(self.note(origin, *difference) for difference in differences)

    def note(self, origin: Origin, field: str, old: str, new: str) -> Change:
        """Notes one changed value."""
        change = Change(
            time_us=self._clock(),
            origin=origin,
            field=field,
            old=old,
            new=new,
            version=self._version,
        )
        self._kept.append(change)
        self._total += 1
        why = f", since: {origin.reason}" if origin.reason else ""
        log.info("%s: %s -> %s, by %s at %s%s", field, old, new, origin.actor, origin.peer, why)
        return change

    def latest(self, limit: int) -> tuple[Change, ...]:
        """The last `limit` changes in order, 0 for all that are kept."""
        first = max(0, len(self._kept) - limit) if limit else 0
        return tuple(itertools.islice(self._kept, first, None))
