"""What is known of the last turns of conversations: their prompts and the hashes of their blocks.

A next turn begins with the tokens of the last one, so only what is new of it has to be hashed.
Nothing is trusted for its session's name: the tokens are compared. Owns the bounds of what is kept.
"""

from collections import OrderedDict
from dataclasses import dataclass

from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import TokenArray

_ENTRY_BYTES = 512
"""Counted for each turn beside its tokens and digests: objects and names."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Whose turn it is, and with what its blocks are hashed.

    Args:
        session_id: as the caller names it; not empty.
        root: parent of the first block; differs between models and between salts.
        block_size: tokens per block.
    """

    session_id: str
    root: bytes
    block_size: int


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: TokenArray
    digests: bytes

    @property
    def num_bytes(self) -> int:
        return self.prompt.nbytes + len(self.digests) + _ENTRY_BYTES


class SessionChains:
    """The last turn of each session, least recently used ones given up first.

    Args:
        max_bytes: most bytes kept; a turn above that is not kept.
        max_sessions: most sessions kept.
    """

    def __init__(self, *, max_bytes: int = 64 << 20, max_sessions: int = 4096) -> None:
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._turns: OrderedDict[SessionKey, _Turn] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Sessions kept."""
        return len(self._turns)

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return self._bytes

    def leading(self, key: SessionKey, prompt: TokenArray) -> bytes:
        """Digests of the full blocks with which both this prompt and the last turn's begin.

        Args:
            key: whose turn.
            prompt: uint32 [n].

        Returns:
            Back to back; empty where nothing is known.
        """
        turn = self._turns.get(key)
        if turn is None:
            return b""
        self._turns.move_to_end(key)
        most = min(prompt.size, turn.prompt.size)
        differ = prompt[:most] != turn.prompt[:most]
        first = int(differ.argmax()) if most else 0
        equal = first if most and differ[first] else most
        return turn.digests[: equal // key.block_size * DIGEST_BYTES]

    def remember(self, key: SessionKey, prompt: TokenArray, digests: bytes) -> None:
        """Takes the place of the session's last turn.

        Args:
            key: whose turn.
            prompt: uint32 [n]; kept as it is, not copied.
            digests: of its full blocks, back to back.
        """
        old = self._turns.pop(key, None)
        if old is not None:
            self._bytes -= old.num_bytes
        turn = _Turn(prompt, digests)
        if turn.num_bytes > self._max_bytes:
            return
        self._turns[key] = turn
        self._bytes += turn.num_bytes
        while self._bytes > self._max_bytes or len(self._turns) > self._max_sessions:
            _, oldest = self._turns.popitem(last=False)
            self._bytes -= oldest.num_bytes
