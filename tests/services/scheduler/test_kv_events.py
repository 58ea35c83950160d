"""What is cached, as the gateway is told: a snapshot, then every change, and nothing unasked."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from quire.v1 import generation_pb2
from services.chassis.errors import Internal, Overloaded
from services.scheduler import kv_events
from services.scheduler.hashing import SHA256, explicit_salt, tenant_salt
from services.scheduler.kv_events import BlocksStored, CacheCleared, KvEvents
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running, running_scheduler
from tests.services.scheduler.token_session import opened, served

PROMPT = tuple(range(10, 23))
"""Three blocks of 4 and a token; with the answer 7, 7, 7, 7 four blocks."""


def engine(scheduler: Running) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(scheduler.channel)


async def generate(scheduler: Running, prompt: tuple[int, ...] = PROMPT, **metadata: str) -> None:
    sampling = vllm_engine_pb2.SamplingParams(max_tokens=4, ignore_eos=True)
    request = vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt), sampling_params=sampling
    )
    said = [(f"x-quire-{key.replace('_', '-')}", value) for key, value in metadata.items()]
    async for _ in engine(scheduler).Generate(request, metadata=said):
        pass


def hashes(tokens: tuple[int, ...], salt: bytes = tenant_salt("")) -> list[int]:
    """What the blocks of these tokens are called, by the formula of token.proto."""
    parent, found = SHA256.root(b"d1", salt), []
    for start in range(0, len(tokens) // 4 * 4, 4):
        parent = SHA256.block(parent, np.array(tokens[start : start + 4], "<u4").tobytes())
        found.append(struct.unpack("<q", parent[:8])[0])
    return found


class Mirror:
    """What a gateway knows: hash -> (parent, tokens, namespace)."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        self.number = 0
        self.batches: list[common_pb2.KvEventBatch] = []

    async def take(self) -> common_pb2.KvEventBatch:
        batch = await self._call.read()
        self.batches.append(batch)
        if self.number:
            assert batch.sequence_number == self.number + 1
        self.number = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.blocks.clear()
            elif kind == "removed":
                for digest in event.removed.block_hashes:
                    del self.blocks[digest]
            else:
                stored = event.stored
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                for block in stored.blocks:
                    assert parent is None or parent in self.blocks, "a child before its parent"
                    assert block.block_hash not in self.blocks, "told twice"
                    assert block.block_size == len(block.token_ids) == 4
                    told = (parent, tuple(block.token_ids), stored.cache_salt)
                    self.blocks[block.block_hash] = told
                    parent = block.block_hash
        return batch

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await self.take()


@contextlib.asynccontextmanager
async def subscribed(scheduler: Running, start: int = 0) -> AsyncIterator[Mirror]:
    call = engine(scheduler).SubscribeKvEvents(
        common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    )
    try:
        yield Mirror(call)
    finally:
        call.cancel()


def chain(tokens: tuple[int, ...], salt: bytes = tenant_salt(""), namespace: str = "") -> dict:
    names = hashes(tokens, salt)
    return {
        name: (names[at - 1] if at else None, tokens[4 * at : 4 * at + 4], namespace)
        for at, name in enumerate(names)
    }


async def test_a_snapshot_comes_first_then_what_is_stored(scheduler: Running) -> None:
    async with subscribed(scheduler) as mirror:
        first = await mirror.take()
        assert first.HasField("snapshot")
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
        assert first.snapshot.unknown_before == 0
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        async with served(scheduler):
            await generate(scheduler)
            expected = chain((*PROMPT, 7, 7, 7, 7))
            await mirror.until(lambda: mirror.blocks == expected)
            # What is found again is not told again.
            await generate(scheduler)
            await generate(scheduler, (*PROMPT[:8], 1, 2, 3, 4, 5))
            expected |= chain((*PROMPT[:8], 1, 2, 3, 4, 5, 7, 7, 7, 7))
            await mirror.until(lambda: mirror.blocks == expected)
        assert first.timestamp > 1.7e9
        assert {batch.dp_rank for batch in mirror.batches} == {0}


async def test_who_comes_later_gets_what_is_there_and_the_rest(scheduler: Running) -> None:
    async with served(scheduler), subscribed(scheduler) as early:
        await early.take()
        await generate(scheduler)
        async with subscribed(scheduler) as late:
            snapshot = await late.take()
            assert snapshot.snapshot.unknown_before == 0
            assert late.blocks == chain((*PROMPT, 7, 7, 7, 7))
            await generate(scheduler, (50, 51, 52, 53, 54))
            both = chain((*PROMPT, 7, 7, 7, 7)) | chain((50, 51, 52, 53, 54, 7, 7, 7, 7))
            for mirror in (early, late):
                await mirror.until(lambda mirror=mirror: mirror.blocks == both)
            assert early.number == late.number


