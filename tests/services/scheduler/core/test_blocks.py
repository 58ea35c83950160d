"""The block pool: states, references, pins, beginnings of blocks, against a plain model."""

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.chain import Chain
from services.scheduler.core.config import Eviction

POOLS = pytest.mark.parametrize("eviction", list(Eviction))


def digest(name: bytes) -> bytes:
    return name.ljust(32, b"\0")


def digests(*names: bytes) -> bytes:
    return b"".join(digest(name) for name in names)


def chain(*names: bytes) -> Chain:
    return Chain(digests(*names))


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


def cache(pool: BlockPool, *names: bytes) -> np.ndarray:
    """Blocks that were filled and released."""
    blocks = pool.allocate(len(names))
    pool.register_all(blocks, digests(*names))
    pool.release(blocks)
    return blocks


def test_a_new_pool_gives_low_blocks_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert (pool.num_free, pool.num_evictable, pool.available) == (1, 0, 1)


@POOLS
def test_blank_blocks_are_used_before_cached_ones(eviction: Eviction) -> None:
    pool = BlockPool(4, eviction=eviction)
    cached, other = pool.allocate(1), pool.allocate(1)
    pool.register([int(cached[0])], chain(b"h"), 0)
    pool.release(cached)
    pool.release(other)
    assert (pool.num_free, pool.num_evictable) == (3, 1)
    assert cached[0] not in pool.allocate(3)
    assert pool.match(chain(b"h"), 1).tolist() == cached.tolist()
    assert pool.allocate(1).tolist() == cached.tolist()
    assert not pool.match(chain(b"h"), 1).size, "an evicted block is forgotten"


@POOLS
def test_the_tail_of_a_chain_is_evicted_before_its_head(eviction: Eviction) -> None:
    pool = BlockPool(3, eviction=eviction)
    held = pool.allocate(3)
    pool.register(held.tolist(), chain(b"a", b"b", b"c"), 0)
    pool.release(held)
    pool.allocate(1)
    assert pool.match(chain(b"a", b"b", b"c"), 3).tolist() == held[:2].tolist()


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.register([int(block[0])], chain(b"a"), 0)
    pool.hold(block)
    assert pool.shared(block) == 1
    pool.release(block)
    assert (pool.num_evictable, pool.shared(block)) == (0, 0)
    pool.release(block)
    assert pool.num_evictable == 1
    assert pool.unreferenced(block) == 1
    pool.hold(block)
    assert (pool.num_evictable, pool.unreferenced(block)) == (0, 0)


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.register_all(blocks, digests(b"a", b"a"))
    assert pool.match(chain(b"a"), 1).tolist() == [blocks[0]]
    pool.release(blocks)
    assert (pool.num_free, pool.num_evictable) == (1, 1)
    pool.check_invariants(ids())


def test_match_stops_at_the_first_miss() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register([int(blocks[0])], chain(b"a"), 0)
    pool.register([int(blocks[1])], chain(b"c"), 0)
    assert pool.match(chain(b"a", b"b", b"c"), 3).tolist() == [blocks[0]]


@pytest.mark.parametrize("cached", [0, 1, 2, 31, 32, 33, 288, 289, 5000])
def test_a_match_looks_little_further_than_the_prefix(cached: int) -> None:
    names = [hashlib.sha256(b"%d" % number).digest() for number in range(6000)]
    pool = BlockPool(6000)
    blocks = cache(pool, *names[:cached])
    before = pool.index.lookups
    assert pool.match(chain(*names), 5500).tolist() == blocks.tolist()
    assert pool.index.lookups - before <= max(1, 32 * cached, cached + 2048)
    assert pool.match(chain(*names), 20).tolist() == blocks[:20].tolist()


def test_more_than_is_there_is_not_given() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="more blocks than there are"):
        pool.allocate(3)


def test_what_was_hit_stays_longer_on_the_wheel() -> None:
    pool = BlockPool(4, eviction=Eviction.TIME_WHEEL)
    hot = cache(pool, b"hot")
    pool.hold(hot)
    pool.release(hot)
    for turn in range(8):
        cache(pool, b"cold %d" % turn)
    assert pool.has(digest(b"hot"))
    assert pool.hits == 1


def test_evictions_are_counted_with_their_times() -> None:
    pool = BlockPool(2)
    pool.now = 100
    blocks = pool.allocate(2)
    pool.now = 1000
    pool.register_all(blocks, digests(b"a", b"b"))
    pool.now = 3000
    pool.release(blocks)
    pool.now = 4000
    pool.hold(blocks[:1])
    pool.now = 5000
    pool.release(blocks[:1])
    pool.now = 10_000
    pool.allocate(2)
    assert pool.evicted_blocks == 2
    assert pool.evicted_lifetime_us == 2 * 9000
    assert pool.evicted_idle_us == 7000 + 5000
    assert pool.hits == 1


