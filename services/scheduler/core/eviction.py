"""Which cached block is given up first: least recently used, O(1) amortised at any pool size.

Owns the order of evictable blocks and nothing else. A ring of entries with lazy deletion: a block's
entry counts only while `_place` points at it, so taking a block out of the middle is one write.
"""

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import IntArray


class LruQueue:
    """Block ids, oldest first.

    Args:
        num_blocks: ids are below this.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ring: IntArray = np.empty(max(2 * num_blocks, 64), np.int64)
        self._place: npt.NDArray[np.int64] = np.full(num_blocks, -1, np.int64)
        self._head = 0
        self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: IntArray) -> None:
        """Appends blocks (none of them queued, all different), the first of them oldest."""
        if self._tail + blocks.size - self._head > self._ring.size:
            self._compact()
        entries = np.arange(self._tail, self._tail + blocks.size)
        self._ring[entries % self._ring.size] = blocks
        self._place[blocks] = entries
        self._tail += blocks.size
        self._size += blocks.size

    def pop(self, count: int) -> IntArray:
        """Takes the `count` oldest blocks; `count` must not exceed the length."""
        taken: list[IntArray] = []
        missing = count
        while missing:
            end = min(self._head + max(64, 2 * missing), self._tail)
            entries = np.arange(self._head, end)
            blocks = self._ring[entries % self._ring.size]
            valid = np.flatnonzero(self._place[blocks] == entries)[:missing]
            missing -= valid.size
            self._head = end if missing else int(entries[valid[-1]]) + 1
            taken.append(blocks[valid])
        popped = np.concatenate(taken) if taken else np.empty(0, np.int64)
        self._place[popped] = -1
        self._size -= count
        return popped

    def discard(self, blocks: IntArray) -> None:
        """Takes these blocks (all queued, all different) out of the middle."""
        self._place[blocks] = -1
        self._size -= blocks.size

    def contents(self) -> IntArray:
        """The queued blocks, oldest first."""
        entries = np.arange(self._head, self._tail)
        blocks = self._ring[entries % self._ring.size]
        queued: IntArray = blocks[self._place[blocks] == entries]
        return queued

    def _compact(self) -> None:
        blocks = self.contents()
        self._ring[: blocks.size] = blocks
        self._head, self._tail = 0, blocks.size
        self._place[blocks] = np.arange(blocks.size)
