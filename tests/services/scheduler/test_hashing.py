"""The block hashes are part of the wire contract: fixed values, from the formula in token.proto."""

import hashlib
import struct

import numpy as np
import pytest

from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.hashing import (
    ALGORITHMS,
    KEYED,
    SHA256,
    explicit_salt,
    hashing_for,
    tenant_salt,
)

KEY = bytes(range(32))


def field(kind: bytes, value: bytes) -> bytes:
    return kind + struct.pack("<I", len(value)) + value


def test_hashes_follow_the_contract() -> None:
    domain = field(b"m", b"d1") + field(b"a", b"") + field(b"t", b"acme")
    root = hashlib.sha256(b"quire.v1.block" + domain).digest()
    tokens = struct.pack("<2I", 70_000, 70_001)
    assert SHA256.root(b"d1", tenant_salt("acme")) == root
    assert SHA256.block(root, tokens) == hashlib.sha256(root + tokens).digest()


def test_a_salt_is_no_tenant_and_no_model() -> None:
    roots = {
        SHA256.root(b"d1", tenant_salt("x")),
        SHA256.root(b"d1", explicit_salt("x")),
        SHA256.root(b"d1x", tenant_salt("")),
        SHA256.root(b"d1", tenant_salt("")),
        SHA256.root(b"d1", explicit_salt("")),
    }
    assert len(roots) == 5


def test_the_keyed_hash_is_blake2b_of_key_parent_and_tokens() -> None:
    hashing = hashing_for("blake2b", KEY)
    parent, tokens = b"p" * 32, np.arange(16, dtype="<u4").tobytes()
    expected = hashlib.blake2b(KEY + parent + tokens, digest_size=32).digest()
    assert hashing.name == "blake2b"
    assert hashing.block(parent, tokens) == expected
    assert hashing.block(parent, tokens) == expected  # the first call left nothing behind


def test_another_key_gives_other_hashes_and_the_same_key_the_same() -> None:
    tokens = bytes(64)
    hashes = [hashing_for("blake2b", key).block(b"p" * 32, tokens) for key in (KEY, KEY[::-1], KEY)]
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_choice_gives_digests_of_the_one_length(name: str) -> None:
    hashing = hashing_for(name, KEY if name in KEYED else b"")
    assert hashing.name == name
    assert len(hashing.root(b"d1", tenant_salt(""))) == DIGEST_BYTES
    assert len(hashing.block(b"p" * 32, bytes(8))) == DIGEST_BYTES


def test_unknown_hashes_are_refused_by_name_and_choices() -> None:
    with pytest.raises(ValueError, match="one of sha256, blake2b, got 'md5'"):
        hashing_for("md5", b"")


@pytest.mark.parametrize(
    ("name", "key"), [("blake2b", b""), ("blake2b", KEY + KEY), ("sha256", KEY)]
)
def test_a_key_must_fit_its_hash(name: str, key: bytes) -> None:
    with pytest.raises(ValueError, match=name):
        hashing_for(name, key)
