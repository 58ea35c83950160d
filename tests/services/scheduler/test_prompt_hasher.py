"""Hashing of prompts: the chain itself, what a session saves, and the share of a turn."""

import asyncio

import numpy as np
import pytest

from services.scheduler.core.chain import Hashing
from services.scheduler.hashing import SHA256, hashing_for, tenant_salt
from services.scheduler.prompt_hasher import PromptHasher, TurnShare
from services.scheduler.session_chains import SessionChains

SALT = tenant_salt("acme")


class Counted:
    """SHA256 that counts its blocks."""

    def __init__(self) -> None:
        self.blocks = 0

    def hashing(self) -> Hashing:
        return Hashing(name="counted", root=SHA256.root, block=self._block)

    def _block(self, parent: bytes, tokens: bytes) -> bytes:
        self.blocks += 1
        return SHA256.block(parent, tokens)


def chain_of(prompt: np.ndarray, hashing: Hashing, block_size: int) -> bytes:
    """One block after the other, as the formula reads."""
    parent, hashes = hashing.root(b"d1", SALT), b""
    for block in range(prompt.size // block_size):
        tokens = prompt[block * block_size : (block + 1) * block_size]
        parent = hashing.block(parent, tokens.astype("<u4").tobytes())
        hashes += parent
    return hashes


async def hashed(
    hasher: PromptHasher, prompt: np.ndarray, block_size: int, session: str = ""
) -> bytes:
    return await hasher.chain(
        prompt, block_size=block_size, model_digest=b"d1", salt=SALT, session_id=session
    )


@pytest.mark.parametrize("size", [1, 3, 4, 5, 4 * 1500, 4 * 1500 + 3])
@pytest.mark.parametrize(
    "hashing", [SHA256, hashing_for("blake2b", bytes(32))], ids=["sha256", "blake2b"]
)
async def test_prompts_give_the_chain_of_the_single_hashes(size: int, hashing: Hashing) -> None:
    prompt = np.arange(70_000, 70_000 + size, dtype=np.uint32)
    hasher = PromptHasher(hashing, SessionChains())
    assert await hashed(hasher, prompt, 4) == chain_of(prompt, hashing, 4)


async def test_tokens_that_are_zero_bytes_count() -> None:
    prompt = np.zeros(8, np.uint32)
    hasher = PromptHasher(SHA256, SessionChains())
    assert await hashed(hasher, prompt, 4) == chain_of(prompt, SHA256, 4)


async def test_a_column_of_another_layout_is_hashed_by_its_values() -> None:
    prompt = np.arange(16, dtype=np.uint32)[::2]
    hasher = PromptHasher(SHA256, SessionChains())
    assert await hashed(hasher, prompt, 4) == chain_of(prompt, SHA256, 4)


async def test_a_next_turn_hashes_only_its_new_blocks() -> None:
    counted = Counted()
    hasher = PromptHasher(counted.hashing(), SessionChains())
    first = np.arange(4 * 100 + 2, dtype=np.uint32)
    second = np.concatenate([first, np.arange(500, 530, dtype=np.uint32)])
    await hashed(hasher, first, 4, "chat")
    counted.blocks = 0
    assert await hashed(hasher, second, 4, "chat") == chain_of(second, SHA256, 4)
    assert counted.blocks == 8
    assert hasher.reused_tokens == 400
    assert hasher.hashed_tokens == 400 + 32


async def test_a_turn_that_was_edited_is_hashed_from_there() -> None:
    hasher = PromptHasher(SHA256, SessionChains())
    prompt = np.arange(40, dtype=np.uint32)
    await hashed(hasher, prompt, 4, "chat")
    edited = prompt.copy()
    edited[21] = 7
    assert await hashed(hasher, edited, 4, "chat") == chain_of(edited, SHA256, 4)
    assert hasher.reused_tokens == 20


async def test_without_a_session_nothing_is_remembered() -> None:
    sessions = SessionChains()
    hasher = PromptHasher(SHA256, sessions)
    for _ in range(2):
        await hashed(hasher, np.arange(40, dtype=np.uint32), 4)
    assert (hasher.hashed_tokens, hasher.reused_tokens, len(sessions)) == (80, 0, 0)


async def test_all_prompts_together_get_one_slice_a_turn() -> None:
    counted = Counted()
    hasher = PromptHasher(counted.hashing(), SessionChains())
    prompts = [np.arange(n, n + 16 * 1000, dtype=np.uint32) for n in range(8)]
    per_turn: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(hashed(hasher, prompt, 16)) for prompt in prompts]
        while not all(run.done() for run in runs):
            before = counted.blocks
            await asyncio.sleep(0)
            per_turn.append(counted.blocks - before)
    assert sum(per_turn) == 8000
    assert max(per_turn) <= 2 * 128  # a turn may end with one slice and begin with the next
    assert [run.result() for run in runs] == [chain_of(prompt, SHA256, 16) for prompt in prompts]


async def test_a_short_prompt_does_not_wait_for_the_long_ones_to_end() -> None:
    hasher = PromptHasher(SHA256, SessionChains())
    long = np.arange(16 * 4000, dtype=np.uint32)
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(hashed(hasher, long, 16)) for _ in range(4)]
        await asyncio.sleep(0)
        await hashed(hasher, np.arange(64, dtype=np.uint32), 16)
        assert not any(run.done() for run in runs)


async def test_a_share_whose_taker_is_gone_goes_to_the_next() -> None:
    share = TurnShare(10)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(share.take(10))
        gone = tasks.create_task(share.take(10))
        next_one = tasks.create_task(share.take(4))
        last = tasks.create_task(share.take(100))
        await asyncio.sleep(0)
        gone.cancel()
    assert first.result() == 10
    assert gone.cancelled()
    assert next_one.result() == 4
    assert last.result() == 6
