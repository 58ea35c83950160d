"""Prefixes that stay cached on every worker, by name, until they expire or their blocks are needed.

Owns the pins; each worker's pool keeps the blocks (`pinned`).
"""

from collections.abc import Mapping

from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import Pin, Refusal, Refused
from services.scheduler.core.worker_state import WorkerState


class PinBoard:
    """All pins.

    Args:
        workers: attached ones.
    """

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = workers
        self._pins: dict[str, Pin] = {}

    def pins(self) -> tuple[Pin, ...]:
        """All pins, by name."""
        return tuple(pin for _, pin in sorted(self._pins.items()))

    def add(self, pin: Pin, max_share: int) -> None:
        """Keeps a prefix; a pin of the same name goes.

        Args:
            pin: what to keep.
            max_share: of the largest pool that all pins together may name, per mille.

        Raises:
            Refused: they would name more (PIN_LIMIT); nothing has changed.
        """
        others = sum(len(one.hashes) for name, one in self._pins.items() if name != pin.name)
        blocks = max((worker.pool.num_blocks for worker in self._workers.values()), default=0)
        left = blocks * max_share // 1000 - others // DIGEST_BYTES
        named = len(pin.hashes) // DIGEST_BYTES
        if named > left:
            raise Refused(
                Refusal(field="prompt", reason="PIN_LIMIT", limit=max(0, left), got=named)
            )
        self.remove(pin.name)
        self._pins[pin.name] = pin
        for worker in self._workers.values():
            worker.pool.pin(pin.hashes)

    def remove(self, name: str) -> bool:
        """Lets a prefix go; False: there is no pin of that name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        for worker in self._workers.values():
            worker.pool.unpin(pin.hashes)
        return True

    def attached(self, worker: WorkerState) -> None:
        """A worker came: it keeps what the others keep."""
        for pin in self._pins.values():
            worker.pool.pin(pin.hashes)

    def expire(self, now: int) -> None:
        """Lets those go whose time is over."""
        over = [p.name for p in self._pins.values() if p.expires is not None and p.expires <= now]
        for name in over:
            self.remove(name)

    def next_expiry(self) -> int | None:
        """When the next one's time is over, microseconds; None: never."""
        instants = (pin.expires for pin in self._pins.values() if pin.expires is not None)
        return min(instants, default=None)
