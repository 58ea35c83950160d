"""What the admin service sees of an engine loop: it keeps a configuration and pins."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    Counters,
    Limits,
    Loads,
    Pin,
    Refusal,
    Refused,
    WorkerLoad,
)

LIMITS = Limits(
    vocab_size=100,
    max_model_len=64,
    kv_capacity_tokens=64,
    eos_token_ids=(2,),
    num_workers=1,
    block_size=4,
    model_digest=b"d1",
    prefix_hash="sha256",
)


@dataclass
class FakeLoop:
    """Applies changes when `turn` is set, as a loop does with what was posted.

    Attributes:
        config: in force.
        limits: of the workers; None: there are none.
        turn: clear it to hold back what is posted.
        most_pinned: blocks that pins may have.
        now: on the clock of the core, microseconds.
    """

    config: Config = field(default_factory=Config)
    limits: Limits | None = LIMITS
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    most_pinned: int = 4
    now: int = 1_000_000
    configured: list[Config] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn.set()
        self._pins: dict[str, Pin] = {}

    @property
    def hashing(self) -> tuple[int, bytes] | None:
        return None if self.limits is None else (self.limits.block_size, self.limits.model_digest)

    async def configure(self, change: Callable[[Config], Config]) -> Config:
        await self.turn.wait()
        self.config = change(self.config)
        self.configured.append(self.config)
        return self.config

    async def pin(self, pin: Pin) -> int:
        await self.turn.wait()
        others = [one for one in self._pins.values() if one.name != pin.name]
        left = self.most_pinned - sum(len(one.hashes) // 32 for one in others)
        if (blocks := len(pin.hashes) // 32) > left:
            raise Refused(Refusal(field="prompt", reason="PIN_LIMIT", limit=left, got=blocks))
        self._pins[pin.name] = pin
        return self.cached_blocks(pin.hashes)

    def cached_blocks(self, hashes: bytes) -> int:
        """As if the first block of every prefix were cached."""
        return min(1, len(hashes) // 32)

    async def unpin(self, name: str) -> bool:
        await self.turn.wait()
        return self._pins.pop(name, None) is not None

    def pins(self) -> tuple[Pin, ...]:
        return tuple(self._pins.values())

    def loads(self) -> Loads:
        worker = WorkerLoad(
            worker_id="w",
            epoch=1,
            running=0,
            blocks_total=16,
            blocks_free=13,
            blocks_evictable=0,
            blocks_pinned=3,
            steps=0,
            steps_in_flight=0,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            computed_tokens=0,
            execute_us=0,
        )
        return Loads(
            running=0,
            waiting=0,
            waiting_tokens=0,
            accepted=0,
            ended=0,
            workers=(worker,),
            classes=(),
            tenants=(),
            counters=Counters(),
        )

    def deadline(self, remaining_us: int | None) -> int | None:
        return None if remaining_us is None else self.now + remaining_us
