"""Hashes of KV blocks as `token.proto` defines them, and the sets of them that schedulers report.

A tokenizer with several schedulers asks with them who holds the beginning of a prompt. Schedulers
hash by themselves, and by code of their own: the contract is the formula.
"""

import functools
import hashlib
import struct
from collections.abc import Container, Iterator, Sequence

from rbloom import Bloom

from services.tokenizer.domain import Scheduling
from services.tokenizer.packing import pack_ids

COMPUTABLE = frozenset({"sha256"})
"""Values of ModelLimits.prefix_hash that can be computed here; a keyed hash needs its key."""

_COUNT = struct.Struct("<Q")
_MOST_FUNCTIONS = 64
_ID_BYTES = 4

_hash_of = functools.partial(int.from_bytes, byteorder="little", signed=True)


class PrefixSet:
    """Block hashes that a scheduler has cached; may hold some more, never less.

    Args:
        bloom: as PrefixDigest carries it.

    Raises:
        ValueError: it is no such filter.
    """

    def __init__(self, bloom: bytes) -> None:
        # The library takes what it is given: too few bytes make it panic, too many hash functions
        # keep it busy for ever.
        if len(bloom) <= _COUNT.size or not 0 < _COUNT.unpack_from(bloom)[0] <= _MOST_FUNCTIONS:
            raise ValueError("the digest of cached prefixes is no Bloom filter")
        self._bloom = Bloom.load_bytes(bloom, _hash_of)

    def __contains__(self, block_hash: object) -> bool:
        """Whether a hash of 32 bytes was put in, or looks as if it were."""
        # Only its first 16 bytes count, and the hash function takes no others.
        return isinstance(block_hash, bytes) and block_hash[:16] in self._bloom


def salt_of(scheduling: Scheduling) -> tuple[bytes, bytes]:
    """Kind and value of the salt of a request."""
    if scheduling.cache_salt is None:
        return b"t", scheduling.tenant.encode()
    return b"s", scheduling.cache_salt.encode()


def block_hashes(
    prompt: Sequence[int],
    *,
    block_size: int,
    model_digest: str,
    salt: tuple[bytes, bytes],
    most: int | None = None,
) -> Iterator[bytes]:
    """Hashes of the prompt's full blocks, one after the other, each made when it is asked for.

    Args:
        prompt: token ids.
        block_size: tokens per block.
        model_digest: from ModelLimits.
        salt: see `salt_of`.
        most: blocks after which to stop; None: all.
    """
    fields = ((b"m", model_digest.encode()), (b"a", b""), salt)
    data = b"".join(kind + struct.pack("<I", len(value)) + value for kind, value in fields)
    parent = hashlib.sha256(b"quire.v1.block" + data).digest()
    packed = pack_ids(prompt if most is None else prompt[: most * block_size])
    width = _ID_BYTES * block_size
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.sha256(parent + packed[start : start + width]).digest()
        yield parent


def held_blocks(hashes: Iterator[bytes], sets: Sequence[Container[bytes]]) -> list[int]:
    """How many of the first blocks each of the sets holds without a gap.

    Args:
        hashes: of a prompt; no more are taken than somebody holds, and one.
        sets: of each scheduler.
    """
    held = [0] * len(sets)
    holders = list(range(len(sets)))
    for block_hash in hashes:
        holders = [index for index in holders if block_hash in sets[index]]
        if not holders:
            break
        for index in holders:
            held[index] += 1
    return held
