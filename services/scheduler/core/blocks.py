"""One worker's KV blocks: reference counts, the prefix index, who is free.

Owns logical blocks only; the tensors behind them are the worker's. A block is in exactly one state:
held (referenced), evictable (no reference, findable by its hash) or blank (no reference, holds
nothing). Every operation is O(blocks named), whatever the size of the pool.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.scheduler.core.chain import Chain
from services.scheduler.core.eviction import LruQueue
from services.scheduler.core.plan import IntArray


class BlockPool:
    """All blocks of one worker.

    Args:
        num_blocks: size of the pool; ids are below this.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references: IntArray = np.zeros(num_blocks, np.int64)
        self._hashed: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._evictable = LruQueue(num_blocks)
        # A stack: the block given back last is taken first. Block 0 is on top of the new pool.
        self._blank: IntArray = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._num_blank = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._num_blank

    @property
    def num_evictable(self) -> int:
        """Blocks that hold a cached prefix and no request."""
        return len(self._evictable)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return self._num_blank + len(self._evictable)

    def match(self, chain: Chain, most: int) -> IntArray:
        """The blocks of the longest cached prefix of a chain, at most `most`; changes nothing."""
        found: list[int] = []
        for place in range(min(most, len(chain))):
            block = self._index.get(chain[place])
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int64)

    def has(self, digest: bytes) -> bool:
        """True where a block of that hash is cached."""
        return digest in self._index

    def unreferenced(self, blocks: IntArray) -> int:
        """How many of these blocks `hold` would take out of `available`."""
        return int(np.count_nonzero(self._references[blocks] == 0))

    def shared(self, blocks: IntArray) -> int:
        """How many of these held blocks another request holds as well."""
        return int(np.count_nonzero(self._references[blocks] > 1))

    def hold(self, blocks: IntArray) -> None:
        """Adds a reference to matched blocks (all different)."""
        self._evictable.discard(blocks[self._references[blocks] == 0])
        self._references[blocks] += 1

    def allocate(self, count: int) -> IntArray:
        """Takes `count` blocks, each with one reference: blank ones first, then the oldest cached
        ones, which are forgotten. `count` must not exceed `available`.
        """
        from_blank = min(count, self._num_blank)
        self._num_blank -= from_blank
        blocks = self._blank[self._num_blank : self._num_blank + from_blank][::-1]
        if count > from_blank:
            evicted = self._evictable.pop(count - from_blank)
            for block in evicted.tolist():
                self._forget(block)
            blocks = np.concatenate([blocks, evicted])
        else:
            blocks = blocks.copy()
        self._references[blocks] = 1
        return blocks

    def release(self, blocks: IntArray) -> None:
        """Drops one reference of each block of one request, given in the order of its tokens.

        The tail becomes evictable before the head, so that a prefix outlives its suffix.
        """
        self._references[blocks] -= 1
        idle = blocks[self._references[blocks] == 0][::-1]
        hashed = self._hashed[idle]
        self._evictable.push(idle[hashed])
        blank = idle[~hashed]
        self._blank[self._num_blank : self._num_blank + blank.size] = blank
        self._num_blank += blank.size

    def register(self, blocks: Sequence[int], chain: Chain, first: int) -> None:
        """Makes held, full blocks findable, the first of them by digest `first` of the chain.

        Of two blocks with one content the first is kept.
        """
        for place, block in enumerate(blocks, first):
            digest = chain[place]
            if digest not in self._index:
                self._index[digest] = block
                self._hash_of[block] = digest
                self._hashed[block] = True

    def check_invariants(self, held: IntArray) -> None:
        """Asserts that references equal the block tables' and that each block has one state.

        Args:
            held: all entries of all block tables, concatenated.
        """
        expected = np.bincount(held, minlength=self.num_blocks)
        assert np.array_equal(self._references, expected), "references differ from block tables"
        blank = self._blank[: self._num_blank]
        evictable = self._evictable.contents()
        assert evictable.size == len(self._evictable), "evictable count is off"
        states = np.bincount(np.concatenate([blank, evictable]), minlength=self.num_blocks)
        assert np.array_equal(states, (expected == 0).astype(np.int64)), "a block has not one state"
        assert not self._hashed[blank].any(), "a blank block is findable"
        assert self._hashed[evictable].all(), "an evictable block is not findable"
        assert len(self._index) == np.count_nonzero(self._hashed), "index size is off"
        for digest, block in self._index.items():
            assert self._hash_of[block] == digest, "index and blocks disagree"

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        assert digest is not None
        del self._index[digest]
        self._hash_of[block] = None
        self._hashed[block] = False
