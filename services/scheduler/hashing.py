"""The chain hash of KV blocks, as `token.proto` defines it, and its use on long prompts.

Prompts are hashed here, outside the core, in slices that leave the event loop free in between.
"""

import asyncio
import hashlib
import struct

from services.scheduler.core.chain import Hashing
from services.scheduler.core.plan import TokenArray

_SLICE_BLOCKS = 512
"""Blocks hashed at a stretch, about half a millisecond."""


def domain_root(model_digest: bytes, salt: bytes) -> bytes:
    """Parent of every first block of one model and one salt.

    Args:
        model_digest: of the worker.
        salt: its kind ("s" or "t", one byte) and its value; see `tenant_salt` and `explicit_salt`.
    """
    fields = ((b"m", model_digest), (b"a", b""), (salt[:1], salt[1:]))
    data = b"".join(kind + struct.pack("<I", len(value)) + value for kind, value in fields)
    return hashlib.sha256(b"quire.v1.block" + data).digest()


def tenant_salt(tenant: str) -> bytes:
    """The salt of a request that names none."""
    return b"t" + tenant.encode()


def explicit_salt(salt: str) -> bytes:
    """The salt of a request that names one."""
    return b"s" + salt.encode()


def _sha256_block(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


SHA256 = Hashing(name="sha256", root=domain_root, block=_sha256_block)


async def hash_prompt(
    prompt: TokenArray, *, hashing: Hashing, block_size: int, root: bytes
) -> bytes:
    """Chain hashes of the prompt's full blocks, back to back."""
    data = prompt.astype("<u4").tobytes()
    width = 4 * block_size
    hashes = bytearray()
    parent = root
    for block in range(len(data) // width):
        if block and block % _SLICE_BLOCKS == 0:
            await asyncio.sleep(0)
        parent = hashing.block(parent, data[block * width : (block + 1) * width])
        hashes += parent
    return bytes(hashes)
