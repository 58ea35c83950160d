"""The hashes of KV blocks, as `token.proto` defines them, and the choice among them.

sha256 needs no agreement: every party can compute it. The keyed one costs a third less per block
and is known to those alone who hold the key.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from services.scheduler.core.chain import DIGEST_BYTES, Hashing

KEY_BYTES = 32
"""Of the key of a keyed hash."""


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


def _sha256(key: bytes) -> Hashing:
    if key:
        raise ValueError("sha256 takes no key")
    return SHA256


def _blake2b(key: bytes) -> Hashing:
    """BLAKE2b-256 (RFC 7693) of key, parent and tokens.

    The key stands before the data as in BLAKE2's own keyed mode, which is safe since BLAKE2 cannot
    be extended, but is not filled up to a block of 128 bytes: with 16 tokens per KV block all of it
    is one block of the compression function, where the keyed mode takes two.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key of blake2b must be {KEY_BYTES} bytes, got {len(key)}")
    keyed = hashlib.blake2b(key, digest_size=DIGEST_BYTES)

    def block(parent: bytes, tokens: bytes) -> bytes:
        state = keyed.copy()
        state.update(parent + tokens)
        return state.digest()

    return Hashing(name="blake2b", root=domain_root, block=block)


_CHOICES: Mapping[str, Callable[[bytes], Hashing]] = MappingProxyType(
    {"sha256": _sha256, "blake2b": _blake2b}
)

ALGORITHMS = tuple(_CHOICES)
"""Names of the hashes that can be chosen; the first is the default."""

KEYED = frozenset({"blake2b"})
"""Those that take a key."""


def hashing_for(name: str, key: bytes) -> Hashing:
    """The hash of that name.

    Args:
        name: one of ALGORITHMS.
        key: KEY_BYTES bytes for one of KEYED, else empty.

    Raises:
        ValueError: there is no such hash, or the key is not one for it.
    """
    if name not in _CHOICES:
        raise ValueError(f"the hash must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return _CHOICES[name](key)
