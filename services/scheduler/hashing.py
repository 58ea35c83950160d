"""The chain hash of KV blocks, as `token.proto` defines it, and its use on long prompts.

Prompts are hashed here, outside the core, in slices that leave the event loop free in between.
"""

import asyncio
import hashlib
import struct

from services.scheduler.core.plan import TokenArray

_SLICE_BLOCKS = 512
"""Blocks hashed at a stretch, about half a millisecond."""


def chain_root(model_digest: str) -> bytes:
    """Parent of every first block: sha256("quire.v1.block" || u32le(len) || digest)."""
    model = model_digest.encode()
    return hashlib.sha256(b"quire.v1.block" + struct.pack("<I", len(model)) + model).digest()


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block: sha256(parent || tokens as little-endian uint32)."""
    return hashlib.sha256(parent + tokens).digest()


async def hash_prompt(prompt: TokenArray, *, block_size: int, root: bytes) -> tuple[bytes, ...]:
    """Chain hashes of the prompt's full blocks."""
    data = prompt.astype("<u4").tobytes()
    width = 4 * block_size
    hashes: list[bytes] = []
    parent = root
    for block in range(len(data) // width):
        if block and block % _SLICE_BLOCKS == 0:
            await asyncio.sleep(0)
        parent = chain_hash(parent, data[block * width : (block + 1) * width])
        hashes.append(parent)
    return tuple(hashes)
