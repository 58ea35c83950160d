"""What the hashes of the prefix cache cost: a part of `quire bench scheduler`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from rich.table import Table

from services.scheduler.hashing import ALGORITHMS, KEY_BYTES, KEYED, hashing_for

_BLOCK_SIZE = 16
_BLOCKS = 512
_TRIALS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class HashCost:
    """Of one block of 16 tokens in a chain of 512, in the best of 400 trials."""

    hash: str
    ns_per_block: float


def hash_costs() -> list[HashCost]:
    """Times every hash that can be chosen, in turns."""
    choices = {
        name: hashing_for(name, bytes(KEY_BYTES) if name in KEYED else b"") for name in ALGORITHMS
    }
    tokens = np.random.default_rng(0).integers(0, 50_000, _BLOCKS * _BLOCK_SIZE, np.uint32)
    blocks = tokens.view(np.dtype((np.void, 4 * _BLOCK_SIZE)))
    best = dict.fromkeys(choices, float("inf"))
    for _ in range(_TRIALS):
        for name, hashing in choices.items():
            root = hashing.root(b"benchmark", b"t")
            started = time.perf_counter()
            list(accumulate(blocks.tolist(), hashing.block, initial=root))
            best[name] = min(best[name], time.perf_counter() - started)
    return [HashCost(hash=name, ns_per_block=best[name] / _BLOCKS * 1e9) for name in choices]


def hash_table(costs: Sequence[HashCost]) -> Table:
    """The figures for people."""
    table = Table(title=f"hash of the prefix cache, blocks of {_BLOCK_SIZE} tokens")
    for heading in ("hash", "ns / block"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(cost.hash, f"{cost.ns_per_block:.0f}")
    return table