def test_cached_hashes_are_in_the_order_of_the_blocks() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register_all(blocks[::-1], digests(b"c", b"b", b"a"))
    assert pool.cached_hashes() == digests(b"a", b"b", b"c")
    pool.release(blocks)
    pool.allocate(2)  # the blank one, and the tail
    assert pool.cached_hashes() == digests(b"a", b"b")


# Pins


@POOLS
def test_a_pinned_block_is_kept(eviction: Eviction) -> None:
    pool = BlockPool(4, eviction=eviction)
    cache(pool, b"a", b"b")
    assert pool.pin(digests(b"a", b"later")) == 1
    assert (pool.num_pinned, pool.num_evictable, pool.available) == (1, 1, 3)
    cache(pool, b"later")
    assert (pool.num_pinned, pool.num_evictable, pool.available) == (2, 1, 2)
    pool.release(pool.allocate(2))
    assert pool.cached_hashes() == digests(b"a", b"later")
    pool.check_invariants(ids())
    pool.unpin(digests(b"a"))
    assert (pool.num_pinned, pool.num_evictable, pool.available) == (1, 1, 3)
    pool.allocate(3)
    assert pool.cached_hashes() == digests(b"later")


def test_two_pins_of_a_digest_need_two_unpins() -> None:
    pool = BlockPool(2)
    cache(pool, b"a")
    pool.pin(digests(b"a"))
    pool.pin(digests(b"a", b"a"))
    pool.unpin(digests(b"a", b"a"))
    assert pool.num_pinned == 1
    pool.unpin(digests(b"a"))
    assert (pool.num_pinned, pool.num_evictable) == (0, 1)
    with pytest.raises(KeyError):
        pool.unpin(digests(b"a"))


def test_a_kept_block_can_be_held() -> None:
    pool = BlockPool(2)
    block = cache(pool, b"a")
    pool.pin(digests(b"a"))
    assert pool.unreferenced(block) == 0, "it is not available before either"
    pool.hold(block)
    assert (pool.num_pinned, pool.available) == (0, 1)
    pool.check_invariants(block)
    pool.release(block)
    assert (pool.num_pinned, pool.available) == (1, 1)


def test_the_cap_keeps_heads_of_chains() -> None:
    pool = BlockPool(5, max_pinned=2)
    blocks = cache(pool, b"a", b"b", b"c")
    pool.pin(digests(b"a", b"b", b"c"))
    assert (pool.num_pinned, pool.num_evictable) == (2, 1)
    pool.allocate(3)
    assert pool.match(chain(b"a", b"b", b"c"), 3).tolist() == blocks[:2].tolist()
    pool.max_pinned = 1
    assert (pool.num_pinned, pool.num_evictable) == (1, 1)
    pool.allocate(1)
    assert pool.match(chain(b"a", b"b", b"c"), 3).tolist() == blocks[:1].tolist()


def test_pins_yield_tails_first() -> None:
    pool = BlockPool(3)
    blocks = cache(pool, b"a", b"b", b"c")
    pool.pin(digests(b"a", b"b", b"c"))
    assert pool.available == 0
    assert pool.yield_pins(1) == 1
    assert pool.allocate(1).tolist() == [blocks[2]]
    assert pool.yield_pins(9) == 2
    assert pool.yield_pins(9) == 0
    pool.hold(blocks[:1])
    pool.release(blocks[:1])
    assert pool.num_pinned == 1, "kept again once it has been used"


# Beginnings of blocks


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


def partial_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks, block_size=4, partial_hash=block_hash)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def fill(pool: BlockPool, root: bytes, values: list[int]) -> np.ndarray:
    """Blocks of a chain over whole blocks of tokens, filled and released."""
    known, parent = Chain(), root
    rows = np.array(values, np.uint32).reshape(-1, 4)
    for row in rows:
        parent = block_hash(parent, row.tobytes())
        known.append(parent)
    blocks = pool.allocate(len(known))
    pool.register(blocks.tolist(), known, 0, root=root, tokens=rows)
    pool.release(blocks)
    return blocks


def test_the_longest_equal_beginning_is_found() -> None:
    pool, root = partial_pool(), b"r" * 32
    first = fill(pool, root, [1, 2, 3, 4])[0]
    second = fill(pool, root, [1, 2, 9, 9, 5, 6, 7, 8])
    assert pool.partial_match(root, tokens(1, 2, 3, 5)) == (first, 3)
    assert pool.partial_match(root, tokens(1, 2, 9)) == (second[0], 3)
    assert pool.partial_match(root, tokens(1, 2)) == (second[0], 2), "of equals the latest"
    assert pool.partial_match(root, tokens(1, 2, 3, 4, 5)) == (first, 3), "less than a block"
    assert pool.partial_match(root, tokens(2, 2, 3)) is None
    assert pool.partial_match(root, tokens()) is None
    assert pool.partial_match(b"s" * 32, tokens(1, 2, 3)) is None, "another salt"
    parent = block_hash(root, tokens(1, 2, 9, 9).tobytes())
    assert pool.partial_match(parent, tokens(5, 6, 1)) == (second[1], 2)
    pool.check_invariants(ids())


