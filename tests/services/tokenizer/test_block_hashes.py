"""The block hashes of the contract, and the sets that schedulers report."""

import hashlib
import struct

import pytest
from rbloom import Bloom

from services.scheduler.core.chain import Hashing
from services.scheduler.digest import prefix_digest
from services.scheduler.hashing import SHA256, explicit_salt, tenant_salt
from services.tokenizer.block_hashes import PrefixSet, block_hashes, held_blocks, salt_of
from services.tokenizer.domain import Scheduling

PROMPT = [7, 0, 2**32 - 1, 5, 6, 1, 2, 3, 9]


def scheduler_hashes(hashing: Hashing, salt: bytes, digest: str, size: int) -> list[bytes]:
    """By the functions that the scheduler uses."""
    parent = hashing.root(digest.encode(), salt)
    found = []
    for start in range(0, len(PROMPT) - size + 1, size):
        tokens = struct.pack(f"<{size}I", *PROMPT[start : start + size])
        parent = hashing.block(parent, tokens)
        found.append(parent)
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 9, 10])
@pytest.mark.parametrize(
    ("scheduling", "salt"),
    [
        (Scheduling(), tenant_salt("")),
        (Scheduling(tenant="Zoë"), tenant_salt("Zoë")),
        (Scheduling(tenant="a", cache_salt="x"), explicit_salt("x")),
        (Scheduling(tenant="a", cache_salt=""), explicit_salt("")),
    ],
)
def test_both_services_agree(scheduling: Scheduling, salt: bytes, size: int) -> None:
    ours = list(block_hashes(PROMPT, block_size=size, model_digest="d1", salt=salt_of(scheduling)))
    assert ours == scheduler_hashes(SHA256, salt, "d1", size)
    assert len(ours) == 9 // size


def test_the_formula_is_that_of_the_contract() -> None:
    root = hashlib.sha256(
        b"quire.v1.block" + b"m\x02\0\0\0d1" + b"a\0\0\0\0" + b"t\x03\0\0\0abc"
    ).digest()
    first = hashlib.sha256(root + b"\x05\0\0\0\x06\0\0\0").digest()
    hashes = block_hashes(
        [5, 6, 7], block_size=2, model_digest="d1", salt=salt_of(Scheduling(tenant="abc"))
    )
    assert list(hashes) == [first]


async def test_what_a_scheduler_reports_is_found() -> None:
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(100)]
    made = await prefix_digest(b"".join(hashes))
    prefixes = PrefixSet(made.bloom)
    assert all(block in prefixes for block in hashes)
    absent = [hashlib.sha256(b"x%d" % number).digest() for number in range(1000)]
    assert sum(block in prefixes for block in absent) < 40


@pytest.mark.parametrize(
    "wrong",
    [b"", b"abc", b"\6" + 7 * b"\0", 8 * b"\0" + b"bits", 8 * b"\xff" + b"bits"],
    ids=["nothing", "short", "no bits", "no function", "too many functions"],
)
def test_what_is_no_filter_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="is no Bloom filter"):
        PrefixSet(wrong)


def test_an_empty_filter_holds_nothing() -> None:
    assert b"x" * 32 not in PrefixSet(Bloom(1, 0.01, int).save_bytes())


def test_no_more_is_hashed_than_somebody_holds_and_one() -> None:
    made = []

    def counted():
        for number in range(100):
            made.append(number)
            yield bytes([number])

    blocks = [bytes([number]) for number in range(100)]
    # The second one has a gap; what comes after it is of no use.
    assert held_blocks(counted(), [set(blocks[:5]), {*blocks[:2], *blocks[3:]}, set()]) == [5, 2, 0]
    assert made == [0, 1, 2, 3, 4, 5]


def test_long_prompts_are_hashed_no_further_than_asked() -> None:
    salt = salt_of(Scheduling())
    some = block_hashes(PROMPT, block_size=2, model_digest="d1", salt=salt, most=3)
    assert list(some) == scheduler_hashes(SHA256, tenant_salt(""), "d1", 2)[:3]
