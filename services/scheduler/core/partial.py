"""Cached blocks of which only the beginning equals what is wanted.

Owns, for every findable block, digests of each proper beginning of it, and the blocks that follow
a given parent. The digest of a beginning is made like that of a block, over fewer tokens, and cut
to 8 bytes: so it is keyed by all that came before, salt included, and digests alone decide.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import IntArray, TokenArray

_DIGEST = 8
_MOST_COMPARED = 256
"""Blocks of one parent looked at, the latest; bounds the time of a look-up."""


class PartialIndex:
    """Beginnings of the findable blocks of one pool.

    Args:
        num_blocks: ids are below this.
        block_size: tokens of a block.
        block_hash: `Hashing.block`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, block_hash: Callable[[bytes, bytes], bytes]
    ) -> None:
        self._block_size = block_size
        self._hash = block_hash
        self._digests: npt.NDArray[np.uint64] = np.zeros((num_blocks, block_size - 1), "<u8")
        # Dicts without values: blocks in the order in which they became findable.
        self._children: dict[bytes, dict[int, None]] = {}
        self._parent: dict[int, bytes] = {}

    def add(self, block: int, parent: bytes, tokens: TokenArray) -> None:
        """Takes in a block that became findable.

        Args:
            block: its id.
            parent: digest before its own.
            tokens: uint32 [block_size].
        """
        self._digests[block] = self._beginnings(parent, tokens[:-1])
        self._children.setdefault(parent, {})[block] = None
        self._parent[block] = parent

    def forget(self, blocks: IntArray) -> None:
        """Drops blocks that cannot be found any more."""
        for block in blocks.tolist():
            parent = self._parent.pop(block)
            children = self._children[parent]
            del children[block]
            if not children:
                del self._children[parent]

    def match(self, parent: bytes, tokens: TokenArray) -> tuple[int, int] | None:
        """The block after `parent` that begins with the most of `tokens`, and how many of them.

        Of equals the latest is taken. None where not even the first token is the same.
        """
        children = self._children.get(parent)
        wanted = tokens[: self._block_size - 1]
        if not children or not wanted.size:
            return None
        blocks = list(islice(reversed(children), _MOST_COMPARED))
        equal = self._digests[blocks, : wanted.size] == self._beginnings(parent, wanted)
        lengths = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        best = int(lengths.argmax())
        length = int(lengths[best])
        return (blocks[best], length) if length else None

    def check_invariants(self, findable: IntArray) -> None:
        """Asserts that exactly the findable blocks are here."""
        assert sorted(self._parent) == findable.tolist(), "blocks with beginnings are off"
        children = {block: parent for parent, all_ in self._children.items() for block in all_}
        assert children == self._parent, "children and parents disagree"
        assert all(self._children.values()), "a parent without children"

    def _beginnings(self, parent: bytes, tokens: TokenArray) -> npt.NDArray[np.uint64]:
        """Digests of the first, the first two, ... of these tokens."""
        data = tokens.astype("<u4", copy=False).tobytes()
        joined = b"".join(
            self._hash(parent, data[: 4 * length])[:_DIGEST] for length in range(1, tokens.size + 1)
        )
        return np.frombuffer(joined, "<u8")
