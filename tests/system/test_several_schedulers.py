"""Two schedulers with a worker each and one tokenizer in front of both."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncClient, SamplingParams
from quire.v1 import info_pb2, info_pb2_grpc, text_pb2, token_pb2, token_pb2_grpc
from tests.assets.checkpoints import make_successor_checkpoint
from tests.system.service_set import SERVING, TEXT_SERVICE, TOKEN_SERVICE, ServiceSet

pytestmark = pytest.mark.system

SCHEDULERS = ("scheduler-0", "scheduler-1")
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, seed=1)


class SchedulerPair(ServiceSet):
    """Worker n dials scheduler n; the tokenizer dials both."""

    def command(self, name: str) -> tuple[str, ...]:
        kind, _, number = name.partition("-")
        targets = ",".join(self.address(one) for one in SCHEDULERS)
        if kind == "worker":
            targets = self.address(f"scheduler-{number}")
        return tuple(
            f"--scheduler={targets}" if part.startswith("--scheduler=") else part
            for part in super().command(name)
        )

    async def loads_of(self, name: str) -> info_pb2.GetLoadsResponse:
        async with self.channel(name) as channel:
            stub = info_pb2_grpc.InfoServiceStub(channel)
            return await stub.GetLoads(info_pb2.GetLoadsRequest(), timeout=10)

    async def accepted(self) -> list[int]:
        """Requests that each scheduler has taken so far."""
        return [(await self.loads_of(name)).accepted for name in SCHEDULERS]

    async def took_more_than(self, before: list[int]) -> bool:
        return await self.accepted() != before

    async def asks_and_took_more(self, name: str) -> bool:
        """Whether a scheduler gets at least one of two requests that come together."""
        before = (await self.loads_of(name)).accepted
        async with asyncio.TaskGroup() as tasks:
            for text in "ab":
                tasks.create_task(self.ask(text))
        return (await self.loads_of(name)).accepted > before

    async def until_all_are_at_work(self) -> None:
        for name in SCHEDULERS:
            await self.until(lambda name=name: self.health(name, TOKEN_SERVICE), SERVING)
        await self.until(lambda: self.health("tokenizer", TEXT_SERVICE), SERVING)
        for name in SCHEDULERS:
            await self.until(lambda name=name: self.asks_and_took_more(name))

    async def ask(self, text: str, *, session: str = "", max_tokens: int = 4) -> text_pb2.Finished:
        """One answer's end."""
        request = text_pb2.GenerateRequest(text=text)
        request.sampling.temperature = 0
        request.stopping.max_tokens = max_tokens
        request.stopping.ignore_eos = True
        request.scheduling.session_id = session
        async for response in self.text.Generate(request):
            if response.HasField("finished"):
                return response.finished
        raise AssertionError("no end came")


@contextlib.asynccontextmanager
async def running(model: Path) -> AsyncIterator[SchedulerPair]:
    flags = {
        "scheduler": ("--check-block-tables=true",),
        "worker": ("--kv-cache-memory=64MiB",),
    }
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        pair = SchedulerPair(Path(folder), model, flags)
        try:
            await pair.start(*SCHEDULERS, "worker-0", "worker-1", "tokenizer")
            await pair.until_all_are_at_work()
            yield pair
        finally:
            await pair.end()


async def read(client: AsyncClient, prompt: str, begun: asyncio.Event) -> list[int]:
    ids: list[int] = []
    async for delta in client.generate(prompt, LONG):
        ids += delta.token_ids
        if len(ids) >= 20:
            begun.set()
    return ids


async def read_all(
    client: AsyncClient, prompts: list[str], begun: list[asyncio.Event]
) -> list[list[int]]:
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(read(client, prompt, one))
            for prompt, one in zip(prompts, begun, strict=True)
        ]
    return [answer.result() for answer in answers]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[SchedulerPair]:
    async with running(make_successor_checkpoint(tmp_path / "tiny")) as made:
        yield made


async def test_both_get_work_and_a_session_stays_where_it_is(pair: SchedulerPair) -> None:
    start = await pair.accepted()
    async with asyncio.TaskGroup() as tasks:
        for number in range(16):
            tasks.create_task(pair.ask(chr(65 + number), max_tokens=50))
    before = await pair.accepted()
    shares = [now - then for now, then in zip(before, start, strict=True)]
    assert sum(shares) == 16
    assert min(shares) >= 4

    # Its first turn finds one scheduler busy; the other turns would go to that one by order.
    async with asyncio.TaskGroup() as tasks:
        long = tasks.create_task(pair.ask("x", max_tokens=1500))
        await pair.until(lambda: pair.took_more_than(before))
        (busy,) = grown(before, await pair.accepted())
        await pair.ask("turn", session="chat")
        assert not long.done()
    (other,) = {0, 1} - {busy}
    for _ in range(5):
        await pair.ask("turn", session="chat")
    after = await pair.accepted()
    assert (after[busy] - before[busy], after[other] - before[other]) == (1, 6)


async def test_prompts_go_where_their_beginning_is_cached(pair: SchedulerPair) -> None:
    beginnings = [f"{number}: a long beginning that prompts share. " * 4 for number in range(40)]
    tokenized = await pair.text.Tokenize(text_pb2.TokenizeRequest(texts=beginnings))
    start = await pair.accepted()
    # The second one is never first by order.
    async with pair.channel("scheduler-1") as channel:
        stub: Any = token_pb2_grpc.TokenServiceStub(channel)
        for number, ids in enumerate(tokenized.results):
            request = token_pb2.TokenRequest(request_id=f"seed-{number}", prompt=ids)
            request.stopping.max_tokens = 1
            async for _ in stub.Generate(token_pb2.TokenServiceGenerateRequest(request=request)):
                pass
    assert await pair.accepted() == [start[0], start[1] + 40]
    # Until the tokenizer is told, the first one gets them. The newest go first: who is told of one
    # of them is told of all before it.
    left = reversed(beginnings)
    while (await pair.ask(next(left) + "And?")).usage.cached_tokens < 100:
        await asyncio.sleep(0.1)
    told = await pair.accepted()
    ends = [await pair.ask(beginning + "And?") for beginning in left]
    assert ends
    assert all(end.usage.cached_tokens > 100 for end in ends)
    assert await pair.accepted() == [told[0], told[1] + len(ends)]


async def test_a_scheduler_killed_in_mid_stream_changes_no_answer(pair: SchedulerPair) -> None:
    prompts = [chr(97 + number) for number in range(8)]
    async with AsyncClient(pair.address("tokenizer")) as client:
        expected = await read_all(client, prompts, [asyncio.Event() for _ in prompts])
        assert [len(ids) for ids in expected] == [900] * 8
        begun = [asyncio.Event() for _ in prompts]
        async with asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(read_all(client, prompts, begun))
            for one in begun:
                await one.wait()
            lost = (await pair.loads_of("scheduler-0")).running
            accepted = (await pair.loads_of("scheduler-1")).accepted
            assert lost > 0
            assert not answers.done()
            await pair.programs["scheduler-0"].kill()
        assert answers.result() == expected
    assert (await pair.loads_of("scheduler-1")).accepted == accepted + lost
    assert await pair.health("tokenizer", TEXT_SERVICE) == SERVING

    # Back with its worker, it gets its share again.
    await pair.start("scheduler-0")
    await pair.until_all_are_at_work()


def grown(before: list[int], after: list[int]) -> list[int]:
    """Which of them took more meanwhile."""
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
