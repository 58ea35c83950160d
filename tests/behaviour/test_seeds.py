"""The same request gives the same ids: with room or without, alone or beside others."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from services.worker.engine import Engine
from tests.assets.checkpoints import make_random_checkpoint
from tests.behaviour.doors import ALL_WAYS, NOT_CHAT_WAYS, Ask, Way, send
from tests.behaviour.reference import Greedy, greedy
from tests.behaviour.sets import model_stack
from tests.behaviour.stack import Stack, load_small_engine

NEAR_TIE = 1e-3
"""Where the two highest logits are this close, the shape of a batch may decide between them."""

OUTPUT = 12
STARVED = {"max_num_seqs": 4, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, which look at everything before a token."""
    folder = tmp_path_factory.mktemp("m") / "random"
    return make_random_checkpoint(folder, changes={"max_position_embeddings": 64})


@pytest.fixture(scope="module")
def references(folder: Path) -> list[Greedy]:
    """Prompts with clear answers; some begin alike, over a block or more."""
    source = random.Random(3)
    # Whole characters of one byte each: the text of an answer goes on from its prompt.
    stem = [source.randrange(128) for _ in range(14)]
    prompts = [stem[:size] + [source.randrange(128) for _ in range(3)] for size in range(0, 14, 3)]
    prompts += [[source.randrange(128) for _ in range(size)] for size in (1, 4, 8, 21)]
    found = [one for one in greedy(folder, prompts, OUTPUT) if one.gap > NEAR_TIE]
    assert len(found) >= 6
    return found


@pytest.fixture(scope="module")
def roomy_engine(folder: Path) -> Engine:
    """Room for everything at once."""
    return load_small_engine(folder, num_blocks=256)


@pytest.fixture(scope="module")
def starved_engine(folder: Path) -> Engine:
    """Sixteen blocks of four tokens, four seats, eight tokens a step."""
    return load_small_engine(folder, num_blocks=16, **STARVED)


def canary(references: Sequence[Greedy]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return references[0].prompt, references[0].output


@pytest.fixture(scope="module")
async def roomy(
    folder: Path,
    roomy_engine: Engine,
    references: list[Greedy],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stack]:
    """A set that preempts nobody, chunks nothing and looks nothing up."""
    sockets, sings = tmp_path_factory.mktemp("s"), canary(references)
    options = {"enable_prefix_caching": False}
    async with model_stack(sockets, folder, roomy_engine, sings, **options) as stack:
        yield stack


@pytest.fixture(scope="module")
async def starved_model(
    folder: Path,
    starved_engine: Engine,
    references: list[Greedy],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stack]:
    """A set that chunks, preempts and shares prefixes all the time."""
    sockets = tmp_path_factory.mktemp("s")
    async with model_stack(sockets, folder, starved_engine, canary(references)) as stack:
        yield stack


@pytest.mark.parametrize("way", NOT_CHAT_WAYS, ids=lambda way: way.value)
async def test_ids_equal_the_reference_alone_and_beside_others(
    roomy: Stack, references: list[Greedy], way: Way
) -> None:
    for batch in (references[:1], references[1:2], references[:3], references):
        await check(roomy, batch, way)
    counters = (await roomy.loads()).counters
    assert (counters.preemptions, counters.prefix_hit_tokens) == (0, 0)


@pytest.mark.parametrize("way", NOT_CHAT_WAYS, ids=lambda way: way.value)
async def test_ids_equal_the_reference_in_chunks_after_hits_and_preemptions(
    starved_model: Stack, references: list[Greedy], way: Way
) -> None:
    before = (await starved_model.loads()).counters
    await check(starved_model, references, way)
    await check(starved_model, list(reversed(references)), way)
    after = (await starved_model.loads()).counters
    assert after.preemptions > before.preemptions
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    assert after.chunked_prefills > before.chunked_prefills
    assert after.mixed_steps > before.mixed_steps


async def check(stack: Stack, references: Sequence[Greedy], way: Way) -> None:
    """All of them at once give what the reference gives."""
    asks = [Ask(prompt=one.prompt, max_tokens=OUTPUT, ignore_eos=True) for one in references]
    answers = await asyncio.gather(*(send(stack, way, ask) for ask in asks))
    for one, answer in zip(references, answers, strict=True):
        assert answer.token_ids == one.output


@pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)
async def test_b028_preemption_does_not_change_the_draws(
    roomy: Stack, starved_model: Stack, way: Way
) -> None:
    # A chat prompt has its template on top.
    size = 3 if way.is_chat else 12
    asks = [
        Ask(
            prompt="".join(chr(97 + (number + place) % 26) for place in range(size)),
            max_tokens=16,
            temperature=1.0,
            seed=7,
            ignore_eos=True,
        )
        for number in range(6)
    ]
    preempted = (await starved_model.loads()).counters.preemptions
    with_room = await asyncio.gather(*(send(roomy, way, ask) for ask in asks))
    without = await asyncio.gather(*(send(starved_model, way, ask) for ask in asks))
    assert (await starved_model.loads()).counters.preemptions > preempted
    assert (await roomy.loads()).counters.preemptions == 0
    assert [answer.outcome for answer in without] == [answer.outcome for answer in with_room]
    # The draws do differ between prompts, and are not the greedy ids.
    assert len({answer.token_ids for answer in with_room}) == len(asks)
    greedy_answer = await send(
        roomy, way, Ask(prompt=asks[0].prompt, max_tokens=16, ignore_eos=True)
    )
    assert greedy_answer.token_ids != with_room[0].token_ids
    assert {answer.seed for answer in with_room} == {7}
