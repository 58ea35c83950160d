"""The block part of `quire bench scheduler`: the operations of one worker's block pool.

The pool is full of cached chains and aged: everything in it has been replaced several times by
chains of other lengths. Timed are single calls; a figure is the median over calls, per block:

- look-up: the digests of a cached chain are looked up; or of one that is not cached ("miss");
- allocate + free: blocks are taken from the pool, which evicts and forgets as many cached ones, and
  later released to the cache again; its two times added up;
- register: in between they are made findable under new digests, as filled blocks are.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.config import Eviction

DIGEST_BYTES = 32
BATCH = 256
SMALLEST = 4 * BATCH - 24
"""Cached blocks that can be measured: 1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One line.

    Args:
        blocks: cached blocks in the pool, which has no others.
        eviction: the policy.
        op: "lookup", "lookup miss", "allocate + free" or "register".
        batch: blocks per call.
        ns_per_block: median over the calls.
        probes: buckets read per look-up; None where nothing is looked up alone.
    """

    blocks: int
    eviction: str
    op: str
    batch: int
    ns_per_block: float
    probes: float | None = None


class _AgedPool:
    """A pool full of cached chains, and the digests of some of these."""

    def __init__(self, blocks: int, eviction: Eviction, turnovers: int) -> None:
        self.pool = BlockPool(blocks, eviction=eviction)
        self._rng = np.random.default_rng(blocks)
        lengths = self._rng.integers(1, min(2 * BATCH, blocks // 2), 4 * turnovers * blocks)
        done = 0
        for length in lengths.tolist():
            if done >= turnovers * blocks:
                break
            self.turn_over(self.random_digests(length))
            done += length
        # The pool is whole chains of BATCH now, but for a rest that fits nothing.
        self.chains: deque[bytes] = deque(maxlen=max(1, blocks // BATCH - 1))
        for _ in range(blocks // BATCH):
            self.chains.append(self.random_digests(BATCH))
            self.turn_over(self.chains[-1])

    def random_digests(self, count: int) -> bytes:
        return self._rng.bytes(DIGEST_BYTES * count)

    def turn_over(self, digests: bytes) -> tuple[int, int]:
        """One cycle of allocate, register and free: ns of allocate + free, and of register."""
        pool = self.pool
        pool.now += 1
        started = time.perf_counter_ns()
        blocks = pool.allocate(len(digests) // DIGEST_BYTES)
        allocated = time.perf_counter_ns()
        pool.register_all(blocks, digests)
        registered = time.perf_counter_ns()
        pool.release(blocks)
        released = time.perf_counter_ns()
        return allocated - started + released - registered, registered - allocated

    def some_chains(self, count: int) -> list[bytes]:
        chosen = self._rng.integers(0, len(self.chains), count)
        return [self.chains[place] for place in chosen.tolist()]


def block_costs(sizes: Iterable[int], *, calls: int = 1000, turnovers: int = 2) -> list[BlockCost]:
    """Times `calls` calls of each operation, batched and single, for each policy and size.

    Args:
        sizes: cached blocks; each at least SMALLEST.
        calls: timed per line.
        turnovers: how often a pool is replaced before.
    """
    costs: list[BlockCost] = []
    for blocks in sizes:
        for eviction in Eviction:
            aged = _AgedPool(blocks, eviction, turnovers)
            for batch in (BATCH, 1):
                costs += _lookups(aged, eviction, batch, calls)
            for batch in (BATCH, 1):
                costs += _cycles(aged, eviction, batch, calls)
    return costs


def _cycles(aged: _AgedPool, eviction: Eviction, batch: int, calls: int) -> list[BlockCost]:
    times = [aged.turn_over(aged.random_digests(batch)) for _ in range(calls)]
    return [
        BlockCost(
            blocks=aged.pool.num_blocks,
            eviction=eviction.value,
            op=op,
            batch=batch,
            ns_per_block=float(np.median(column)) / batch,
        )
        for op, column in zip(("allocate + free", "register"), np.array(times).T, strict=True)
    ]


def _lookups(aged: _AgedPool, eviction: Eviction, batch: int, calls: int) -> list[BlockCost]:
    index = aged.pool.index
    asked = {
        "lookup": [chain[: DIGEST_BYTES * batch] for chain in aged.some_chains(calls)],
        "lookup miss": [aged.random_digests(batch) for _ in range(calls)],
    }
    costs = []
    for op, digests in asked.items():
        hits = np.concatenate([index.lookup(one) for one in digests[:8]]) >= 0
        assert hits.all() if op == "lookup" else not hits.any(), "the pool holds something else"
        probes, lookups = index.probes, index.lookups
        nanos = _median(index.lookup, digests) / batch
        costs.append(
            BlockCost(
                blocks=aged.pool.num_blocks,
                eviction=eviction.value,
                op=op,
                batch=batch,
                ns_per_block=nanos,
                probes=(index.probes - probes) / (index.lookups - lookups),
            )
        )
    return costs


def _median(act: Callable[[bytes], object], arguments: list[bytes]) -> float:
    """Nanoseconds of one call."""
    times = np.empty(len(arguments), np.int64)
    for place, argument in enumerate(arguments):
        started = time.perf_counter_ns()
        act(argument)
        times[place] = time.perf_counter_ns() - started
    return float(np.median(times))


def block_table(costs: Iterable[BlockCost]) -> Table:
    """For the console."""
    table = Table(title="block pool, full of cached blocks")
    headings = ("cached blocks", "eviction", "operation", "blocks / call", "ns / block", "probes")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows(costs):
        table.add_row(*row)
    return table


def rows(costs: Iterable[BlockCost]) -> list[tuple[str, ...]]:
    """The lines of the table."""
    return [
        (
            f"{cost.blocks:,}",
            cost.eviction,
            cost.op,
            str(cost.batch),
            f"{cost.ns_per_block:,.0f}",
            "" if cost.probes is None else f"{cost.probes:.4f}",
        )
        for cost in costs
    ]
