"""Orders of eviction against plain lists."""

import random

import numpy as np
import pytest

from services.scheduler.core.eviction import OFTEN, EvictionQueue, LruQueue, TimeWheel

BLOCKS = 40


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


class ListModel:
    def __init__(self) -> None:
        self.blocks: list[int] = []

    def push(self, blocks: list[int]) -> None:
        self.blocks += blocks

    def pop(self, count: int) -> list[int]:
        popped, self.blocks = self.blocks[:count], self.blocks[count:]
        return popped

    def discard(self, blocks: list[int]) -> None:
        self.blocks = [block for block in self.blocks if block not in blocks]

    def contents(self) -> list[int]:
        return self.blocks


class WheelModel:
    def __init__(self, num_slots: int, reuse: np.ndarray) -> None:
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        self.reuse = reuse
        self.cursor = 0

    def horizon(self, hits: int) -> int:
        slots = len(self.slots)
        wanted = {0: 1, 1: max(2, slots // 16), OFTEN: max(4, slots // 4)}
        return min(slots - 1, wanted.get(hits, max(3, slots // 8)))

    def push(self, blocks: list[int]) -> None:
        for block in blocks:
            slot = self.cursor + self.horizon(int(self.reuse[block]))
            self.slots[slot % len(self.slots)].append(block)

    def pop(self, count: int) -> list[int]:
        popped: list[int] = []
        while len(popped) < count:
            if self.slots[self.cursor]:
                popped.append(self.slots[self.cursor].pop(0))
            else:
                self.cursor = (self.cursor + 1) % len(self.slots)
        return popped

    def discard(self, blocks: list[int]) -> None:
        self.slots = [[one for one in slot if one not in blocks] for slot in self.slots]

    def contents(self) -> list[int]:
        rotated = self.slots[self.cursor :] + self.slots[: self.cursor]
        return [block for slot in rotated for block in slot]


def compare(
    queue: EvictionQueue,
    model: ListModel | WheelModel,
    rng: random.Random,
    reuse: np.ndarray,
    steps: int = 1000,
) -> None:
    outside = list(range(BLOCKS))
    for _ in range(steps):
        act = rng.random()
        queued = model.contents()
        if act < 0.4 and outside:
            rng.shuffle(outside)
            count = rng.randint(0, len(outside))
            pushed, outside = outside[:count], outside[count:]
            for block in pushed:
                reuse[block] = rng.choice([0, 0, 1, 2, 5, OFTEN])
            queue.push(ids(*pushed))
            model.push(pushed)
        elif act < 0.7:
            count = rng.randint(0, len(queued))
            popped = queue.pop(count).tolist()
            assert popped == model.pop(count)
            outside += popped
        else:
            gone = rng.sample(queued, rng.randint(0, len(queued)))
            queue.discard(ids(*gone))
            model.discard(gone)
            outside += gone
        assert len(queue) == len(model.contents())
        assert queue.contents().tolist() == model.contents()


@pytest.mark.parametrize("seed", range(5))
def test_lru_is_a_queue_with_holes(seed: int) -> None:
    reuse = np.zeros(BLOCKS, np.uint8)
    compare(LruQueue(BLOCKS), ListModel(), random.Random(seed), reuse)


@pytest.mark.parametrize("num_slots", [1, 2, 4, 5, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_wheel_is_a_ring_of_queues(num_slots: int, seed: int) -> None:
    reuse = np.zeros(BLOCKS, np.uint8)
    model = WheelModel(num_slots, reuse)
    compare(TimeWheel(BLOCKS, num_slots, reuse), model, random.Random(seed), reuse)


def test_a_long_lru_queue_with_holes_and_wraps() -> None:
    rng = random.Random(7)
    queue, model = LruQueue(3000), ListModel()
    outside = list(range(3000))
    for _ in range(400):
        count = rng.randint(0, len(outside))
        pushed, outside = outside[:count], outside[count:]
        queue.push(ids(*pushed))
        model.push(pushed)
        gone = rng.sample(model.blocks, min(len(model.blocks), rng.randint(0, 200)))
        queue.discard(ids(*gone))
        popped = queue.pop(rng.randint(0, (len(queue) + 1) // 2)).tolist()
        outside += [*gone, *popped]
        taken = set(gone)
        model.blocks = [block for block in model.blocks if block not in taken]
        assert popped == model.pop(len(popped))
    assert queue.contents().tolist() == model.blocks


def test_what_was_hit_outlives_generations_of_what_was_not() -> None:
    reuse = np.zeros(100, np.uint8)
    wheel = TimeWheel(100, 64, reuse)
    reuse[:4] = [0, 1, 2, OFTEN]
    wheel.push(np.arange(4))
    wheel.push(np.arange(4, 24))
    gone: dict[int, int] = {}
    for turn in range(20 * 20):
        block = int(wheel.pop(1)[0])
        if block < 4:
            gone[block] = turn
        else:
            wheel.push(ids(block))  # cached anew, and never hit
    assert list(gone) == [0, 1, 2, 3]
    # Horizons 1, 4, 8, 16 of a wheel of 64; a generation has 20 blocks.
    generations = [turn / 20 for turn in gone.values()]
    for got, horizon in zip(generations, (1, 4, 8, 16), strict=True):
        assert horizon - 1 <= got <= horizon
