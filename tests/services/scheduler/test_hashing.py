"""The block hashes are part of the wire contract: fixed values, from the formula in token.proto."""

import hashlib
import struct

import numpy as np

from services.scheduler.hashing import SHA256, explicit_salt, hash_prompt, tenant_salt


def field(kind: bytes, value: bytes) -> bytes:
    return kind + struct.pack("<I", len(value)) + value


async def test_hashes_follow_the_contract() -> None:
    prompt = np.arange(5, dtype=np.uint32) + 70_000
    domain = field(b"m", b"d1") + field(b"a", b"") + field(b"t", b"acme")
    root = hashlib.sha256(b"quire.v1.block" + domain).digest()
    first = hashlib.sha256(root + struct.pack("<2I", 70_000, 70_001)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 70_002, 70_003)).digest()
    assert SHA256.root(b"d1", tenant_salt("acme")) == root
    hashes = await hash_prompt(prompt, hashing=SHA256, block_size=2, root=root)
    assert hashes == first + second


def test_a_salt_is_no_tenant_and_no_model() -> None:
    roots = {
        SHA256.root(b"d1", tenant_salt("x")),
        SHA256.root(b"d1", explicit_salt("x")),
        SHA256.root(b"d1x", tenant_salt("")),
        SHA256.root(b"d1", tenant_salt("")),
        SHA256.root(b"d1", explicit_salt("")),
    }
    assert len(roots) == 5


async def test_long_prompts_give_the_chain_of_the_single_hashes() -> None:
    prompt = np.arange(4 * 1500, dtype=np.uint32)
    hashes = await hash_prompt(prompt, hashing=SHA256, block_size=4, root=b"r")
    parent = b"r"
    for block in range(1500):
        parent = SHA256.block(parent, prompt[4 * block : 4 * block + 4].tobytes())
        assert hashes[32 * block : 32 * block + 32] == parent
    assert len(hashes) == 32 * 1500
