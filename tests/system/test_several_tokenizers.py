"""Two tokenizers of one set: an answer goes on at the other one when its own is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire import AsyncClient, SamplingParams
from quire.local import LocalConfig, LocalSet
from tests.assets.checkpoints import make_successor_checkpoint

pytestmark = pytest.mark.system

# Bytes in a circle: halves of characters, and the beginning of a stop string that never completes.
PARAMS = SamplingParams(
    temperature=0, max_tokens=900, ignore_eos=True, stop=["xyz{|}never"], seed=1
)
PROMPTS = [chr(number) for number in range(65, 73)]


async def read(client: AsyncClient, prompt: str, begun: asyncio.Event) -> tuple[str, list[int]]:
    text, ids = "", []
    async for delta in client.generate(prompt, PARAMS):
        text += delta.text
        ids += delta.token_ids
        if len(ids) >= 20:
            begun.set()
    return text, ids


async def read_all(client: AsyncClient, begun: list[asyncio.Event]) -> list[tuple[str, list[int]]]:
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(read(client, prompt, one))
            for prompt, one in zip(PROMPTS, begun, strict=True)
        ]
    return [answer.result() for answer in answers]


async def test_killing_a_tokenizer_changes_no_answer(tmp_path: Path) -> None:
    config = LocalConfig(
        model=make_successor_checkpoint(tmp_path / "tiny"),
        served_model_name="tiny",
        port=0,
        tokenizers=2,
        flags={"worker": ("--device=cpu", "--kv-cache-memory=64MiB")},
    )
    async with LocalSet(config) as local, AsyncClient(local.target) as client:
        assert local.target.count(",") == 1
        expected = await read_all(client, [asyncio.Event() for _ in PROMPTS])
        assert all(len(ids) == 900 for _, ids in expected)
        begun = [asyncio.Event() for _ in PROMPTS]
        async with asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(read_all(client, begun))
            for one in begun:
                await one.wait()
            assert not answers.done()
            os.kill(dict(local.processes())["tokenizer-0"], signal.SIGKILL)
        assert answers.result() == expected
