"""The index of digests against a dict, with full buckets, forged beginnings and old age."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.prefix_index import PrefixIndex


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


def digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class Model:
    """An index and a dict that is told the same."""

    def __init__(self, num_blocks: int) -> None:
        self.index = PrefixIndex(num_blocks)
        self.block_of: dict[bytes, int] = {}
        self.free = list(range(num_blocks))

    def insert(self, digests: list[bytes]) -> None:
        digests = digests[: len(self.free)]
        blocks = [self.free.pop() for _ in digests]
        new = []
        for place, one in enumerate(digests):
            if one not in self.block_of:
                self.block_of[one] = blocks[place]
                new.append(place)
        got = self.index.insert(ids(*blocks), b"".join(digests))
        assert sorted(got.tolist()) == new
        self.free += [block for place, block in enumerate(blocks) if place not in new]

    def delete(self, digests: list[bytes]) -> None:
        gone = [one for one in dict.fromkeys(digests) if one in self.block_of]
        blocks = [self.block_of.pop(one) for one in gone]
        self.index.delete(ids(*blocks))
        self.free += blocks

    def check(self, asked: list[bytes]) -> None:
        wanted = [self.block_of.get(one, -1) for one in asked]
        assert self.index.lookup(b"".join(asked)).tolist() == wanted
        assert [self.index.find(one) for one in asked] == wanted
        assert len(self.index) == len(self.block_of)
        in_order = sorted(self.block_of.items(), key=lambda item: item[1])
        blocks = self.index.blocks()
        assert blocks.tolist() == [block for _, block in in_order]
        assert self.index.digests(blocks) == b"".join(one for one, _ in in_order)
        self.index.check_invariants()


# Few first bytes, so that buckets overflow, and few last ones, so that beginnings are equal.
CROWDED = st.tuples(
    st.sampled_from([0, 1, 2**32 - 1, 5 << 61, (1 << 64) - 1]), st.integers(0, 3), st.integers(0, 1)
).map(
    lambda parts: parts[0].to_bytes(8, "little") + bytes([parts[1]]) + bytes(22) + bytes([parts[2]])
)
DIGEST = st.one_of(CROWDED, st.integers(0, 40).map(digest))
DIGESTS = st.lists(DIGEST, max_size=24)


@settings(max_examples=150)
@given(
    num_blocks=st.integers(1, 40),
    acts=st.lists(st.tuples(st.sampled_from(["insert", "delete", "look up"]), DIGESTS)),
)
def test_it_is_a_dict(num_blocks: int, acts: list[tuple[str, list[bytes]]]) -> None:
    model = Model(num_blocks)
    for act, digests in acts:
        if act == "insert":
            model.insert(digests)
        elif act == "delete":
            model.delete(digests)
        model.check(digests)


def test_a_digest_of_zeros_is_a_digest() -> None:
    index = PrefixIndex(4)
    assert index.lookup(bytes(32 * 9)).tolist() == [-1] * 9
    assert index.find(bytes(32)) == -1
    assert index.insert(ids(0, 1, 2, 3), bytes(32 * 4)).tolist() == [0]
    assert index.lookup(bytes(32 * 9)).tolist() == [0] * 9


def test_all_bytes_decide() -> None:
    index = PrefixIndex(64)
    known = [bytes(24) + bytes([number]) + bytes(7) for number in range(20)]
    index.insert(np.arange(20), b"".join(known))
    index.check_invariants()
    assert index.lookup(b"".join(known)).tolist() == list(range(20))
    forged = [one[:31] + b"\1" for one in known]
    assert index.lookup(b"".join(forged)).tolist() == [-1] * 20


def test_forged_digests_of_one_home_are_not_all_taken() -> None:
    index = PrefixIndex(1000)
    forged = b"".join(number.to_bytes(8, "little") + bytes(24) for number in range(1000))
    assert index.insert(np.arange(1000), forged).size == 256, "64 buckets of 4"
    index.check_invariants()
    assert np.count_nonzero(index.lookup(forged) >= 0) == 256
    index.delete(index.blocks()[:100])
    assert index.insert(ids(900), forged[32 * 900 : 32 * 901]).tolist() == [0]
    index.check_invariants()


def test_many_more_than_are_sorted_at_once() -> None:
    count = 70_000
    digests = np.random.default_rng(1).bytes(32 * count)
    index = PrefixIndex(count)
    assert np.sort(index.insert(np.arange(count), digests)).tolist() == list(range(count))
    assert index.lookup(digests).tolist() == list(range(count))
    assert not index.insert(np.arange(0), b"").size


@pytest.mark.parametrize("num_blocks", [1000, 16_000])
def test_probes_grow_neither_with_size_nor_with_age(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    draw = np.random.default_rng(num_blocks)
    index = PrefixIndex(num_blocks)
    digests = [b""] * num_blocks
    batch = 500

    def fill(blocks: list[int]) -> None:
        for block in blocks:
            digests[block] = draw.bytes(32)
        index.insert(ids(*blocks), b"".join(digests[block] for block in blocks))

    def probes() -> float:
        before, looked_up = index.probes, index.lookups
        for start in range(0, num_blocks, batch):
            asked = b"".join(digests[start : start + batch])
            assert index.lookup(asked).tolist() == list(range(start, start + batch))
            assert (index.lookup(draw.bytes(len(asked))) == -1).all()
        return (index.probes - before) / (index.lookups - looked_up)

    for start in range(0, num_blocks, batch):
        fill(list(range(start, start + batch)))
    assert 1 <= probes() < 1.01
    # Everything is replaced several times over.
    for _ in range(3 * num_blocks // batch):
        chosen = rng.sample(range(num_blocks), batch)
        index.delete(ids(*chosen))
        fill(chosen)
    assert 1 <= probes() < 1.01
    index.check_invariants()
    index.delete(np.arange(num_blocks))
    assert len(index) == 0
    index.check_invariants()
