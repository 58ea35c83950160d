"""What became findable in the prefix cache and what was given up, noted for whoever watches.

Owns the notes between two readings, and nothing else; no decision depends on them. There is a log
only while somebody watches: without one a pool asks whether there is one, and that is all.
"""

from collections.abc import Container
from dataclasses import dataclass

from services.scheduler.core.plan import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Blocks of one sequence that follow each other can be found; some could be before.

    Args:
        salt: with whom they are shared; see AddRequest.
        parent: digest of the block before the first one; b"": there is none before it.
        digests: theirs, back to back.
        tokens: uint32 [blocks, block_size].
    """

    salt: bytes
    parent: bytes
    digests: bytes
    tokens: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks of one worker cannot be found any more; other workers may have the same.

    Args:
        digests: theirs, back to back.
    """

    digests: bytes


class CacheLog:
    """Notes of all workers, in the order of what happened.

    Args:
        described: digests whose blocks the reader knows. A sequence whose beginning is not among
            them is noted from its first block on.
    """

    def __init__(self, described: Container[bytes]) -> None:
        self.described = described
        self.notes: list[Stored | Removed] = []
        """Read and cleared by the reader, after each input of the core."""
        self.complete = True
        """False: blocks were cached before the log began that nobody has described."""
