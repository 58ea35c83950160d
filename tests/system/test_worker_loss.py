"""A worker that is killed costs its requests a pause: none fails, and their tokens are the same."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.v1 import info_pb2
from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.system.raw_requests import successors, text_request
from tests.system.service_set import ServiceSet, serving

STREAMS = 32
PROMPT, ANSWER = 40, 120
NEAR_TIE = 1e-3
"""Where the two highest logits are this close, the order of additions may decide."""

# Blocks of 16 tokens: every stream fits on either worker at its longest, so nothing is preempted.
WORKER = ("--max-num-seqs=32", "--max-num-batched-tokens=128", "--max-model-len=1024")

Prompt = tuple[int, ...]

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@dataclass
class Crowd:
    """Streams that go on, each with one request after another, until they are told to stop.

    Every request must give its known answer.
    """

    services: ServiceSet
    answers: Mapping[Prompt, Sequence[int]]
    stopping: bool = False
    completed: int = 0
    _prompts: Iterator[Prompt] = field(init=False)

    def __post_init__(self) -> None:
        self._prompts = self._endless()

    def _endless(self) -> Iterator[Prompt]:
        while True:
            yield from self.answers

    async def stream(self) -> None:
        while not self.stopping:
            prompt = next(self._prompts)
            assert await ids_of(self.services, prompt) == self.answers[prompt]
            self.completed += 1


@contextlib.asynccontextmanager
async def crowd(
    services: ServiceSet, answers: Mapping[Prompt, Sequence[int]]
) -> AsyncIterator[Crowd]:
    """The streams run inside; after it they have ended well and nothing is left of them."""
    made = Crowd(services, answers)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(made.stream())
        yield made
        made.stopping = True
    await services.until(services.at_rest)


async def ids_of(services: ServiceSet, prompt: Prompt) -> list[int]:
    ids: list[int] = []
    async for response in services.text.Generate(text_request(prompt, ANSWER)):
        ids.extend(response.token_ids)
    assert response.HasField("finished")
    return ids


async def attached(services: ServiceSet) -> dict[str, info_pb2.WorkerLoad]:
    """Attached workers by name."""
    return {worker.worker_id: worker for worker in (await services.loads()).workers}


async def busy(services: ServiceSet, *names: str) -> bool:
    """Whether these workers, and no others, are attached, and each is in the midst of its share."""
    workers = await attached(services)
    return set(workers) == set(names) and all(
        worker.running >= STREAMS // 4 and worker.steps >= 20 for worker in workers.values()
    )


async def lose_a_worker_three_times(
    services: ServiceSet, answers: Mapping[Prompt, Sequence[int]]
) -> None:
    before = (await services.loads()).counters
    async with crowd(services, answers) as streams:
        for _ in range(3):
            await services.until(lambda: busy(services, "worker-0", "worker-1"))
            await services.programs["worker-0"].kill()
            await services.until(lambda: busy(services, "worker-1"))
            await services.start("worker-0")
        await services.until(lambda: busy(services, "worker-0", "worker-1"))
    assert streams.completed >= STREAMS
    counters = (await services.loads()).counters
    requeues = counters.requeues - before.requeues
    assert requeues >= 3 * STREAMS // 8
    assert counters.preemptions == before.preemptions
    again = counters.recomputed_tokens - before.recomputed_tokens
    sys.stdout.write(f"{streams.completed} answers, {requeues} requeues, {again} computed again\n")
    assert 0 < again <= requeues * (PROMPT + ANSWER)


@pytest.fixture(scope="module")
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    flags = {"worker": (*WORKER, "--kv-cache-memory=2MiB")}
    async with serving(successor_model, flags, workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def successor_answers() -> dict[Prompt, list[int]]:
    """Prompts that share no block, and what follows their last token."""
    prompts = [tuple((first + index) % 250 for index in range(PROMPT)) for first in range(250)]
    return {prompt: successors(prompt[-1], ANSWER, VOCAB_SIZE) for prompt in prompts}


async def test_known_tokens_whatever_is_killed(
    services: ServiceSet, successor_answers: dict[Prompt, list[int]]
) -> None:
    await lose_a_worker_three_times(services, successor_answers)


async def test_the_last_worker_is_killed_and_its_requests_wait_for_the_next(
    services: ServiceSet, successor_answers: dict[Prompt, list[int]]
) -> None:
    async with crowd(services, successor_answers) as streams:
        await services.until(lambda: busy(services, "worker-0", "worker-1"))
        await asyncio.gather(*(services.programs[f"worker-{n}"].kill() for n in (0, 1)))
        await services.until(lambda: all_wait(services))
        completed = streams.completed
        await services.start("worker-0")
        await services.until(lambda: busy(services, "worker-0"))
        await services.start("worker-1")
    assert streams.completed > completed


async def all_wait(services: ServiceSet) -> bool:
    loads = await services.loads()
    return bool((loads.running, loads.waiting, len(loads.workers)) == (0, STREAMS, 0))


async def test_the_scheduler_is_killed_in_mid_stream(
    services: ServiceSet, successor_answers: dict[Prompt, list[int]]
) -> None:
    await services.until_ready()
    async with crowd(services, successor_answers) as streams:
        await services.until(lambda: busy(services, "worker-0", "worker-1"))
        await services.programs["scheduler"].kill()
        completed = streams.completed
        await services.start("scheduler")
        await services.until_ready()
        await services.until(lambda: busy(services, "worker-0", "worker-1"))
    assert streams.completed > completed


async def test_the_tokens_of_an_undisturbed_run_whatever_is_killed(random_model: Path) -> None:
    flags = {"worker": (*WORKER, "--kv-cache-memory=6MiB")}
    async with serving(random_model, flags, workers=2) as services:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, 250, (48, PROMPT), generator=generator).tolist()
        prompts = [tuple(prompt) for prompt in drawn]
        outputs = await asyncio.gather(*(ids_of(services, prompt) for prompt in prompts))
        answers = {
            prompt: output
            for prompt, output in zip(prompts, outputs, strict=True)
            if least_gap(random_model, prompt, output) > NEAR_TIE
        }
        assert len(answers) >= STREAMS
        await lose_a_worker_three_times(services, answers)


def least_gap(model: Path, prompt: Prompt, output: Sequence[int]) -> float:
    """How close the second choice came to the first; the first must be `output` at every place."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    differs = logits.argmax(-1) != torch.tensor(output)
    assert not (differs & (gaps > NEAR_TIE)).any()
    return float(gaps.min())
