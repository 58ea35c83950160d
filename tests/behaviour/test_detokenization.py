"""Text from tokens that are parts of characters, or no characters at all."""

import asyncio
import random

import pytest

from tests.assets.tokenizers import fallback_ids
from tests.behaviour.doors import CHAT_WAYS, GENERATE_WAYS, TEXT_WAYS, Ask, Way, send
from tests.behaviour.stack import Stack

text_ways = pytest.mark.parametrize("way", TEXT_WAYS, ids=lambda way: way.value)
generate_ways = pytest.mark.parametrize("way", GENERATE_WAYS, ids=lambda way: way.value)
kinds = pytest.mark.parametrize("kind", ["bytes", "words"])

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
INVALID = [
    (b"\xc3ab", "\ufffdab"),
    (b"\xf0\x9fx", "\ufffdx"),
    (b"\x80\x80a", "\ufffd\ufffda"),
    (b"a\xff\xc3\xa9", "a\ufffdé"),
    (b"\xc3", "\ufffd"),
    (b"ok\xe4\xb8", "ok\ufffd"),
]
TEXTS = ["é", "ď", "中文", "日本語", "مرحبا", "🌶", FAMILY, "🇩🇪", "a\u0301"]


def single(stack: Stack, kind: str, data: bytes) -> tuple[int, ...]:
    """One id per byte."""
    if kind == "bytes":
        return tuple(byte + 4 for byte in data)
    return tuple(fallback_ids(stack.encoding._backend, data))


@text_ways
@kinds
async def test_b011_characters_of_several_tokens(
    scripted: Stack, scripted_words: Stack, way: Way, kind: str
) -> None:
    stack = scripted if kind == "bytes" else scripted_words

    async def one(text: str) -> None:
        output = single(stack, kind, text.encode())
        ask = Ask(prompt=stack.prompt_for(output), max_tokens=len(output))
        answer = await send(stack, way, ask)
        assert (answer.text, answer.token_ids) == (text, output)
        assert not any("\ufffd" in delta for delta in answer.deltas)

    await asyncio.gather(*(one(text) for text in TEXTS))


async def test_b011_a_character_comes_with_its_last_byte(scripted: Stack) -> None:
    output = single(scripted, "bytes", FAMILY.encode())
    assert len(output) == 25
    scripted.script.delay_s = 0.002  # one token a message, as far as the loop keeps up
    ask = Ask(prompt=scripted.prompt_for(output), max_tokens=len(output))
    answer = await send(scripted, Way.GENERATE_STREAM, ask)
    scripted.script.delay_s = 0.0
    assert answer.text == FAMILY
    assert len(answer.deltas) > 1
    for end in range(1, len(answer.deltas)):
        assert FAMILY.startswith("".join(answer.deltas[:end]))


@text_ways
@kinds
async def test_b013_invalid_bytes_then_text(
    scripted: Stack, scripted_words: Stack, way: Way, kind: str
) -> None:
    stack = scripted if kind == "bytes" else scripted_words

    async def one(data: bytes, text: str) -> None:
        output = single(stack, kind, data)
        ask = Ask(prompt=stack.prompt_for(output), max_tokens=len(output))
        answer = await send(stack, way, ask)
        assert answer.token_ids == output
        # A run of single bytes with one invalid byte is all U+FFFD to the library; `send` compares
        # with it. The byte-level one replaces what is invalid and nothing else.
        assert answer.text == (text if kind == "bytes" else "\ufffd" * len(data))

    await asyncio.gather(*(one(*case) for case in INVALID))


@text_ways
async def test_b013_invalid_byte_between_words(scripted_words: Stack, way: Way) -> None:
    library = scripted_words.encoding._backend
    word = library.token_to_id("▁a")
    output = (word, *fallback_ids(library, b"\xc3"), word)
    prompt = scripted_words.prompt_for(output)
    answer = await send(scripted_words, way, Ask(prompt=prompt, max_tokens=3))
    assert answer.text.lstrip(" ") == "a\ufffd a"
    assert answer.reason == "length"


@kinds
async def test_b013_random_bytes(scripted: Stack, scripted_words: Stack, kind: str) -> None:
    stack = scripted if kind == "bytes" else scripted_words
    source = random.Random(13)

    async def one(number: int) -> None:
        # Half of them mostly valid, so that characters and invalid bytes alternate.
        data = source.randbytes(source.randint(1, 10))
        if number % 2:
            data = "é中🌶a"[source.randint(0, 3) :].encode() + data[:3] + b"z"
        output = single(stack, kind, data)
        prompt = stack.prompt_for(output)
        # `send` compares with the library's decoding of all ids at once.
        for way in CHAT_WAYS if number % 4 < 2 else GENERATE_WAYS:
            await send(stack, way, Ask(prompt=prompt, max_tokens=len(output)))

    for start in range(0, 200, 50):
        await asyncio.gather(*(one(number) for number in range(start, start + 50)))


@generate_ways
@kinds
async def test_b014_prompt_that_ends_inside_a_character(
    scripted: Stack, scripted_words: Stack, way: Way, kind: str
) -> None:
    stack = scripted if kind == "bytes" else scripted_words
    end = single(stack, kind, b"!")

    async def one(text: str, cut: int) -> None:
        data = text.encode()
        whole = single(stack, kind, data)
        prompt, output = whole[:cut], (*whole[cut:], *end)
        stack.script.say(prompt, output)
        answer = await send(stack, way, Ask(prompt=prompt, max_tokens=len(output)))
        # The character that the prompt leaves unfinished, and what follows.
        known = len(data[:cut].decode(errors="ignore"))
        assert answer.text == text[known:] + "!"

    texts = ["Hello world 🌶", "สวัสดี", "中文字", FAMILY]
    cuts = [(text, cut) for text in texts for cut in range(1, len(text.encode()))]
    await asyncio.gather(*(one(*each) for each in cuts))