async def test_tenants_and_salts_are_namespaces_of_their_own(scheduler: Running) -> None:
    async with served(scheduler), subscribed(scheduler) as mirror:
        await mirror.take()
        await generate(scheduler, tenant="acme")
        await generate(scheduler, cache_salt="pepper")
        tokens = (*PROMPT, 7, 7, 7, 7)
        expected = chain(tokens, tenant_salt("acme"), "tenant:acme")
        expected |= chain(tokens, explicit_salt("pepper"), "pepper")
        await mirror.until(lambda: mirror.blocks == expected)


async def test_what_is_given_up_is_told(scheduler: Running) -> None:
    """The pool has 16 blocks; four prompts of other tokens drive the first ones out."""
    async with served(scheduler), subscribed(scheduler) as mirror:
        await mirror.take()
        for start in range(6):
            await generate(scheduler, tuple(range(10 + 13 * start, 23 + 13 * start)))
        last = chain((*range(75, 88), 7, 7, 7, 7))
        await mirror.until(lambda: last.keys() <= mirror.blocks.keys())
        kinds = {event.WhichOneof("data") for batch in mirror.batches for event in batch.events}
        assert "removed" in kinds
        assert scheduler.loop.cached_hashes()
        assert len(mirror.blocks) == len(scheduler.loop.cached_hashes()) // 32
        await engine(scheduler).FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
        await mirror.until(lambda: not mirror.blocks)
        assert mirror.batches[-1].events[0].WhichOneof("data") == "cleared"


async def test_a_block_is_there_as_long_as_one_worker_has_it(scheduler: Running) -> None:
    async with subscribed(scheduler) as mirror:
        await mirror.take()
        async with served(scheduler, worker_id="a", instance_id="a"):
            await generate(scheduler)
            kept = scheduler.loop.cached_hashes()
            async with attached(scheduler.target, worker_id="b", instance_id="b") as other:
                # A busy worker's prefixes are computed elsewhere too: here both are given one each.
                async with opened(scheduler) as session, asyncio.TaskGroup() as tasks:
                    serving = tasks.create_task(other.serve())
                    for stream in range(1, 9):
                        await session.submit(stream, list(PROMPT), max_tokens=4)
                    for stream in range(1, 9):
                        await session.end_of(stream)
                    serving.cancel()
                twice = len(scheduler.loop.cached_hashes()) > len(kept)
            # One of them is gone. What comes after that is told after that.
            async with asyncio.timeout(5):
                while scheduler.loop.limits and scheduler.loop.limits.num_workers > 1:
                    await asyncio.sleep(0.01)
            await generate(scheduler, (50, 51, 52, 53, 54))
            await mirror.until(lambda: len(mirror.blocks) == 6)
            assert chain((*PROMPT, 7, 7, 7, 7)).keys() <= mirror.blocks.keys()
        await mirror.until(lambda: not mirror.blocks)
        assert mirror.batches[-1].events[0].WhichOneof("data") == "cleared"
        assert twice, "both workers had it"


async def test_what_nobody_can_reach_is_not_told(scheduler: Running) -> None:
    """A request that may not use the cache goes on behind blocks that are given up meanwhile."""
    async with (
        attached(scheduler.target) as worker,
        opened(scheduler) as session,
        subscribed(scheduler) as mirror,
        asyncio.TaskGroup() as tasks,
    ):
        await mirror.take()
        serving = tasks.create_task(worker.serve())
        await generate(scheduler)
        await mirror.until(lambda: len(mirror.blocks) == 4)
        serving.cancel()
        apart = generation_pb2.SchedulingOptions(skip_reading_prefix_cache=True)
        await session.submit(1, list(PROMPT), max_tokens=9, scheduling=apart)
        for _ in range(4):
            await worker.answer(await worker.step())
        await engine(scheduler).FlushCache(common_pb2.FlushCacheRequest())
        await mirror.until(lambda: not mirror.blocks)
        serving = tasks.create_task(worker.serve())
        await session.end_of(1)
        assert scheduler.loop.cached_hashes()
        await generate(scheduler, (50, 51, 52, 53, 54))
        await mirror.until(lambda: mirror.blocks == chain((50, 51, 52, 53, 54, 7, 7, 7, 7)))
        serving.cancel()


async def test_who_comes_back_is_told_what_it_missed(scheduler: Running) -> None:
    async with served(scheduler):
        async with subscribed(scheduler) as mirror:
            await mirror.take()
            await generate(scheduler)
            await mirror.until(lambda: len(mirror.blocks) == 4)
        await generate(scheduler, (50, 51, 52, 53, 54))
        async with subscribed(scheduler, mirror.number) as again:
            again.blocks, again.number = mirror.blocks, mirror.number - 1
            again.blocks.clear()
            again.blocks.update(chain((*PROMPT, 7, 7, 7, 7)))
            last = mirror.batches[-1]
            repeated = await again._call.read()
            assert repeated.sequence_number == last.sequence_number
            again.number = repeated.sequence_number
            await again.until(lambda: len(again.blocks) == 6)
            assert not any(batch.HasField("snapshot") for batch in again.batches)
        async with subscribed(scheduler, 17) as lost:
            assert (await lost.take()).HasField("snapshot")
            assert len(lost.blocks) == 6


