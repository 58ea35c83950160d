"""The chain of block hashes of one request's tokens, and the functions that make it.

The formula is part of the wire contract (`token.proto`); which hash it is made with is chosen once,
outside the core.
"""

from collections.abc import Callable
from dataclasses import dataclass

DIGEST_BYTES = 32
"""Of every digest; shorter hashes are filled up with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashing:
    """A choice of hash functions; both are pure.

    Args:
        name: as `--prefix-caching-hash-algo` and ModelLimits.prefix_hash call it.
        root: (model digest, salt) -> parent of the first block's hash.
        block: (parent hash, little-endian uint32 tokens of one block) -> hash of the block.
    """

    name: str
    root: Callable[[bytes, bytes], bytes]
    block: Callable[[bytes, bytes], bytes]


class Chain:
    """Digests of the leading full blocks of a sequence of tokens, as far as they are known.

    Args:
        digests: back to back.
    """

    __slots__ = ("_digests", "last")

    def __init__(self, digests: bytes = b"") -> None:
        self._digests = bytearray(digests)
        self.last = digests[-DIGEST_BYTES:]
        """The digest of the last block that is known; empty where there is none."""

    def __len__(self) -> int:
        """Number of digests."""
        return len(self._digests) // DIGEST_BYTES

    def __getitem__(self, block: int) -> bytes:
        """The digest of one block."""
        return bytes(self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])

    def append(self, digest: bytes) -> None:
        """Adds the digest of the next block."""
        self._digests += digest
        self.last = digest

    def clear(self) -> None:
        """Forgets all."""
        self._digests.clear()
        self.last = b""

    def between(self, first: int, end: int) -> bytes:
        """The digests of blocks `first` to `end` - 1 back to back."""
        return bytes(self._digests[first * DIGEST_BYTES : end * DIGEST_BYTES])

    def leading(self, count: int) -> bytes:
        """The first `count` digests back to back, or all there are."""
        return bytes(self._digests[: count * DIGEST_BYTES])
