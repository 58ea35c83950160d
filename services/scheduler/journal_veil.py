"""Token ids that tell nothing, for recordings without them; every decision stays the same.

The core asks of an id only whether it ends a request: whether it is one of the model's
end-of-sequence ids, or one of the request's own stop ids. End-of-sequence ids are facts of the
model and keep their value. Stop ids get other numbers, in order of their first appearance. All
others become one neutral id. Ids beyond the vocabulary are no tokens, and are kept: they are
refused, or show a worker that cannot be trusted.
"""

import hashlib
import secrets
from collections.abc import Iterable

import numpy as np

from services.scheduler.core.plan import TokenArray, WorkerSpec


class Veil:
    """One mapping of ids for one vocabulary; until `learn`, all ids are the neutral one."""

    def __init__(self) -> None:
        self._size = 0
        self._table = np.empty(0, np.uint32)
        # By id, and one place more for all ids beyond the vocabulary.
        self._special = np.zeros(1, np.bool_)
        self._free: list[int] = []
        self._key = secrets.token_bytes(32)
        self._kind: tuple[int, tuple[int, ...]] | None = None
        self.neutral = 0
        """What stands for all ids that end nothing."""

    def learn(self, spec: WorkerSpec) -> None:
        """Takes the vocabulary of a worker; that of another model begins a mapping of its own."""
        kind = (spec.vocab_size, tuple(sorted(spec.eos_token_ids)))
        if kind == self._kind:
            return
        self._kind = kind
        self._size = size = spec.vocab_size
        ends = sorted({token for token in spec.eos_token_ids if token < size})
        self._special = np.zeros(size + 1, np.bool_)
        self._special[[*ends, size]] = True
        others = (~self._special).nonzero()[0].tolist()
        self.neutral = others[0] if others else 0
        self._table = np.full(size, self.neutral, np.uint32)
        self._table[ends] = ends
        self._free = others[:0:-1]

    def stop_ids(self, ids: Iterable[int]) -> tuple[int, ...]:
        """What stands for the stop ids of a request, from now on for all."""
        veiled = []
        for token in ids:
            if token < self._size and not self._special[token]:
                self._special[token] = True
                # With every id of the vocabulary special there is no neutral one to tell apart.
                self._table[token] = self._free.pop() if self._free else self.neutral
            veiled.append(self._veiled(token))
        return tuple(veiled)

    def special(self, ids: TokenArray) -> tuple[list[int], list[int]]:
        """Places of the ids that are not neutral, and what stands for them."""
        places = self._special.take(ids, mode="clip").nonzero()[0].tolist()
        return places, [self._veiled(int(ids[place])) for place in places]

    def outside(self, ids: TokenArray) -> tuple[list[int], list[int]]:
        """Places of the ids beyond the vocabulary, and the ids."""
        if self._kind is None:
            return [], []
        places = (ids >= self._size).nonzero()[0]
        return places.tolist(), ids[places].tolist()

    def _veiled(self, token: int) -> int:
        if token < self._size:
            return int(self._table[token])
        return token if self._kind is not None else self.neutral

    def salt(self, salt: bytes) -> bytes:
        """Equal for equal salts of this recording, and says nothing of them."""
        return salt[:1] + hashlib.blake2b(salt, key=self._key, digest_size=16).digest()
