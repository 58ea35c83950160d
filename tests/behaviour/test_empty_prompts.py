"""Prompts of no tokens, and of tokens that show nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.behaviour.doors import ALL_WAYS, CHAT_WAYS, NOT_CHAT_WAYS, Ask, Refused, Way, send
from tests.behaviour.pieces import Pieces
from tests.behaviour.sets import scripted_stack
from tests.behaviour.stack import SCRIPTED_LIMITS, Stack

all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)
not_chat_ways = pytest.mark.parametrize("way", NOT_CHAT_WAYS, ids=lambda way: way.value)
chat_ways = pytest.mark.parametrize("way", CHAT_WAYS, ids=lambda way: way.value)


@pytest.fixture(scope="module")
async def with_bos(
    bos_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A set whose tokenizer puts a token in front of every prompt."""
    async with scripted_stack(tmp_path_factory.mktemp("s"), bos_folder, SCRIPTED_LIMITS) as stack:
        yield stack


@not_chat_ways
@pytest.mark.parametrize("prompt", ["", ()], ids=["text", "ids"])
async def test_b020_a_prompt_without_tokens_is_refused_alone(
    scripted: Stack, pieces: Pieces, way: Way, prompt: str | tuple[int, ...]
) -> None:
    output = pieces("hello", "!")
    good = Ask(prompt=scripted.prompt_for(output), max_tokens=2)
    bad = Ask(prompt=prompt, max_tokens=2)
    results = await asyncio.gather(
        *(send(scripted, way, ask) for ask in (good, bad, good, bad)), return_exceptions=True
    )
    for refused in (results[1], results[3]):
        assert isinstance(refused, Refused)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.field.endswith("prompt")
        assert refused.parts == 0
    for answer in (results[0], results[2]):
        assert not isinstance(answer, BaseException)
        assert answer.token_ids == output


@chat_ways
async def test_b020_a_conversation_without_messages_is_refused(scripted: Stack, way: Way) -> None:
    with pytest.raises(Refused) as refused:
        await send(scripted, way, Ask(prompt="", messages=(), max_tokens=2))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.field, refused.value.parts) == ("messages", 0)


@chat_ways
async def test_b020_an_empty_message_is_a_prompt(scripted: Stack, pieces: Pieces, way: Way) -> None:
    scripted.script.say(scripted.chat_ids(""), pieces("hello", "!"))
    answer = await send(scripted, way, Ask(prompt="", max_tokens=2))
    assert answer.text == "hello!"


@all_ways
async def test_b020_what_shows_nothing_is_a_prompt_all_the_same(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    output = pieces("hello", "!")
    for prompt in ("\x00", " ", "\n\t ", "\u00a0\u3000"):
        for ids in (scripted.prompt_ids(prompt), scripted.chat_ids(prompt)):
            scripted.script.say(ids, output)
        answer = await send(scripted, way, Ask(prompt=prompt, max_tokens=2))
        assert answer.token_ids == output
        if not way.is_chat:
            assert answer.prompt_tokens == len(prompt.encode())


@not_chat_ways
async def test_b020_with_bos_an_empty_text_is_a_prompt_of_one_token(
    with_bos: Stack, pieces: Pieces, way: Way
) -> None:
    output = pieces("hello", "!")
    assert with_bos.prompt_ids("") == (1,)
    with_bos.script.say((1,), output)
    answer = await send(with_bos, way, Ask(prompt="", max_tokens=2))
    assert (answer.token_ids, answer.prompt_tokens) == (output, 1)


@not_chat_ways
async def test_b020_with_bos_no_ids_are_still_no_prompt(with_bos: Stack, way: Way) -> None:
    with pytest.raises(Refused) as refused:
        await send(with_bos, way, Ask(prompt=(), max_tokens=2))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
