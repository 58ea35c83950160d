"""What waits to be written to one caller: new tokens and ends, merged until the caller reads.

Owns the bound: a caller that does not read is given up as soon as more than `MAX_BYTES` wait for it
(its writer also gives up when one write takes `WRITE_TIMEOUT_S`). The engine loop only puts, and
never waits.
"""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.chassis.errors import ServiceError
from services.scheduler.core.plan import Ended, Limits, TokenArray
from services.scheduler.digest import LoadReport

MAX_BYTES = 4 * 1024 * 1024
"""Tokens and ends that may wait for one caller, bytes."""

WRITE_TIMEOUT_S = 5.0
"""Longest time one write to a caller may take, seconds."""

# What is held, not what will be written: each put keeps two arrays, whose headers outweigh a row.
_PUT_BYTES = 256
_ROW_BYTES = 8
_END_BYTES = 256

StreamIds = npt.NDArray[np.uint32]

End = Ended | ServiceError
"""How a request ended: by the core's terminal event, or refused at the door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Everything new for one caller since the delivery before.

    Args:
        streams: uint32 [rows], whose token it is.
        token_ids: uint32 [rows], one token per row.
        ends: ends with their streams.
        limits: the limits of the attached workers, where they changed; see `limits_changed`.
        serving: whether requests can be served now, where that changed.
        load: the newest load report, where there is a new one.
        credits: submits taken.
        closing: nothing comes after this.
    """

    streams: StreamIds
    token_ids: TokenArray
    ends: tuple[tuple[int, End], ...]
    limits: Limits | None
    limits_changed: bool
    serving: bool | None
    load: LoadReport | None
    credits: int
    closing: bool


class Outbox:
    """Single reader, written by the engine loop on the same event loop."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._overflow = asyncio.Event()
        self._streams: list[StreamIds] = []
        self._tokens: list[TokenArray] = []
        self._ends: list[tuple[int, End]] = []
        self._limits: Limits | None = None
        self._limits_changed = False
        self._serving: bool | None = None
        self._load: LoadReport | None = None
        self._credits = 0
        self._bytes = 0
        self._closing = False

    async def overflowed(self) -> None:
        """Waits until the caller has fallen too far behind and must be given up."""
        await self._overflow.wait()

    def put_tokens(self, streams: StreamIds, token_ids: TokenArray) -> None:
        """One new token for each of these streams."""
        self._streams.append(streams)
        self._tokens.append(token_ids)
        self._grow(_PUT_BYTES + _ROW_BYTES * streams.size)

    def put_end(self, stream: int, end: End) -> None:
        """The end of a stream."""
        self._ends.append((stream, end))
        self._grow(_END_BYTES)

    def put_limits(self, limits: Limits | None) -> None:
        """The limits of the attached workers have changed; None: there are none."""
        self._limits = limits
        self._limits_changed = True
        self._news.set()

    def put_serving(self, serving: bool) -> None:
        """Requests can be served from now on, or cannot any more."""
        self._serving = serving
        self._news.set()

    def put_load(self, report: LoadReport) -> None:
        """A newer load report; only the newest waits, with the newest prefixes that wait."""
        if report.prefixes is None and self._load is not None:
            report = replace(report, prefixes=self._load.prefixes)
        self._load = report
        self._news.set()

    def put_credit(self) -> None:
        """One submit has been taken."""
        self._credits += 1
        self._news.set()

    def close(self) -> None:
        """Nothing will be put any more."""
        self._closing = True
        self._news.set()

    async def take(self) -> Delivery:
        """Waits for news and takes all of it."""
        await self._news.wait()
        delivery = Delivery(
            streams=_joined(self._streams),
            token_ids=_joined(self._tokens),
            ends=tuple(self._ends),
            limits=self._limits,
            limits_changed=self._limits_changed,
            serving=self._serving,
            load=self._load,
            credits=self._credits,
            closing=self._closing,
        )
        self._streams, self._tokens, self._ends = [], [], []
        self._limits_changed, self._serving, self._load = False, None, None
        self._credits = self._bytes = 0
        if not self._closing:
            self._news.clear()
        return delivery

    def _grow(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MAX_BYTES:
            self._overflow.set()
        self._news.set()


def _joined(parts: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)
