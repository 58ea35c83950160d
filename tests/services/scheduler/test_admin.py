"""The admin service over gRPC, before a hand-written loop and before a real one."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import admin_pb2, admin_pb2_grpc, token_pb2
from quire.v1.generation_pb2 import SchedulingOptions, StoppingCriteria, TokenIds
from services.chassis.server import GrpcServer
from services.scheduler.admin import MOST_PINS, AdminServicer
from services.scheduler.audit import AuditLog
from services.scheduler.core.config import Config
from services.scheduler.core.plan import Pin
from services.scheduler.hashing import SHA256, explicit_salt, tenant_salt
from services.scheduler.prompt_hasher import PromptHasher
from services.scheduler.session_chains import SessionChains
from tests.fakes.admin_loop import FakeLoop
from tests.fakes.scripted_worker import attached, column
from tests.services.scheduler.conftest import Running, running_scheduler

Config_ = admin_pb2.SchedulerConfig
NOW_US = 1_700_000_000_123_456


class Admin:
    """A client of the service, and what stands behind it."""

    def __init__(self, loop: FakeLoop, channel: grpc.aio.Channel) -> None:
        self.loop = loop
        self.stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def set(self, actor: str = "ann", **change: Any) -> admin_pb2.SetConfigResponse:
        return await self.stub.SetConfig(
            admin_pb2.SetConfigRequest(change=Config_(**change), actor=actor)
        )

    async def pin(self, name: str, *ids: int, **fields: Any) -> admin_pb2.PinPrefixResponse:
        request = {"name": name, "tokens": TokenIds(ids=ids), "actor": "ann", **fields}
        return await self.stub.PinPrefix(admin_pb2.PinPrefixRequest(**request))

    async def changes(self, limit: int = 0) -> list[tuple[str, str, str]]:
        response = await self.stub.ListChanges(admin_pb2.ListChangesRequest(limit=limit))
        return [(one.field, one.old_value, one.new_value) for one in response.changes]


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    loop = FakeLoop()
    server = GrpcServer([], ["quire.v1.AdminService"])
    hasher = PromptHasher(SHA256, SessionChains())
    servicer = AdminServicer(loop, hasher, AuditLog(clock=lambda: NOW_US))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server.grpc)
    (target,) = await server.start([f"unix://{tmp_path}/a.sock"])
    async with grpc.aio.insecure_channel(target) as channel:
        yield Admin(loop, channel)
    await server.stop()


@contextlib.contextmanager
def refused(code: str, *parts: str):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code().name == code
    for part in parts:
        assert part in caught.value.details()


async def test_a_change_is_answered_noted_and_logged(
    admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = await admin.stub.SetConfig(
        admin_pb2.SetConfigRequest(
            change=Config_(
                max_num_seqs=64, classes=[admin_pb2.PriorityClassConfig(name="batch", share=100)]
            ),
            actor="ann@desk",
            reason="too slow",
        )
    )
    assert (response.version, response.config.max_num_seqs) == (2, 64)
    assert response.config.classes[2].share == 100
    assert [(one.field, one.old_value, one.new_value) for one in response.changes] == [
        ("max-num-seqs", "none", "64"),
        ("class.batch.share", "50", "100"),
    ]
    assert admin.loop.config.max_num_seqs == 64
    listed = await admin.stub.ListChanges(admin_pb2.ListChangesRequest())
    assert list(listed.changes) == list(response.changes)
    first = listed.changes[0]
    assert (first.actor, first.reason, first.version) == ("ann@desk", "too slow", 2)
    assert first.peer.startswith("unix:")
    assert first.time.ToMicroseconds() == NOW_US
    lines = [record.getMessage() for record in caplog.records]
    assert f"max-num-seqs: none -> 64, by ann@desk at {first.peer}, since: too slow" in lines
    in_force = await admin.stub.GetConfig(admin_pb2.GetConfigRequest())
    assert (in_force.config, in_force.version) == (response.config, 2)


async def test_a_change_of_nothing_is_no_change(admin: Admin) -> None:
    response = await admin.set(prefill_chunk_size=512)
    assert (response.version, list(response.changes)) == (1, [])
    assert await admin.changes() == []


async def test_a_refused_change_changes_nothing_and_the_next_one_is_taken(admin: Admin) -> None:
    with refused("INVALID_ARGUMENT", "actor: ", "change.prefill_chunk_size: ", "change.eviction: "):
        await admin.set("", prefill_chunk_size=0, eviction=admin_pb2.EVICTION_POLICY_TIME_WHEEL)
    assert admin.loop.config == Config()
    assert admin.loop.configured == []
    assert (await admin.set(prefill_chunk_size=64)).version == 2


@pytest.mark.parametrize("actor", ["x" * 129, "a\nb", "é" * 65])
async def test_an_actor_stands_on_one_line(admin: Admin, actor: str) -> None:
    with refused("INVALID_ARGUMENT", "actor: must be 1 to 128 bytes of printable text"):
        await admin.set(actor, max_num_seqs=1)
    assert (await admin.set("x" * 128, max_num_seqs=1)).version == 2


async def test_a_change_made_for_another_version_is_refused(admin: Admin) -> None:
    def request(seqs: int) -> admin_pb2.SetConfigRequest:
        return admin_pb2.SetConfigRequest(
            change=Config_(max_num_seqs=seqs), actor="ann", expected_version=1
        )

    assert (await admin.stub.SetConfig(request(1))).version == 2
    with refused("ABORTED", "expected_version: 2 is in force, got 1"):
        await admin.stub.SetConfig(request(2))
    assert admin.loop.config.max_num_seqs == 1


async def test_of_two_changes_for_one_version_the_second_is_refused(admin: Admin) -> None:
    """Both are checked before either is made."""
    admin.loop.turn.clear()
    calls = [
        admin.stub.SetConfig(
            admin_pb2.SetConfigRequest(
                change=Config_(max_num_seqs=seqs), actor="ann", expected_version=1
            )
        )
        for seqs in (1, 2)
    ]
    ends = asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0.05)
    admin.loop.turn.set()
    codes = [end.code().name if isinstance(end, Exception) else "OK" for end in await ends]
    assert sorted(codes) == ["ABORTED", "OK"]
    assert len(await admin.changes()) == 1


async def test_only_the_latest_changes_are_kept(admin: Admin) -> None:
    for number in range(1, 1003):
        await admin.set(prefill_chunk_size=number)
    changes = await admin.changes()
    assert len(changes) == 1000
    assert changes[-1] == ("prefill-chunk-size", "1001", "1002")
    assert await admin.changes(2) == changes[-2:]
    listed = await admin.stub.ListChanges(admin_pb2.ListChangesRequest(limit=1))
    assert (listed.total, listed.changes[0].version) == (1002, 1003)


async def test_a_field_of_a_later_version_is_refused(admin: Admin) -> None:
    request = admin_pb2.SetConfigRequest(actor="ann", change=Config_(max_num_seqs=1))
    request.change.MergeFromString(b"\xf8\x3f\x01")  # field 1023
    with refused("UNIMPLEMENTED", "change.field 1023"):
        await admin.stub.SetConfig(request)
    assert admin.loop.config == Config()


# Pins


def chain(salt: bytes, *blocks: tuple[int, ...]) -> bytes:
    parent, hashes = SHA256.root(b"d1", salt), b""
    for block in blocks:
        parent = SHA256.block(parent, b"".join(one.to_bytes(4, "little") for one in block))
        hashes += parent
    return hashes


async def test_a_pin_has_the_hashes_of_its_full_blocks(admin: Admin) -> None:
    response = await admin.pin("sys", *range(10), ttl_s=60, tenant="acme")
    assert (response.blocks, response.blocks_cached) == (2, 1)
    hashes = chain(tenant_salt("acme"), (0, 1, 2, 3), (4, 5, 6, 7))
    assert admin.loop.pins() == (Pin(name="sys", hashes=hashes, expires=61_000_000),)
    admin.loop.now += 1_500_000
    listed = await admin.stub.ListPins(admin_pb2.ListPinsRequest())
    assert list(listed.pins) == [
        admin_pb2.PinnedPrefix(name="sys", blocks=2, blocks_cached=1, expires_in_ms=58_500)
    ]
    assert listed.blocks_pinned == 3
    assert await admin.changes() == [("pin.sys", "none", "2 blocks for 60 s")]


async def test_a_pin_for_a_salt_that_stays(admin: Admin) -> None:
    await admin.pin("sys", 1, 2, 3, 4, cache_salt="", tenant="acme")
    pin = Pin(name="sys", hashes=chain(explicit_salt(""), (1, 2, 3, 4)), expires=None)
    assert admin.loop.pins() == (pin,)
    (listed,) = (await admin.stub.ListPins(admin_pb2.ListPinsRequest())).pins
    assert not listed.HasField("expires_in_ms")


async def test_a_pin_is_replaced_and_ended(admin: Admin) -> None:
    await admin.pin("sys", *range(4))
    await admin.pin("sys", *range(8))
    unpin = admin_pb2.UnpinPrefixRequest(name="sys", actor="bob")
    await admin.stub.UnpinPrefix(unpin)
    assert admin.loop.pins() == ()
    with refused("NOT_FOUND", "name: there is no pin 'sys'"):
        await admin.stub.UnpinPrefix(unpin)
    assert await admin.changes() == [
        ("pin.sys", "none", "1 block"),
        ("pin.sys", "1 block", "2 blocks"),
        ("pin.sys", "2 blocks", "none"),
    ]


async def test_pins_have_a_cap(admin: Admin) -> None:
    await admin.pin("a", *range(12))
    with refused("FAILED_PRECONDITION", "tokens: ", "room for 1 blocks more, got 2"):
        await admin.pin("b", *range(8))
    assert (await admin.pin("b", *range(4))).blocks == 1
    assert [name for name, *_ in await admin.changes()] == ["pin.a", "pin.b"]


async def test_the_number_of_pins_is_bounded(admin: Admin) -> None:
    admin.loop.most_pinned = 2 * MOST_PINS
    for number in range(MOST_PINS):
        await admin.loop.pin(Pin(name=str(number), hashes=bytes(32), expires=None))
    with refused("FAILED_PRECONDITION", f"there are {MOST_PINS} pins"):
        await admin.pin("one more", *range(4))
    assert (await admin.pin("7", *range(8))).blocks == 2


async def test_everything_wrong_with_a_pin_is_told_at_once(admin: Admin) -> None:
    with refused(
        "INVALID_ARGUMENT",
        "actor: must be 1 to 128 bytes of printable text, got 0 bytes",
        "name: must be 1 to 128 bytes of printable text, got 0 bytes",
        "ttl_s: must be from 1 to 4000000, got 0",
        "tenant: must be at most 128 bytes",
        "tokens: must be from 4 (one block) to 64 ids, got 3",
    ):
        await admin.pin("", 1, 2, 3, actor="", ttl_s=0, tenant="x" * 129)
    with refused("INVALID_ARGUMENT", "tokens: must be from 4 (one block) to 64 ids, got 65"):
        await admin.pin("a", *([1] * 65))
    with refused("INVALID_ARGUMENT", "tokens: the largest id of the vocabulary is 99, got 100"):
        await admin.pin("a", 1, 2, 3, 100)


async def test_a_pin_needs_a_worker_and_a_cache(admin: Admin) -> None:
    admin.loop.limits = None
    with refused("UNAVAILABLE", "no worker is attached"):
        await admin.pin("a", *range(4))
    admin.loop.config = Config(enable_prefix_caching=False)
    with refused("FAILED_PRECONDITION", "--enable-prefix-caching"):
        await admin.pin("a", *range(4))


async def test_whoever_leaves_before_the_answer_is_noted_all_the_same(admin: Admin) -> None:
    await admin.pin("old", *range(4))
    admin.loop.turn.clear()
    request = admin_pb2.UnpinPrefixRequest(name="old", actor="ann")
    for call in (
        admin.stub.PinPrefix(
            admin_pb2.PinPrefixRequest(name="new", tokens=TokenIds(ids=range(4)), actor="ann")
        ),
        admin.stub.UnpinPrefix(request),
    ):
        await asyncio.sleep(0.05)
        call.cancel()
    async with asyncio.timeout(5):
        while len(changes := await admin.changes()) < 3:
            await asyncio.sleep(0.01)
    assert changes[1:] == [
        ("pin.new", "none", "1 block, unless it was refused"),
        ("pin.old", "1 block", "none"),
    ]


# Before the real loop


class Behind:
    """The admin service of a running scheduler."""

    def __init__(self, scheduler: Running) -> None:
        self.scheduler = scheduler
        self.stub = admin_pb2_grpc.AdminServiceStub(scheduler.channel)

    async def set(self, **change: Any) -> admin_pb2.SetConfigResponse:
        request = admin_pb2.SetConfigRequest(change=Config_(**change), actor="ann")
        return await self.stub.SetConfig(request)

    async def generate(self, *prompt: int, max_tokens: int = 3, priority_class: str = "") -> int:
        """Generates, and gives how many tokens of the prompt were cached."""
        request = token_pb2.TokenRequest(
            prompt=TokenIds(ids=prompt),
            stopping=StoppingCriteria(max_tokens=max_tokens),
            scheduling=SchedulingOptions(priority_class=priority_class),
        )
        call = self.scheduler.tokens.Generate(
            token_pb2.TokenServiceGenerateRequest(request=request)
        )
        responses = [response async for response in call]
        return responses[-1].finished.usage.cached_tokens


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Behind]:
    async with running_scheduler(tmp_path) as scheduler:
        yield Behind(scheduler)


async def test_the_sequence_cap_falls_and_rises_again_within_a_run(behind: Behind) -> None:
    async with attached(behind.scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        most: list[int] = []

        async def work() -> None:
            while True:
                step = await worker.step()
                most.append(len(column(step.slots)))
                await worker.answer(step)

        async def run_four() -> int:
            most.clear()
            async with asyncio.TaskGroup() as requests:
                for first in range(4):
                    requests.create_task(behind.generate(first + 10, 5, max_tokens=8))
            return max(most)

        working = tasks.create_task(work())
        assert await run_four() == 4
        await behind.set(max_num_seqs=1)
        assert await run_four() == 1
        await behind.set(max_num_seqs=3)
        assert await run_four() == 3
        await behind.set(max_num_seqs=0)
        assert await run_four() == 4
        working.cancel()


async def test_the_token_budget_and_the_chunk_change(behind: Behind) -> None:
    async with attached(behind.scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        for change, tokens in (
            ({"max_num_batched_tokens": 5}, 5),
            ({"prefill_chunk_size": 3}, 3),
            ({"prefill_chunk_size": 512, "max_num_batched_tokens": 0}, 8),
        ):
            await behind.set(**change)
            call = tasks.create_task(behind.generate(*range(tokens, tokens + 12), max_tokens=1))
            step = await worker.step()
            assert column(step.num_tokens) == [tokens]
            await worker.answer(step)
            while not call.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await worker.answer(await worker.step())


@pytest.mark.parametrize("changes", [False, True])
async def test_what_waits_is_ordered_anew_when_the_policy_changes(
    behind: Behind, changes: bool
) -> None:
    await behind.set(policy=admin_pb2.SCHEDULING_POLICY_FCFS, max_num_seqs=1)
    ended: list[str] = []

    async def generate(priority_class: str) -> None:
        await behind.generate(5, 6, priority_class=priority_class)
        ended.append(priority_class)

    async def waits(count: int) -> None:
        async with asyncio.timeout(5):
            while (await behind.scheduler.loads()).waiting != count:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as requests:
        for waiting, priority_class in enumerate(("batch", "standard", "interactive"), 1):
            requests.create_task(generate(priority_class))
            await waits(waiting)
        if changes:
            await behind.set(policy=admin_pb2.SCHEDULING_POLICY_PRIORITY)
        async with attached(behind.scheduler.target) as worker:
            serving = requests.create_task(worker.serve())
            async with asyncio.timeout(5):
                while len(ended) < 3:
                    await asyncio.sleep(0.01)
            serving.cancel()
    order = ["batch", "standard", "interactive"]
    assert ended == (order[::-1] if changes else order)


async def test_queue_bounds_change(behind: Behind) -> None:
    """Without a worker everything waits."""
    await behind.set(max_queued_requests=1)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(behind.generate(1, 2))
        async with asyncio.timeout(5):
            while (await behind.scheduler.loads()).waiting < 1:
                await asyncio.sleep(0.01)
        with refused("RESOURCE_EXHAUSTED", "at most 1 requests may wait"):
            await behind.generate(3, 4)
        await behind.set(max_queued_requests=0)
        more = tasks.create_task(behind.generate(3, 4))
        async with attached(behind.scheduler.target) as worker:
            serving = tasks.create_task(worker.serve())
            await asyncio.wait([waiting, more])
            serving.cancel()


async def test_a_pinned_prefix_outlives_what_evicts_another(behind: Behind) -> None:
    """The worker has 16 blocks of 4 tokens; a quarter of them may be pinned."""
    async with attached(behind.scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(worker.serve())
        pinned, other = range(10, 22), range(30, 42)
        await behind.generate(*pinned, 1)
        await behind.generate(*other, 1)
        pin = admin_pb2.PinPrefixRequest(name="p", tokens=TokenIds(ids=pinned), actor="ann")
        response = await behind.stub.PinPrefix(pin)
        assert (response.blocks, response.blocks_cached) == (3, 3)
        for first in (50, 60):
            await behind.generate(*[first] * 40, 1)
        assert await behind.generate(*other, 1) == 0
        assert await behind.generate(*pinned, 1) == 12
        pin.name = "q"
        with refused("FAILED_PRECONDITION", "tokens: pins have room for 1 blocks more, got 3"):
            await behind.stub.PinPrefix(pin)
        (listed,) = (await behind.stub.ListPins(admin_pb2.ListPinsRequest())).pins
        assert (listed.name, listed.blocks, listed.blocks_cached) == ("p", 3, 3)
        await behind.stub.UnpinPrefix(admin_pb2.UnpinPrefixRequest(name="p", actor="ann"))
        for first in (50, 60):
            await behind.generate(*[first] * 40, 1)
        assert await behind.generate(*pinned, 1) == 0
        serving.cancel()


async def test_a_pin_expires(behind: Behind) -> None:
    async with attached(behind.scheduler.target):
        request = admin_pb2.PinPrefixRequest(
            name="p", tokens=TokenIds(ids=range(4)), ttl_s=1, actor="ann"
        )
        await behind.stub.PinPrefix(request)
        async with asyncio.timeout(10):
            while (await behind.stub.ListPins(admin_pb2.ListPinsRequest())).pins:
                await asyncio.sleep(0.02)


async def test_a_refused_change_leaves_the_loop_alive(behind: Behind) -> None:
    with refused("INVALID_ARGUMENT", "change.partial_block_reuse: cannot change"):
        await behind.set(partial_block_reuse=True)
    request = admin_pb2.SetConfigRequest(
        change=Config_(ageing_ms=1), actor="ann", expected_version=9
    )
    with refused("ABORTED"):
        await behind.stub.SetConfig(request)
    assert (await behind.set(ageing_ms=1)).config.ageing_ms == 1
