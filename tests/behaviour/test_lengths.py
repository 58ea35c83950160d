"""Prompts and outputs at the end of the context, and over it."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.behaviour.doors import ALL_WAYS, NOT_CHAT_WAYS, Ask, Refused, Way, send
from tests.behaviour.sets import FILLER, scripted_stack
from tests.behaviour.stack import SCRIPTED_LIMITS, Stack

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)

CONTEXT = 64
STEP = 8


@pytest.fixture(scope="module")
async def short(
    byte_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A set with a context of 64 tokens, of which a step computes eight."""
    limits = replace(SCRIPTED_LIMITS, max_model_len=CONTEXT, max_num_batched_tokens=STEP)
    async with scripted_stack(tmp_path_factory.mktemp("s"), byte_folder, limits) as stack:
        yield stack


def prompt_of(stack: Stack, way: Way, size: int) -> str:
    """A text that is so many tokens at this door."""
    around = len(stack.chat_ids("")) if way.is_chat else 0
    return "x" * (size - around)


@all_ways
async def test_b019_a_prompt_that_leaves_room_for_one_token_gets_one(
    short: Stack, way: Way
) -> None:
    """It is also longer than a step, so it is computed in pieces."""
    before = (await short.loads()).counters.chunked_prefills
    answer = await send(short, way, Ask(prompt=prompt_of(short, way, 63)))
    assert (answer.token_ids, answer.reason) == ((FILLER,), "length")
    assert answer.prompt_tokens == 63
    if way is Way.GENERATE_STREAM:  # the other doors find its beginning cached
        assert (await short.loads()).counters.chunked_prefills > before


@all_ways
@pytest.mark.parametrize("size", [64, 65, 1000])
async def test_b019_a_prompt_without_room_is_refused_with_true_numbers(
    short: Stack, way: Way, size: int
) -> None:
    with pytest.raises(Refused) as caught:
        await send(short, way, Ask(prompt=prompt_of(short, way, size)))
    refused = caught.value
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.parts) == ("CONTEXT_LENGTH", 0)
    # The text door names the context, the token door the longest prompt.
    limit = CONTEXT if way.is_text else CONTEXT - 1
    assert refused.numbers["limit"] == limit
    told = refused.numbers["got"]
    if size == 1000 and way.is_text:
        # Too long whatever its tokens are, so they are not counted: the text is measured.
        assert limit <= told <= size
        assert "at least" in refused.message
    else:
        assert told == size
    assert {limit, told} <= numbers(refused.message)


@all_ways
async def test_b019_prompt_and_max_tokens_over_the_context_are_refused(
    short: Stack, way: Way
) -> None:
    with pytest.raises(Refused) as caught:
        await send(short, way, Ask(prompt=prompt_of(short, way, 60), max_tokens=10))
    refused = caught.value
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.parts) == ("CONTEXT_LENGTH", 0)
    assert refused.field.endswith("stopping.max_tokens")
    # The text door counts both together, the token door what is left for the output.
    limit, got = (CONTEXT, 70) if way.is_text else (4, 10)
    assert refused.numbers == {"limit": limit, "got": got}
    assert {limit, 10} <= numbers(refused.message)


@all_ways
async def test_b019_prompt_and_max_tokens_that_fill_the_context_run(short: Stack, way: Way) -> None:
    answer = await send(short, way, Ask(prompt=prompt_of(short, way, 60), max_tokens=4))
    assert (answer.token_ids, answer.reason) == ((FILLER,) * 4, "length")


@pytest.mark.parametrize("way", NOT_CHAT_WAYS, ids=lambda way: way.value)
async def test_b019_without_max_tokens_the_context_is_the_limit(short: Stack, way: Way) -> None:
    answer = await send(short, way, Ask(prompt="y" * 50))
    assert (len(answer.token_ids), answer.reason) == (14, "length")


def numbers(text: str) -> set[int]:
    """All whole numbers in it."""
    return {int(number) for number in re.findall(r"\d+", text)}
