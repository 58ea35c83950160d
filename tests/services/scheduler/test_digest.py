"""What is cached as a Bloom filter, and when it is made."""

import asyncio
import hashlib
from dataclasses import replace

import numpy as np
import pytest
from rbloom import Bloom

from quire.v1 import generation_pb2, token_pb2
from services.scheduler import codec, digest
from services.scheduler.core.plan import Counters, Loads, WorkerLoad
from services.scheduler.digest import LoadReport, LoadReports, prefix_digest, unless_known
from services.scheduler.hashing import SHA256, domain_root, tenant_salt
from services.scheduler.outbox import Outbox
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running


def hashes(count: int, start: int = 0) -> bytes:
    """So many digests, back to back."""
    numbers = range(start, start + count)
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


def each(data: bytes) -> list[bytes]:
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def as_contract_says(block: bytes) -> int:
    """The hash function of an item, as token.proto has it."""
    return int.from_bytes(block[:16], "little", signed=True)


def read(bloom: bytes) -> Bloom:
    return Bloom.load_bytes(bloom, as_contract_says)


async def test_it_holds_all_it_was_given_and_few_others() -> None:
    given = hashes(5000)
    made = await prefix_digest(given)
    assert made.items == 5000
    assert len(made.bloom) < 5000 * 1.25
    bloom = read(made.bloom)
    assert all(block in bloom for block in each(given))
    wrong = sum(block in bloom for block in each(hashes(20_000, start=1_000_000)))
    assert 0 < wrong < 20_000 * 0.015


async def test_it_is_the_same_whoever_makes_it() -> None:
    bloom = (await prefix_digest(hashes(3))).bloom
    own = Bloom(3, 0.01, as_contract_says)
    own.update(each(hashes(3)))
    assert bloom == own.save_bytes()
    assert bloom.hex() == "0600000000000000" + "2d578110"


async def test_nothing_is_cached() -> None:
    made = await prefix_digest(b"")
    assert made.items == 0
    assert not any(block in read(made.bloom) for block in each(hashes(100)))


@pytest.mark.parametrize(("count", "wrong"), [(4000, 0.15), (20_000, 0.95)])
async def test_its_size_is_bounded_and_then_it_errs_more_often(
    monkeypatch: pytest.MonkeyPatch, count: int, wrong: float
) -> None:
    monkeypatch.setattr(digest, "MAX_BITS", 8 * 2048)
    given = hashes(count)
    made = await prefix_digest(given)
    assert len(made.bloom) <= 2048 + 9
    bloom = read(made.bloom)
    assert all(block in bloom for block in each(given))
    others = sum(block in bloom for block in each(hashes(2000, start=1_000_000)))
    assert others < 2000 * wrong


async def test_others_run_while_it_is_made() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count_turns())
        await prefix_digest(hashes(10 * 1024))
        counting.cancel()
    assert turns >= 9


class Source:
    """A scheduler with one worker, as the reports see it."""

    def __init__(self) -> None:
        self.hashes = hashes(10)
        self.steps = 0
        self.evicted = 0
        self.running = 1
        self.asked = 0

    def step(self) -> None:
        self.steps += 1

    def loads(self) -> Loads:
        worker = WorkerLoad(
            worker_id="w",
            epoch=1,
            running=self.running,
            blocks_total=100,
            blocks_free=90,
            blocks_evictable=10,
            blocks_pinned=0,
            steps=self.steps,
            steps_in_flight=0,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            computed_tokens=0,
            execute_us=0,
        )
        return Loads(
            running=self.running,
            waiting=2,
            waiting_tokens=77,
            accepted=3,
            ended=0,
            workers=(worker,),
            classes=(),
            tenants=(),
            counters=Counters(steps=self.steps, evicted_blocks=self.evicted),
        )

    def cached_hashes(self) -> bytes:
        self.asked += 1
        return self.hashes


async def later(reports: LoadReports) -> LoadReport:
    """The next report."""
    await reports.pause()
    return await reports.newest()


