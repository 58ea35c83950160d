"""Prompts on their way into the core, over the wire of a real scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from quire.v1 import generation_pb2, info_pb2, info_pb2_grpc, token_pb2
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running, running_scheduler


async def generate(
    scheduler: Running, prompt: list[int], max_tokens: int = 4, **scheduling: object
) -> tuple[list[int], int]:
    """The output, and how many prompt tokens were cached."""
    request = token_pb2.TokenRequest(
        prompt=generation_pb2.TokenIds(packed=np.array(prompt, "<u4").tobytes()),
        stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        scheduling=generation_pb2.SchedulingOptions(**scheduling),
    )
    output: list[int] = []
    message = token_pb2.TokenServiceGenerateRequest(request=request)
    async for response in scheduler.tokens.Generate(message):
        output += response.token_ids
    return output, response.finished.usage.cached_tokens


@contextlib.asynccontextmanager
async def serving(scheduler: Running) -> AsyncIterator[None]:
    async with attached(scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.serve())
        try:
            yield
        finally:
            task.cancel()


@pytest.mark.parametrize("hash_algo", ["sha256", "blake2b"])
async def test_turns_of_a_session_find_what_the_turns_before_left(
    tmp_path: Path, hash_algo: str
) -> None:
    async with (
        running_scheduler(tmp_path, prefix_caching_hash_algo=hash_algo) as scheduler,
        serving(scheduler),
    ):
        info = await info_pb2_grpc.InfoServiceStub(scheduler.channel).GetModelInfo(
            info_pb2.GetModelInfoRequest()
        )
        assert info.limits.prefix_hash == hash_algo
        turn, found = list(range(10, 19)), []
        for new in (20, 30, 40):
            output, cached = await generate(scheduler, turn, session_id="chat")
            found.append(cached)
            turn += [*output, new]
        assert found == [0, 12, 16]
        # The same words in another tenant's mouth, under the same session's name.
        assert (await generate(scheduler, turn, session_id="chat", tenant="other"))[1] == 0
        # An earlier message was edited: what stands before it is still found.
        edited = [*turn[:6], 99, *turn[7:]]
        assert (await generate(scheduler, edited, session_id="chat"))[1] == 4


async def test_prompts_that_wait_for_a_worker_are_hashed_for_the_kind_that_was_there(
    tmp_path: Path,
) -> None:
    async with running_scheduler(tmp_path) as scheduler:
        prompt = list(range(10, 19))
        async with serving(scheduler):
            await generate(scheduler, prompt)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(generate(scheduler, prompt)) for _ in range(2)]
            while (await scheduler.loads()).waiting < 2:
                await asyncio.sleep(0.01)
            async with attached(scheduler.target, block_size=8, model_digest="d2") as other:
                serve = tasks.create_task(other.serve())
                found = sorted([(await one)[1] for one in waiting])
                serve.cancel()
        # Of a block of 8 tokens, which is the other worker's.
        assert found == [0, 8]
