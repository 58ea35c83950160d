"""Blocks that stay cached though nobody uses them, since their digests are pinned.

Owns how often each digest is pinned, which blocks have such digests, and those of them that are
kept: pinned, findable and held by nobody. Names and times of pins are others' business.
"""

import numpy as np
import numpy.typing as npt

from services.scheduler.core.eviction import LruQueue
from services.scheduler.core.plan import IntArray, Mask


class PinnedBlocks:
    """The pins of one pool.

    Args:
        num_blocks: ids are below this.
        most: blocks kept at a time.
    """

    def __init__(self, num_blocks: int, most: int) -> None:
        self.most = most
        self._num_blocks = num_blocks
        self._counts: dict[bytes, int] = {}
        # None until the first pin: most pools never have one.
        self._marked: npt.NDArray[np.bool_] | None = None
        self._is_kept: npt.NDArray[np.bool_] | None = None
        self._kept: LruQueue | None = None

    def __len__(self) -> int:
        """Number of kept blocks."""
        return 0 if self._kept is None else len(self._kept)

    def __contains__(self, digest: bytes) -> bool:
        """True where a digest is pinned."""
        return digest in self._counts

    @property
    def any(self) -> bool:
        """Something is pinned."""
        return bool(self._counts)

    def add(self, digest: bytes) -> None:
        """Pins a digest once more."""
        if self._marked is None:
            self._marked = np.zeros(self._num_blocks, np.bool_)
            self._is_kept = np.zeros(self._num_blocks, np.bool_)
            self._kept = LruQueue(self._num_blocks)
        self._counts[digest] = self._counts.get(digest, 0) + 1

    def drop(self, digest: bytes) -> bool:
        """Takes one pin of a digest back; True where it was the last one.

        Raises:
            KeyError: it is not pinned.
        """
        left = self._counts[digest] - 1
        if left:
            self._counts[digest] = left
        else:
            del self._counts[digest]
        return not left

    def mark(self, blocks: IntArray, pinned: bool) -> None:
        """Notes that the digests of these findable blocks are pinned, or not any more."""
        if self._marked is not None:
            self._marked[blocks] = pinned

    def marked(self, blocks: IntArray) -> Mask:
        """Which of these blocks have pinned digests."""
        return self._which(self._marked, blocks)

    def kept(self, blocks: IntArray) -> Mask:
        """Which of these blocks are kept."""
        return self._which(self._is_kept, blocks)

    def keep(self, blocks: IntArray) -> Mask:
        """Keeps those of these idle blocks (none kept) whose digests are pinned, as far as allowed.

        Args:
            blocks: what matters most comes last.

        Returns:
            Which are kept now.
        """
        wanted = self.marked(blocks).nonzero()[0]
        room = max(0, self.most - len(self))
        chosen = wanted[wanted.size - min(room, wanted.size) :]
        taken = np.zeros(blocks.size, np.bool_)
        if chosen.size:
            assert self._kept is not None
            assert self._is_kept is not None
            taken[chosen] = True
            self._kept.push(blocks[chosen])
            self._is_kept[blocks[chosen]] = True
        return taken

    def give_up(self, count: int) -> IntArray:
        """Takes up to `count` kept blocks out, those kept longest first."""
        if self._kept is None or self._is_kept is None:
            return np.empty(0, np.int64)
        blocks = self._kept.pop(min(count, len(self._kept)))
        self._is_kept[blocks] = False
        return blocks

    def remove(self, blocks: IntArray) -> None:
        """Takes these kept blocks out."""
        if blocks.size:
            assert self._kept is not None
            assert self._is_kept is not None
            self._kept.discard(blocks)
            self._is_kept[blocks] = False

    def contents(self) -> IntArray:
        """The kept blocks, those kept longest first."""
        return np.empty(0, np.int64) if self._kept is None else self._kept.contents()

    def _which(self, column: npt.NDArray[np.bool_] | None, blocks: IntArray) -> Mask:
        if column is None:
            return np.zeros(blocks.size, np.bool_)
        mask: Mask = column[blocks]
        return mask
