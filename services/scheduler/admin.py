"""The admin service (`quire.v1.AdminService`): changes to the running scheduler.

Each is noted with who made it and when. What can change, and within which limits, is in
`admin_codec` and `policy_rules`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from quire.scheduler_config import NONE, difference
from quire.v1 import admin_pb2, admin_pb2_grpc
from services.chassis.errors import (
    Aborted,
    FailedPrecondition,
    NotFound,
    Unavailable,
    Violations,
)
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import admin_codec
from services.scheduler.audit import AuditLog, Change, Origin
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.config import Config
from services.scheduler.core.plan import Limits, Loads, Pin, Refused
from services.scheduler.prompt_hasher import PromptHasher

# grpc's stubs make the context generic; at run time it is a plain class.
Context = Any

MOST_PINS = 1024
"""Pins at a time, whatever their blocks."""


class Configurable(Protocol):
    """What of the engine loop can be looked at and changed here."""

    @property
    def config(self) -> Config:
        """In force."""

    @property
    def limits(self) -> Limits | None:
        """What the attached workers can serve."""

    @property
    def hashing(self) -> tuple[int, bytes] | None:
        """Block size and model digest, or None without workers."""

    async def configure(self, change: Callable[[Config], Config]) -> Config:
        """Replaces the configuration by what `change` makes of it; raises what that raises."""

    async def pin(self, pin: Pin) -> int:
        """Pins; gives the blocks cached now, or raises Refused."""

    async def unpin(self, name: str) -> bool:
        """Ends a pin; False where there is none."""

    def pins(self) -> tuple[Pin, ...]:
        """Those in force."""

    def cached_blocks(self, hashes: bytes) -> int:
        """How many of them some worker has cached."""

    def loads(self) -> Loads:
        """Gauges and counters."""

    def deadline(self, remaining_us: int | None) -> int | None:
        """An instant on the clock of the core."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See the module.

    Args:
        loop: the engine loop.
        hasher: of the prefix cache.
        audit: where changes are noted.
    """

    def __init__(self, loop: Configurable, hasher: PromptHasher, audit: AuditLog) -> None:
        self._loop = loop
        self._hasher = hasher
        self._audit = audit

    async def GetConfig(
        self, request: admin_pb2.GetConfigRequest, context: Context
    ) -> admin_pb2.GetConfigResponse:
        """The configuration in force."""
        refuse_unknown_fields(request)
        config = admin_codec.config_message(self._loop.config)
        return admin_pb2.GetConfigResponse(config=config, version=self._audit.version)

    async def SetConfig(
        self, request: admin_pb2.SetConfigRequest, context: Context
    ) -> admin_pb2.SetConfigResponse:
        """Changes it, all or nothing."""
        refuse_unknown_fields(request)
        wrong = Violations()
        origin = admin_codec.parse_origin(request.actor, request.reason, context.peer(), wrong)
        with wrong.collected():  # so that all that is wrong is told at once
            admin_codec.changed(self._loop.config, request.change)
        wrong.raise_any()
        expected = request.expected_version if request.HasField("expected_version") else None
        changes: list[Change] = []
        versions: list[int] = []

        def change(config: Config) -> Config:
            # Noted here, on the loop: a caller that leaves meanwhile takes nothing back.
            if expected is not None and expected != self._audit.version:
                raise Aborted(
                    f"expected_version: {self._audit.version} is in force, got {expected}",
                    reason="VERSION",
                )
            new = admin_codec.changed(config, request.change)
            if new != config:
                before, after = map(admin_codec.config_message, (config, new))
                changes.extend(self._audit.configured(origin, difference(before, after)))
            versions.append(self._audit.version)
            return new

        config = await self._loop.configure(change)
        return admin_pb2.SetConfigResponse(
            config=admin_codec.config_message(config),
            version=versions[-1],
            changes=[admin_codec.change_message(one) for one in changes],
        )

    async def ListChanges(
        self, request: admin_pb2.ListChangesRequest, context: Context
    ) -> admin_pb2.ListChangesResponse:
        """The latest changes."""
        refuse_unknown_fields(request)
        latest = self._audit.latest(request.limit)
        return admin_pb2.ListChangesResponse(
            changes=[admin_codec.change_message(change) for change in latest],
            total=self._audit.total,
        )

    async def PinPrefix(
        self, request: admin_pb2.PinPrefixRequest, context: Context
    ) -> admin_pb2.PinPrefixResponse:
        """Keeps a prefix cached."""
        refuse_unknown_fields(request)
        wrong = Violations()
        origin = admin_codec.parse_origin(request.actor, request.reason, context.peer(), wrong)
        call = admin_codec.parse_pin(request, self._loop.limits, wrong)
        wrong.raise_any()
        hashes = await self._hashes(call)
        before = self._named(call.name)
        if before is None and len(self._loop.pins()) >= MOST_PINS:
            raise FailedPrecondition(
                f"name: there are {MOST_PINS} pins, and no more are possible; unpin others",
                reason="PIN_COUNT",
            )
        ends = self._loop.deadline(call.ttl_us)
        pin = Pin(name=call.name, hashes=hashes, expires=ends)
        blocks = len(hashes) // DIGEST_BYTES
        for_s = "" if call.ttl_us is None else f" for {call.ttl_us // 1_000_000} s"
        new = f"{_blocks(blocks)}{for_s}"
        try:
            cached = await self._loop.pin(pin)
        except Refused as error:
            raise admin_codec.pin_error(error.refusal) from error
        except asyncio.CancelledError:
            # Its caller has left; the loop pins all the same.
            self._note_pin(origin, call.name, before, f"{new}, unless it was refused")
            raise
        self._note_pin(origin, call.name, before, new)
        return admin_pb2.PinPrefixResponse(blocks=blocks, blocks_cached=cached)

    async def UnpinPrefix(
        self, request: admin_pb2.UnpinPrefixRequest, context: Context
    ) -> admin_pb2.UnpinPrefixResponse:
        """Ends a pin."""
        refuse_unknown_fields(request)
        wrong = Violations()
        origin = admin_codec.parse_origin(request.actor, request.reason, context.peer(), wrong)
        wrong.raise_any()
        before = self._named(request.name)
        try:
            found = await self._loop.unpin(request.name)
        except asyncio.CancelledError:
            if before is not None:
                self._note_pin(origin, request.name, before, NONE)
            raise
        if not found:
            raise NotFound(f"name: there is no pin {request.name[:128]!r}")
        self._note_pin(origin, request.name, before, NONE)
        return admin_pb2.UnpinPrefixResponse()

    async def ListPins(
        self, request: admin_pb2.ListPinsRequest, context: Context
    ) -> admin_pb2.ListPinsResponse:
        """The pins in force."""
        refuse_unknown_fields(request)
        now = self._loop.deadline(0)
        assert now is not None
        pins = sorted(self._loop.pins(), key=lambda pin: pin.name)
        return admin_pb2.ListPinsResponse(
            pins=[
                admin_codec.pin_message(pin, self._loop.cached_blocks(pin.hashes), now)
                for pin in pins
            ],
            blocks_pinned=sum(worker.blocks_pinned for worker in self._loop.loads().workers),
        )

    async def _hashes(self, call: admin_codec.PinCall) -> bytes:
        if not self._loop.config.enable_prefix_caching:
            raise FailedPrecondition(
                "prefixes are not cached here (--enable-prefix-caching)", reason="NO_PREFIX_CACHE"
            )
        hashing = self._loop.hashing
        if hashing is None:
            raise Unavailable(
                "no worker is attached, so it is not known how long a block is", reason="NO_WORKER"
            )
        block_size, model_digest = hashing
        hashes = await self._hasher.chain(
            call.tokens, block_size=block_size, model_digest=model_digest, salt=call.salt
        )
        if self._loop.hashing != hashing:
            raise Unavailable("the workers changed meanwhile", reason="NO_WORKER")
        return hashes

    def _named(self, name: str) -> Pin | None:
        return next((pin for pin in self._loop.pins() if pin.name == name), None)

    def _note_pin(self, origin: Origin, name: str, before: Pin | None, new: str) -> None:
        old = NONE if before is None else _blocks(len(before.hashes) // DIGEST_BYTES)
        self._audit.note(origin, f"pin.{name}", old, new)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"
