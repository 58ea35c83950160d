"""Requests that can never fit, and what they must not do to the others."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.behaviour.doors import ALL_WAYS, Ask, Refused, Way, send
from tests.behaviour.sets import FILLER, scripted_stack
from tests.behaviour.stack import STARVED_LIMITS, Stack

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)

POOL = STARVED_LIMITS.num_blocks * STARVED_LIMITS.block_size


@pytest.fixture(scope="module")
async def narrow(
    byte_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A set with a context of 256 tokens and a pool of 64."""
    limits = replace(STARVED_LIMITS, max_model_len=256)
    async with scripted_stack(tmp_path_factory.mktemp("s"), byte_folder, limits) as stack:
        yield stack


def prompt_of(stack: Stack, way: Way, size: int, letter: str = "x") -> str:
    """A text that is so many tokens at this door."""
    return letter * (size - (len(stack.chat_ids("")) if way.is_chat else 0))


@all_ways
async def test_b026_a_prompt_larger_than_the_pool_is_refused(narrow: Stack, way: Way) -> None:
    short = Ask(prompt=prompt_of(narrow, way, 24), max_tokens=3)
    results = await asyncio.gather(
        send(narrow, way, Ask(prompt=prompt_of(narrow, way, 100), max_tokens=3)),
        send(narrow, way, short),
        send(narrow, way, short),
        return_exceptions=True,
    )
    refused, *answers = results
    assert isinstance(refused, Refused)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.parts) == ("EXCEEDS_KV_CAPACITY", 0)
    assert refused.numbers == {"limit": POOL, "got": 100}
    assert refused.field in ("prompt", "text", "messages", "request.prompt")
    assert str(POOL) in refused.message
    for answer in answers:
        assert not isinstance(answer, BaseException)
        assert answer.token_ids == (FILLER,) * 3


@all_ways
async def test_b026_what_fits_at_first_and_cannot_end_is_refused(narrow: Stack, way: Way) -> None:
    prompt = prompt_of(narrow, way, 60)
    with pytest.raises(Refused) as caught:
        await send(narrow, way, Ask(prompt=prompt, max_tokens=50))
    refused = caught.value
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.parts) == ("EXCEEDS_KV_CAPACITY", 0)
    # The last token is sampled and never computed: it needs no place.
    limit = POOL + 1 - 60
    assert refused.numbers == {"limit": limit, "got": 50}
    assert refused.field.endswith("stopping.max_tokens")
    answer = await send(narrow, way, Ask(prompt=prompt, max_tokens=limit))
    assert (len(answer.token_ids), answer.reason) == (limit, "length")


@all_ways
async def test_b026_without_max_tokens_the_pool_is_the_limit(narrow: Stack, way: Way) -> None:
    answer = await send(narrow, way, Ask(prompt=prompt_of(narrow, way, 40, "y")))
    assert (len(answer.token_ids), answer.reason) == (POOL + 1 - 40, "length")


@all_ways
async def test_b026_many_that_fit_only_one_at_a_time_all_end(narrow: Stack, way: Way) -> None:
    """Each takes the whole pool in the end, so they push each other out; none may be lost."""
    asks = [
        Ask(prompt=prompt_of(narrow, way, 30, letter), max_tokens=POOL + 1 - 30)
        for letter in "abcde"
    ]
    answers = await asyncio.gather(*(send(narrow, way, ask) for ask in asks))
    assert {answer.reason for answer in answers} == {"length"}
    assert {len(answer.token_ids) for answer in answers} == {POOL + 1 - 30}
