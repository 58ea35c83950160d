"""One worker's KV blocks: reference counts, who is findable by which digest, who is free.

Owns logical blocks only; the tensors behind them are the worker's. A block is in exactly one state:
held (referenced), evictable (no reference, findable by its digest), kept (the same, and pinned) or
blank (no reference, holds nothing). Every operation is O(blocks named), whatever the size of the
pool, and works on all of them at once: call it with many.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.scheduler.core.cache_log import CacheLog, Removed
from services.scheduler.core.chain import DIGEST_BYTES, Chain
from services.scheduler.core.config import Eviction
from services.scheduler.core.eviction import (
    OFTEN,
    EvictionQueue,
    LruQueue,
    ReuseCounts,
    TimeWheel,
)
from services.scheduler.core.partial import PartialIndex
from services.scheduler.core.pinned import PinnedBlocks
from services.scheduler.core.plan import IntArray, TokenArray
from services.scheduler.core.prefix_index import PrefixIndex

_LOOKED_UP_AT_ONCE = (1, 31, 256, 2048)
"""Digests of a chain looked up by one call after the other, the last size repeated: a miss at the
beginning must not cost a whole chain."""


class BlockPool:
    """All blocks of one worker.

    Args:
        num_blocks: size of the pool; ids are below this.
        eviction: which cached blocks are given up first.
        time_wheel_slots: where that is the time wheel.
        max_pinned: most blocks kept for pins at a time; None: all. May be set later.
        block_size: tokens of a block; needed with `partial_hash`.
        partial_hash: `Hashing.block`, with which `partial_match` works; None: it finds nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        eviction: Eviction = Eviction.LRU,
        time_wheel_slots: int = 64,
        max_pinned: int | None = None,
        block_size: int = 0,
        partial_hash: Callable[[bytes, bytes], bytes] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.now = 0
        """Microseconds; set before each verb by whoever has the clock."""
        self.hits = 0
        """Cached blocks that were held again, since start."""
        self.evicted_blocks = 0
        self.evicted_lifetime_us = 0
        """Sum over evicted blocks, from when they became findable."""
        self.evicted_idle_us = 0
        """Sum over evicted blocks, from their last release."""
        self.log: CacheLog | None = None
        """Told of what is given up; None: nobody wants to know."""
        self._references: IntArray = np.zeros(num_blocks, np.int64)
        self._index = PrefixIndex(num_blocks)
        self._reuse: ReuseCounts = np.zeros(num_blocks, np.uint8)
        self._cached_at: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._used_at: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._evictable: EvictionQueue = (
            LruQueue(num_blocks)
            if eviction is Eviction.LRU
            else TimeWheel(num_blocks, time_wheel_slots, self._reuse)
        )
        self._pinned = PinnedBlocks(num_blocks, num_blocks if max_pinned is None else max_pinned)
        self._partial = PartialIndex(num_blocks, block_size, partial_hash) if partial_hash else None
        # A stack: the block given back last is taken first. Block 0 is on top of the new pool.
        self._blank: IntArray = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._num_blank = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._num_blank

    @property
    def num_evictable(self) -> int:
        """Blocks that hold a cached prefix and no request, and can be given up."""
        return len(self._evictable)

    @property
    def num_pinned(self) -> int:
        """Blocks that hold a cached prefix and no request, and are kept for a pin."""
        return len(self._pinned)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return self._num_blank + len(self._evictable)

    @property
    def max_pinned(self) -> int:
        """Most blocks kept for pins at a time; lowering it gives up what is too much."""
        return self._pinned.most

    @max_pinned.setter
    def max_pinned(self, most: int) -> None:
        self._pinned.most = most
        self.yield_pins(self.num_pinned - most)

    @property
    def index(self) -> PrefixIndex:
        """For its counters."""
        return self._index

    # Look-ups

    def match(self, chain: Chain, most: int) -> IntArray:
        """The blocks of the longest cached prefix of a chain, at most `most`; changes nothing."""
        end = min(most, len(chain))
        found: list[IntArray] = []
        at = 0
        while at < end:
            size = _LOOKED_UP_AT_ONCE[min(len(found), len(_LOOKED_UP_AT_ONCE) - 1)]
            blocks = self._index.lookup(chain.between(at, min(at + size, end)))
            missing = (blocks < 0).nonzero()[0]
            if missing.size:
                found.append(blocks[: missing[0]])
                break
            found.append(blocks)
            at += blocks.size
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def has(self, digest: bytes) -> bool:
        """True where a block of that hash is cached."""
        return self._index.find(digest) >= 0

    def partial_match(self, parent: bytes, tokens: TokenArray) -> tuple[int, int] | None:
        """A cached block that begins as wanted, where no whole block is; changes nothing.

        Args:
            parent: digest of the last whole block of the prefix, or the chain's root.
            tokens: uint32 [n], those wanted after it; more than a block has are ignored.

        Returns:
            The block, and how many of its leading tokens are those wanted: less than a block.
        """
        return None if self._partial is None else self._partial.match(parent, tokens)

    def cached_hashes(self) -> bytes:
        """The digests of all findable blocks back to back, in the order of the blocks."""
        return self._index.digests(self._index.blocks())

    def unreferenced(self, blocks: IntArray) -> int:
        """How many of these blocks `hold` would take out of `available`."""
        idle = self._references[blocks] == 0
        if len(self._pinned):
            idle &= ~self._pinned.kept(blocks)
        return int(np.count_nonzero(idle))

    def shared(self, blocks: IntArray) -> int:
        """How many of these held blocks others hold as well."""
        return int(np.count_nonzero(self._references[blocks] > 1))

    # References

    def hold(self, blocks: IntArray) -> None:
        """Adds a reference to matched blocks (all different)."""
        references = self._references[blocks]
        idle = blocks[references == 0]
        if len(self._pinned):
            kept = self._pinned.kept(idle)
            self._pinned.remove(idle[kept])
            idle = idle[~kept]
        self._evictable.discard(idle)
        self._references[blocks] = references + 1
        self._reuse[blocks] = np.minimum(self._reuse[blocks] + 1, OFTEN)
        self.hits += blocks.size

    def allocate(self, count: int) -> IntArray:
        """Takes `count` blocks, each with one reference: blank ones first, then cached ones in the
        order of eviction, which are forgotten. `count` must not exceed `available`.
        """
        assert count <= self.available, "more blocks than there are"
        from_blank = min(count, self._num_blank)
        self._num_blank -= from_blank
        blocks = self._blank[self._num_blank : self._num_blank + from_blank][::-1]
        if not from_blank and count:
            blocks = self._evict(count)
        elif count > from_blank:
            blocks = np.concatenate([blocks, self._evict(count - from_blank)])
        else:
            blocks = blocks.copy()
        self._references[blocks] = 1
        return blocks

    def release(self, blocks: IntArray) -> None:
        """Drops one reference of each block of one request, given in the order of its tokens.

        The tail becomes evictable before the head, so that a prefix outlives its suffix.
        """
        references = self._references[blocks]
        references -= 1
        self._references[blocks] = references
        idle = blocks[::-1]
        if np.count_nonzero(references):
            idle = blocks[references == 0][::-1]
        findable = self._index.holds(idle)
        if np.count_nonzero(findable) < idle.size:
            blank = idle[~findable]
            self._blank[self._num_blank : self._num_blank + blank.size] = blank
            self._num_blank += blank.size
            idle = idle[findable]
        self._used_at[idle] = self.now
        if self._pinned.any:
            idle = idle[~self._pinned.keep(idle)]
        self._evictable.push(idle)

    def flush(self) -> int:
        """Gives up every block that holds a cached prefix, no request and no pin; how many."""
        count = len(self._evictable)
        blocks = self._evict(count)
        self._blank[self._num_blank : self._num_blank + count] = blocks
        self._num_blank += count
        return count

    # Becoming findable

    def register(
        self,
        blocks: Sequence[int],
        chain: Chain,
        first: int,
        *,
        root: bytes = b"",
        tokens: TokenArray | None = None,
    ) -> None:
        """`register_all` for blocks that follow each other, the first at digest `first` of a chain.

        Args:
            blocks: as there.
            chain: knows all their digests.
            first: place of the first block.
            root: what the chain begins with; for `partial_match`, and where `first` is 0.
            tokens: as there.
        """
        end = first + len(blocks)
        parents = b""
        if tokens is not None:
            parents = chain.between(first - 1, end - 1) if first else root + chain.leading(end - 1)
        digests = chain.between(first, end)
        self.register_all(np.array(blocks, np.int64), digests, parents=parents, tokens=tokens)

    def register_all(
        self,
        blocks: IntArray,
        digests: bytes,
        *,
        parents: bytes = b"",
        tokens: TokenArray | None = None,
    ) -> None:
        """Makes held, full blocks findable. Of two blocks with one content the first is kept.

        Args:
            blocks: int64 [n], all different, none of them findable.
            digests: one for each, back to back.
            parents: the digests before these, back to back. Read where `partial_match` is on.
            tokens: uint32 [n, block_size]; the same.
        """
        places = self._index.insert(blocks, digests)
        new = blocks if places.size == blocks.size else blocks[places]
        self._reuse[new] = 0
        self._cached_at[new] = self.now
        if self._pinned.any:
            self._mark_pinned(new)
        if self._partial is not None:
            assert tokens is not None, "beginnings of blocks need their tokens"
            for place in places.tolist():
                parent = parents[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
                self._partial.add(blocks.item(place), parent, tokens[place])

    # Pins

    def pin(self, digests: bytes) -> int:
        """Keeps the blocks of these digests from being evicted, also those cached later.

        A digest may be pinned several times, and then needs as many `unpin`.

        Args:
            digests: back to back.

        Returns:
            How many of them are cached now.
        """
        found = self._index.lookup(digests)
        for place in range(found.size):
            self._pinned.add(digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
        # Heads of chains come last: they are kept first where not all can be, and yield last.
        cached = np.array(list(dict.fromkeys(found[found >= 0][::-1].tolist())), np.int64)
        self._pinned.mark(cached, True)
        self._reuse[cached] = OFTEN
        idle = cached[(self._references[cached] == 0) & ~self._pinned.kept(cached)]
        taken = idle[self._pinned.keep(idle)]
        self._evictable.discard(taken)
        return int(np.count_nonzero(found >= 0))

    def unpin(self, digests: bytes) -> None:
        """Takes one pin of each of these digests back; kept blocks without pins are evictable.

        Raises:
            KeyError: one of them is not pinned.
        """
        free = b"".join(
            digest
            for at in range(0, len(digests), DIGEST_BYTES)
            if self._pinned.drop(digest := digests[at : at + DIGEST_BYTES])
        )
        blocks = self._index.lookup(free)
        blocks = blocks[blocks >= 0]
        self._pinned.mark(blocks, False)
        kept = blocks[self._pinned.kept(blocks)][::-1]
        self._pinned.remove(kept)
        self._evictable.push(kept)

    def yield_pins(self, count: int) -> int:
        """Makes up to `count` kept blocks evictable, those kept longest first.

        They are kept again after they have been used once more.

        Returns:
            How many there were.
        """
        blocks = self._pinned.give_up(max(0, count))
        self._evictable.push(blocks)
        return int(blocks.size)

    def check_invariants(self, held: IntArray) -> None:
        """Asserts that references equal the block tables' and that each block has one state.

        Args:
            held: all entries of all block tables, concatenated.
        """
        expected = np.bincount(held, minlength=self.num_blocks)
        assert np.array_equal(self._references, expected), "references differ from block tables"
        blank = self._blank[: self._num_blank]
        evictable, kept = self._evictable.contents(), self._pinned.contents()
        assert evictable.size == len(self._evictable), "evictable count is off"
        assert kept.size == len(self._pinned), "kept count is off"
        assert kept.size <= self.max_pinned, "more blocks kept than allowed"
        idle = np.concatenate([blank, evictable, kept])
        states = np.bincount(idle, minlength=self.num_blocks)
        assert np.array_equal(states, (expected == 0).astype(np.int64)), "a block has not one state"
        assert not self._index.holds(blank).any(), "a blank block is findable"
        assert self._index.holds(evictable).all(), "an evictable block is not findable"
        assert self._index.holds(kept).all(), "a kept block is not findable"
        is_kept = self._pinned.kept(np.arange(self.num_blocks))
        assert np.flatnonzero(is_kept).tolist() == sorted(kept.tolist()), "kept marks are off"
        assert self._pinned.marked(kept).all(), "a kept block is not pinned"
        self._index.check_invariants()
        findable = self._index.blocks()
        digests = self._index.digests(findable)
        pinned = [
            block
            for place, block in enumerate(findable.tolist())
            if digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] in self._pinned
        ]
        marked = self._pinned.marked(np.arange(self.num_blocks))
        assert np.flatnonzero(marked).tolist() == pinned, "pinned marks are off"
        if self._partial is not None:
            self._partial.check_invariants(findable)

    def _evict(self, count: int) -> IntArray:
        blocks = self._evictable.pop(count)
        if self.log is not None and count:
            self.log.notes.append(Removed(digests=self._index.digests(blocks)))
        self._index.delete(blocks)
        self.evicted_blocks += count
        self.evicted_lifetime_us += count * self.now - int(np.add.reduce(self._cached_at[blocks]))
        self.evicted_idle_us += count * self.now - int(np.add.reduce(self._used_at[blocks]))
        self._pinned.mark(blocks, False)
        if self._partial is not None:
            self._partial.forget(blocks)
        return blocks

    def _mark_pinned(self, blocks: IntArray) -> None:
        digests = self._index.digests(blocks)
        pinned = [
            digests[at : at + DIGEST_BYTES] in self._pinned
            for at in range(0, len(digests), DIGEST_BYTES)
        ]
        marked = blocks[np.array(pinned, np.bool_)]
        self._pinned.mark(marked, True)
        self._reuse[marked] = OFTEN
