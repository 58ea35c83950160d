"""The block hashes are part of the wire contract: fixed values, from the formula in token.proto."""

import hashlib
import struct

import numpy as np

from services.scheduler.hashing import chain_hash, chain_root, hash_prompt


async def test_hashes_follow_the_contract() -> None:
    prompt = np.arange(5, dtype=np.uint32) + 70_000
    root = hashlib.sha256(b"quire.v1.block" + struct.pack("<I", 2) + b"d1").digest()
    first = hashlib.sha256(root + struct.pack("<2I", 70_000, 70_001)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 70_002, 70_003)).digest()
    assert chain_root("d1") == root
    assert await hash_prompt(prompt, block_size=2, root=root) == (first, second)


async def test_long_prompts_give_the_chain_of_the_single_hashes() -> None:
    prompt = np.arange(4 * 1500, dtype=np.uint32)
    hashes = await hash_prompt(prompt, block_size=4, root=b"r")
    parent = b"r"
    for block, digest in enumerate(hashes):
        parent = chain_hash(parent, prompt[4 * block : 4 * block + 4].tobytes())
        assert digest == parent
    assert len(hashes) == 1500