async def test_hashes_are_asked_for_only_after_a_step_and_a_report_is_new_only_if_it_differs() -> (
    None
):
    source = Source()
    reports = LoadReports(source, interval_s=0.0)
    first = await reports.newest()
    assert (first.running, first.waiting, first.waiting_tokens) == (1, 2, 77)
    assert first.prefixes == await prefix_digest(source.hashes)
    assert await later(reports) is first
    assert source.asked == 1
    source.step()
    assert await later(reports) is first, "a step that cached nothing"
    assert source.asked == 2
    source.running = 5
    busier = await later(reports)
    assert busier.running == 5
    assert busier.prefixes is first.prefixes
    source.step()
    source.hashes = hashes(11)
    fuller = await later(reports)
    assert fuller.prefixes is not None
    assert fuller.prefixes.items == 11
    source.evicted = 11
    source.hashes = b""
    emptied = await later(reports)
    assert emptied.prefixes is not None, "blocks may be given up without a step"
    assert emptied.prefixes.items == 0


async def test_one_is_made_for_all_and_again_only_after_the_interval() -> None:
    source = Source()
    reports = LoadReports(source, interval_s=3600.0)
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(reports.newest()) for _ in range(5)]
    source.step()
    source.running = 9
    assert {id(task.result()) for task in asking} == {id(await reports.newest())}
    assert source.asked == 1


async def test_a_receiver_is_told_prefixes_once() -> None:
    source = Source()
    reports = LoadReports(source, interval_s=0.0)
    first = await reports.newest()
    assert unless_known(first, None) is first
    source.running = 2
    second = await later(reports)
    told = unless_known(second, first)
    assert (told.running, told.prefixes) == (2, None)
    message = codec.load_response(told).load
    assert (message.running, message.waiting_tokens) == (2, 77)
    assert not message.HasField("prefixes")
    assert codec.load_response(first).load.prefixes.items == 10


async def test_only_the_newest_report_waits_with_the_newest_prefixes() -> None:
    source = Source()
    first = await LoadReports(source).newest()
    outbox = Outbox()
    outbox.put_load(first)
    outbox.put_load(replace(first, running=8, prefixes=None))
    delivery = await outbox.take()
    assert delivery.load == replace(first, running=8)
    outbox.put_load(LoadReport(running=9, waiting=0, waiting_tokens=0, prefixes=None))
    delivery = await outbox.take()
    assert delivery.load is not None
    assert delivery.load.prefixes is None
    outbox.put_credit()
    assert (await outbox.take()).load is None


async def test_a_session_that_asks_is_told_what_is_cached(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(worker.serve())
        call = scheduler.tokens.Session()
        hello = token_pb2.Hello(instance_id="t", protocol_major=1, wants_load=True)
        await call.write(token_pb2.SessionRequest(hello=hello))
        limits = (await call.read()).welcome.limits
        assert (await next_load(call)).prefixes.items == 0
        prompt = list(range(1, 2 * limits.block_size + 2))
        request = token_pb2.TokenRequest(
            request_id="r",
            prompt=generation_pb2.TokenIds(ids=prompt),
            stopping=generation_pb2.StoppingCriteria(max_tokens=1),
        )
        submit = token_pb2.Submit(stream_id=1, request=request)
        await call.write(token_pb2.SessionRequest(submit=submit))
        while (prefixes := (await next_load(call)).prefixes).items < 2:
            pass
        root = domain_root(limits.model_digest.encode(), tenant_salt(""))
        tokens = np.array(prompt, "<u4").tobytes()
        width = 4 * limits.block_size
        first = SHA256.block(root, tokens[:width])
        second = SHA256.block(first, tokens[width : 2 * width])
        bloom = read(prefixes.bloom)
        assert first in bloom
        assert second in bloom
        call.cancel()
        serving.cancel()


async def next_load(call) -> token_pb2.LoadReport:
    async with asyncio.timeout(20):
        while not (message := await call.read()).HasField("load"):
            pass
    return message.load
