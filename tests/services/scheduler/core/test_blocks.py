"""The block pool: states, references, eviction order, against a plain model."""

import random

import numpy as np
import pytest

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.chain import Chain
from services.scheduler.core.eviction import LruQueue


def chain(*names: bytes) -> Chain:
    return Chain(b"".join(name.ljust(32, b"\0") for name in names))


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


def test_a_new_pool_gives_low_blocks_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert (pool.num_free, pool.num_evictable, pool.available) == (1, 0, 1)


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, other = pool.allocate(1), pool.allocate(1)
    pool.register([int(cached[0])], chain(b"h"), 0)
    pool.release(cached)
    pool.release(other)
    assert (pool.num_free, pool.num_evictable) == (3, 1)
    assert cached[0] not in pool.allocate(3)
    assert pool.match(chain(b"h"), 1).tolist() == cached.tolist()
    assert pool.allocate(1).tolist() == cached.tolist()
    assert not pool.match(chain(b"h"), 1).size, "an evicted block is forgotten"


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
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
    pool.release(block)
    assert pool.num_evictable == 0
    pool.release(block)
    assert pool.num_evictable == 1
    assert pool.unreferenced(block) == 1
    pool.hold(block)
    assert (pool.num_evictable, pool.unreferenced(block)) == (0, 0)


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.register([int(blocks[0])], chain(b"a"), 0)
    pool.register([int(blocks[1])], chain(b"a"), 0)
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


@pytest.mark.parametrize("seed", range(5))
def test_lru_queue_is_a_queue_with_holes(seed: int) -> None:
    rng = random.Random(seed)
    queue, model = LruQueue(40), []
    outside = list(range(40))
    for _ in range(3000):
        act = rng.random()
        if act < 0.4 and outside:
            rng.shuffle(outside)
            count = rng.randint(0, len(outside))
            pushed, outside = outside[:count], outside[count:]
            queue.push(np.array(pushed, np.int64))
            model += pushed
        elif act < 0.7 and model:
            count = rng.randint(0, len(model))
            popped = queue.pop(count).tolist()
            assert popped == model[:count]
            model = model[count:]
            outside += popped
        elif model:
            gone = rng.sample(model, rng.randint(1, len(model)))
            queue.discard(np.array(gone, np.int64))
            model = [block for block in model if block not in gone]
            outside += gone
        assert len(queue) == len(model)
        assert queue.contents().tolist() == model
