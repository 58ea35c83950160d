"""Which cached block is given up first: least recently used, or a time wheel by reuse class.

Owns the order of blocks that can be given up, and nothing else. Every operation is O(1) amortised
per block named, whatever the size of the pool.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import IntArray

_OUTSIDE = -1
_SMALLEST = 64
_SLOT_BITS = 40

OFTEN = 8
"""Hits from which on a cached block is in the highest reuse class; more are not told apart."""

ReuseCounts = npt.NDArray[np.uint8]
"""uint8 [num_blocks], hits since a block was cached, at most OFTEN; OFTEN too where pinned."""


class EvictionQueue(Protocol):
    """An order of eviction."""

    def __len__(self) -> int:
        """Number of blocks in it."""
        ...

    def push(self, blocks: IntArray) -> None:
        """Adds blocks (none of them in it, all different); of equals the first goes first."""
        ...

    def pop(self, count: int) -> IntArray:
        """Takes the next `count` blocks; `count` must not exceed the length."""
        ...

    def discard(self, blocks: IntArray) -> None:
        """Takes these blocks (all in it, all different) out of the middle."""
        ...

    def contents(self) -> IntArray:
        """All its blocks, the next to go first."""
        ...


class LruQueue:
    """Block ids, oldest first.

    A ring of entries with lazy deletion: a block's entry counts only while `place` points at it, so
    taking a block out of the middle is one write.

    Args:
        num_blocks: ids are below this.
        place: int64 [num_blocks], -1 where a block is in no queue; None makes one. Queues may share
            it if no block is in two of them.
        base: positions count from here; those of queues with one `place` must not overlap.
    """

    def __init__(self, num_blocks: int, place: IntArray | None = None, base: int = 0) -> None:
        self._place = np.full(num_blocks, _OUTSIDE, np.int64) if place is None else place
        self._base = base
        self._ring: IntArray = np.empty(_SMALLEST, np.int64)
        self._head = self._tail = base
        self._size = 0

    def __len__(self) -> int:
        """Number of blocks in it."""
        return self._size

    def push(self, blocks: IntArray) -> None:
        """Appends blocks (none of them queued, all different), the first of them oldest."""
        count = blocks.size
        if self._tail + count - self._head > self._ring.size:
            self._compact(count)
        at = self._tail & (self._ring.size - 1)
        first = min(count, self._ring.size - at)
        self._ring[at : at + first] = blocks[:first]
        if first < count:
            self._ring[: count - first] = blocks[first:]
        self._place[blocks] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self._size += count

    def pop(self, count: int) -> IntArray:
        """Takes the `count` oldest blocks; `count` must not exceed the length."""
        taken: list[IntArray] = []
        missing = count
        while missing:
            # What follows is taken whole as long as there is no hole.
            end = min(self._head + max(_SMALLEST, missing), self._tail)
            blocks = self._read(self._head, end)
            valid = (self._place[blocks] == np.arange(self._head, end)).nonzero()[0]
            if valid.size >= missing:
                valid = valid[:missing]
                self._head += valid.item(missing - 1) + 1
            else:
                self._head = end
            missing -= valid.size
            taken.append(blocks[valid])
        if not taken:
            return np.empty(0, np.int64)
        popped = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self._place[popped] = _OUTSIDE
        self._left(count)
        return popped

    def discard(self, blocks: IntArray) -> None:
        """Takes these blocks (all queued, all different) out of the middle."""
        self._place[blocks] = _OUTSIDE
        self._left(blocks.size)

    def contents(self) -> IntArray:
        """The queued blocks, oldest first."""
        blocks = self._read(self._head, self._tail)
        queued: IntArray = blocks[self._place[blocks] == np.arange(self._head, self._tail)]
        return queued

    def _read(self, start: int, end: int) -> IntArray:
        at = start & (self._ring.size - 1)
        last = at + end - start
        if last <= self._ring.size:
            return self._ring[at:last]
        return np.concatenate([self._ring[at:], self._ring[: last - self._ring.size]])

    def _left(self, count: int) -> None:
        self._size -= count
        if not self._size and self._ring.size > _SMALLEST:
            # Rings of slots that were full once must not add up.
            self._ring = np.empty(_SMALLEST, np.int64)
            self._head = self._tail = self._base

    def _compact(self, more: int) -> None:
        """Drops the holes and makes room for `more`: at least as many as are queued."""
        blocks = self.contents()
        needed = 2 * (blocks.size + more)
        if needed > self._ring.size:
            self._ring = np.empty(1 << (needed - 1).bit_length(), np.int64)
        self._head = self._base
        at = self._head & (self._ring.size - 1)
        self._ring[at : at + blocks.size] = blocks
        self._tail = self._head + blocks.size
        self._place[blocks] = np.arange(self._head, self._tail)


class TimeWheel:
    """Block ids in slots of a wheel: the more often a block was hit, the farther from the cursor.

    A block that comes in is put into the slot at cursor + horizon, where the horizon is that of its
    reuse class; blocks are taken from the slot at the cursor, oldest first, and the cursor moves on
    when that slot is empty. So a block outlives as many generations of the cache as its horizon
    says, and one that was hit often goes too when nobody asks for it any more. This is GreedyDual
    (Young 1994; Cao and Irani 1997) in whole steps: the cursor is its inflation value, the horizon
    the worth of a block, and steps make the priority queue a wheel of queues (Varghese and Lauck
    1987), with O(1) instead of O(log n).

    Reuse classes, by hits since the block was cached: none (1 slot ahead), one, some, and `OFTEN`
    or pinned, which get 1/16, 1/8 and 1/4 of the wheel, or 2, 3 and 4 slots where that is less. On
    a small wheel the farthest slot is the one behind the cursor; one slot is one queue.

    Args:
        num_blocks: ids are below this.
        num_slots: of the wheel; >= 1.
        reuse: read when a block comes in.
    """

    def __init__(self, num_blocks: int, num_slots: int, reuse: ReuseCounts) -> None:
        self._place: IntArray = np.full(num_blocks, _OUTSIDE, np.int64)
        self._slots = [
            LruQueue(num_blocks, self._place, slot << _SLOT_BITS) for slot in range(num_slots)
        ]
        self._reuse = reuse
        wanted = (1, max(2, num_slots // 16), max(3, num_slots // 8), max(4, num_slots // 4))
        horizons = [min(horizon, num_slots - 1) for horizon in wanted]
        self._horizon: IntArray = np.array(
            [horizons[0], horizons[1], *([horizons[2]] * (OFTEN - 2)), horizons[3]], np.int64
        )
        self._horizons = sorted(set(horizons))
        self._cursor = 0
        self._size = 0

    def __len__(self) -> int:
        """Number of blocks in it."""
        return self._size

    def push(self, blocks: IntArray) -> None:
        """Puts blocks (none of them in it, all different) into the slots of their classes."""
        if not blocks.size:
            return
        ahead = self._horizon.take(self._reuse.take(blocks))
        left = blocks.size
        for horizon in self._horizons:
            of_class = ahead == horizon
            count = int(np.count_nonzero(of_class))
            if count:
                slot = self._slots[(self._cursor + horizon) % len(self._slots)]
                slot.push(blocks if count == blocks.size else blocks[of_class])
                left -= count
                if not left:
                    break
        self._size += blocks.size

    def pop(self, count: int) -> IntArray:
        """Takes the next `count` blocks; `count` must not exceed the length."""
        taken: list[IntArray] = []
        missing = count
        while missing:
            slot = self._slots[self._cursor]
            if not len(slot):
                self._cursor = (self._cursor + 1) % len(self._slots)
                continue
            taken.append(slot.pop(min(missing, len(slot))))
            missing -= taken[-1].size
        self._size -= count
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def discard(self, blocks: IntArray) -> None:
        """Takes these blocks (all in it, all different) out of the middle."""
        if not blocks.size:
            return
        slots = self._place[blocks] >> _SLOT_BITS
        first = slots.item(0)
        of_first = slots == first
        if np.count_nonzero(of_first) == blocks.size:
            self._slots[first].discard(blocks)
        else:
            counts = np.bincount(slots)
            for slot in counts.nonzero()[0].tolist():
                self._slots[slot].discard(blocks[slots == slot])
        self._size -= blocks.size

    def contents(self) -> IntArray:
        """All its blocks, the next to go first."""
        count = len(self._slots)
        slots = [self._slots[(self._cursor + ahead) % count] for ahead in range(count)]
        return np.concatenate([slot.contents() for slot in slots])