def test_beginnings_of_evicted_blocks_are_forgotten() -> None:
    pool, root = partial_pool(2), b"r" * 32
    fill(pool, root, [1, 2, 3, 4])
    kept = fill(pool, root, [1, 2, 9, 9])[0]
    pool.allocate(1)
    assert pool.partial_match(root, tokens(1, 2, 3)) == (kept, 2)
    pool.check_invariants(ids(0))


def test_without_the_option_nothing_is_found() -> None:
    pool, root = BlockPool(4, block_size=4), b"r" * 32
    fill(pool, root, [1, 2, 3, 4])
    assert pool.partial_match(root, tokens(1, 2, 3)) is None


# Everything at once, against a plain model

NAMES = [b"%d" % number for number in range(12)]


class PoolMachine(RuleBasedStateMachine):
    """LRU, whose order of eviction is a list; beyond that no policy is told from another."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, max_pinned=3)
        self.requests: list[list[int]] = []
        self.name_of: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.kept: list[int] = []
        self.pins: dict[bytes, int] = {}

    def references(self, block: int) -> int:
        return sum(request.count(block) for request in self.requests)

    def keep(self, blocks: list[int]) -> None:
        """Idle findable blocks, heads last."""
        pinned = [block for block in blocks if self.pins.get(self.name_of[block])]
        room = 3 - len(self.kept)
        taken = pinned[len(pinned) - min(room, len(pinned)) :]
        self.kept += taken
        self.idle += [block for block in blocks if block not in taken]

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        count = min(count, self.pool.available)
        blank = self.pool.num_free
        evicted = self.idle[: max(0, count - blank)]
        del self.idle[: len(evicted)]
        for block in evicted:
            del self.name_of[block]
        blocks = self.pool.allocate(count).tolist()
        assert blocks[min(count, blank) :] == evicted
        assert all(self.references(block) == 0 for block in blocks)
        self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        blocks = [block for block in request if block not in self.name_of]
        names = data.draw(
            st.lists(st.sampled_from(NAMES), min_size=len(blocks), max_size=len(blocks))
        )
        for block, name in zip(blocks, names, strict=True):
            if name not in self.name_of.values():
                self.name_of[block] = name
        self.pool.register_all(ids(*blocks), digests(*names))

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    def match_and_hold(self, names: list[bytes]) -> None:
        block_of = {name: block for block, name in self.name_of.items()}
        wanted = []
        for name in names:
            if name not in block_of:
                break
            wanted.append(block_of[name])
        got = self.pool.match(chain(*names), 5)
        assert got.tolist() == wanted
        taken = [block for block in wanted if block in self.idle]
        assert self.pool.unreferenced(got) == len(taken)
        self.pool.hold(got)
        self.idle = [block for block in self.idle if block not in wanted]
        self.kept = [block for block in self.kept if block not in wanted]
        self.requests.append(wanted)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.release(ids(*request))
        freed = [block for block in request[::-1] if not self.references(block)]
        self.keep([block for block in freed if block in self.name_of])

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def pin(self, names: list[bytes]) -> None:
        for name in names:
            self.pins[name] = self.pins.get(name, 0) + 1
        block_of = {name: block for block, name in self.name_of.items()}
        cached = [block_of[name] for name in names if name in block_of]
        idle = [block for block in dict.fromkeys(cached[::-1]) if block in self.idle]
        assert self.pool.pin(digests(*names)) == len(cached)
        before = self.idle
        self.idle = []
        self.keep(idle)
        self.idle = [block for block in before if block not in self.kept]

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        names = [name for name, count in self.pins.items() if count]
        if not names:
            return
        name = data.draw(st.sampled_from(sorted(names)))
        self.pins[name] -= 1
        self.pool.unpin(digests(name))
        if not self.pins[name]:
            freed = [block for block in self.kept if self.name_of[block] == name]
            self.kept = [block for block in self.kept if block not in freed]
            self.idle += freed

    @rule(count=st.integers(0, 4))
    def yield_pins(self, count: int) -> None:
        given, self.kept = self.kept[:count], self.kept[count:]
        self.idle += given
        assert self.pool.yield_pins(count) == len(given)

    @rule()
    def flush(self) -> None:
        for block in self.idle:
            del self.name_of[block]
        assert self.pool.flush() == len(self.idle)
        self.idle = []

    @invariant()
    def agrees(self) -> None:
        held = [block for request in self.requests for block in request]
        self.pool.check_invariants(ids(*held))
        assert self.pool.num_evictable == len(self.idle)
        assert self.pool.num_pinned == len(self.kept)
        names = [digest(name) for _, name in sorted(self.name_of.items())]
        assert self.pool.cached_hashes() == b"".join(names)
        assert self.pool.available == 10 - len(set(held)) - len(self.kept)


TestPoolMachine = pytest.mark.timeout(120)(PoolMachine.TestCase)
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