async def test_what_was_cached_before_anybody_asked_is_told_when_it_is_used(
    scheduler: Running,
) -> None:
    async with served(scheduler):
        await generate(scheduler)
        async with subscribed(scheduler) as mirror:
            first = await mirror.take()
            assert first.snapshot.unknown_before == 1
            assert not mirror.blocks
            longer = (*PROMPT, 7, 7, 7, 8, 8, 8)
            await generate(scheduler, longer)
            expected = chain((*longer, 7, 7, 7, 7))
            await mirror.until(lambda: mirror.blocks == expected)


async def test_who_runs_when_somebody_asks_is_told(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, list(PROMPT), max_tokens=30)
        for _ in range(3):
            await worker.answer(await worker.step())
        async with subscribed(scheduler) as mirror:
            await mirror.take()
            assert set(hashes(PROMPT)[:2]) <= mirror.blocks.keys()


async def test_nothing_is_noted_while_nobody_asks(scheduler: Running) -> None:
    events = KvEvents(scheduler.loop, linger_s=0.05)
    assert not events.is_watching
    assert scheduler.loop.after_turn is None
    async with contextlib.aclosing(events.subscribe(0)) as batches:
        first = await anext(batches)
        assert events.is_watching
        assert scheduler.loop.after_turn is not None
    assert events.is_watching, "it may come back"
    async with asyncio.timeout(5):
        while events.is_watching:
            await asyncio.sleep(0.01)
    assert scheduler.loop.after_turn is None
    async with contextlib.aclosing(events.subscribe(first.number)) as batches:
        again = await anext(batches)
        assert again.snapshot is not None, "what happened meanwhile is not known"
        assert again.number > first.number


async def test_a_subscriber_that_does_not_read_is_given_up(
    scheduler: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_WAITING", 3)
    events = KvEvents(scheduler.loop, linger_s=0.0)
    async with (
        served(scheduler),
        contextlib.aclosing(events.subscribe(0)) as slow,
        contextlib.aclosing(events.subscribe(0)) as quick,
        asyncio.TaskGroup() as tasks,
    ):
        await anext(slow)

        async def read() -> None:
            async for _ in quick:
                pass

        reading = tasks.create_task(read())
        for start in range(4):
            await generate(scheduler, tuple(range(10 + 13 * start, 23 + 13 * start)))
        with pytest.raises(Overloaded, match="reads too slowly"):
            await anext(slow)
        assert not reading.done()
        reading.cancel()


async def test_a_fault_ends_the_events_and_no_request(
    scheduler: Running, caplog: pytest.LogCaptureFixture
) -> None:
    events = KvEvents(scheduler.loop, linger_s=0.0)
    async with served(scheduler), contextlib.aclosing(events.subscribe(0)) as batches:
        await anext(batches)
        assert events._log is not None
        events._log.notes.append(None)  # type: ignore[arg-type]  # no note at all
        await generate(scheduler)
        with pytest.raises(Internal):
            await anext(batches)
        assert not events.is_watching
        assert "what is cached cannot be told" in caplog.text
        await generate(scheduler)
        await scheduler.quiesced()


async def test_a_large_snapshot_comes_in_batches_parents_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "BATCH_BLOCKS", 5)
    async with (
        running_scheduler(tmp_path) as scheduler,
        served(scheduler, num_blocks=200, max_model_len=200, max_num_batched_tokens=64),
    ):
        events = KvEvents(scheduler.loop, linger_s=0.0)
        async with contextlib.aclosing(events.subscribe(0)) as early:
            await anext(early)
            await generate(scheduler, tuple(range(10, 23)))
            await generate(scheduler, tuple(range(10, 80)))
            await generate(scheduler, (*range(10, 40), *range(80, 98)))
            async with contextlib.aclosing(events.subscribe(0)) as late:
                told: dict[bytes, bytes] = {}
                batches = [await anext(late)]
                assert batches[0].snapshot is not None
                while len(batches) < batches[0].snapshot.count:
                    batches.append(await anext(late))
                assert len(batches) > 3
                numbers = [batch.number for batch in batches]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                assert batches[0].events[0] == CacheCleared()
                for batch in batches:
                    stored = [one for one in batch.events if isinstance(one, BlocksStored)]
                    assert sum(one.blocks for one in stored) <= 5
                    for one in stored:
                        parent = one.parent
                        for at in range(one.blocks):
                            assert not parent or parent in told
                            parent = one.digests[32 * at : 32 * at + 32]
                            told[parent] = parent
                assert b"".join(sorted(told)) == b"".join(
                    sorted(
                        scheduler.loop.cached_hashes()[at : at + 32]
                        for at in range(0, len(scheduler.loop.cached_hashes()), 32)
                    )
                )
                await generate(scheduler, (1, 2, 3, 4, 5))
                assert (await anext(late)).number == numbers[-1] + 1


async def test_a_subscription_answers_at_once_when_there_is_nothing_new(
    scheduler: Running,
) -> None:
    async with subscribed(scheduler) as mirror:
        await mirror.take()
        async with subscribed(scheduler, mirror.number + 1) as again:
            async with asyncio.timeout(5):
                await again._call.initial_metadata()
