"""The hashing of prompts, outside the core, so that running steps are not delayed by it.

Hashing holds the interpreter, on whatever thread it runs: hashlib lets go of it only for more than
2,047 bytes at once, and a block has some hundred. So it is done on the event loop, in slices, and
all prompts together get one slice in each turn of the loop.
"""

import asyncio
from collections import deque
from itertools import accumulate

import numpy as np

from services.scheduler.core.chain import DIGEST_BYTES, Hashing
from services.scheduler.core.plan import TokenArray
from services.scheduler.session_chains import SessionChains, SessionKey

_SLICE = 18_432
"""Cost of what is hashed in one turn of the event loop: 128 blocks of 16 tokens, 0.1 ms."""

_BLOCK_COST = 128
"""A block costs as much as so many tokens, beside its own."""


class TurnShare:
    """Gives out a share of each turn of the event loop, in the order of asking.

    Args:
        amount: given out per turn.
    """

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._left = amount
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._refilling = False

    async def take(self, wanted: int) -> int:
        """Waits for its turn.

        Returns:
            How much may be used, from 1 to `wanted`; the taker uses it before it awaits again.
        """
        if self._left and not self._waiting:
            return self._give(wanted)
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, granted))
        return await granted

    def _give(self, wanted: int) -> int:
        given = min(wanted, self._left)
        self._left -= given
        if not self._refilling:
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)
        return given

    def _refill(self) -> None:
        self._refilling = False
        self._left = self._amount
        while self._waiting and self._left:
            wanted, granted = self._waiting.popleft()
            if not granted.done():  # else its taker was cancelled
                granted.set_result(self._give(wanted))


class PromptHasher:
    """Hashes the blocks of prompts and remembers sessions' last turns.

    Args:
        hashing: of the prefix cache.
        sessions: what is known of last turns.
    """

    def __init__(self, hashing: Hashing, sessions: SessionChains) -> None:
        self._hashing = hashing
        self._sessions = sessions
        self._turns = TurnShare(_SLICE)
        self.hashed_tokens = 0
        """Tokens hashed since start."""
        self.reused_tokens = 0
        """Tokens whose hashes were known from their session's last turn."""

    async def chain(
        self,
        prompt: TokenArray,
        *,
        block_size: int,
        model_digest: bytes,
        salt: bytes,
        session_id: str = "",
    ) -> bytes:
        """Chain hashes of the prompt's full blocks, back to back.

        Args:
            prompt: uint32 [n].
            block_size: tokens per block.
            model_digest: of the workers.
            salt: see AddRequest.
            session_id: what it shares with the last prompt of that session is not hashed again;
                "": it is nobody's turn.
        """
        root = self._hashing.root(model_digest, salt)
        key = SessionKey(session_id, root, block_size)
        digests = bytearray(self._sessions.leading(key, prompt) if session_id else b"")
        known = len(digests) // DIGEST_BYTES
        full = prompt.size // block_size
        # No copies: the bytes of a block are made when it is hashed.
        data = np.ascontiguousarray(prompt[: full * block_size], "<u4")
        blocks = data.view(np.dtype((np.void, 4 * block_size)))
        parent = bytes(digests[-DIGEST_BYTES:]) or root
        cost = block_size + _BLOCK_COST
        done = known
        while done < full:
            share = await self._turns.take((full - done) * cost)
            some = blocks[done : done + -(-share // cost)].tolist()
            hashed = list(accumulate(some, self._hashing.block, initial=parent))
            parent = hashed[-1]
            digests += b"".join(hashed[1:])
            done += len(some)
        self.reused_tokens += known * block_size
        self.hashed_tokens += (full - known) * block_size
        chain = bytes(digests)
        if session_id:
            self._sessions.remember(key, prompt, chain)
        return chain
