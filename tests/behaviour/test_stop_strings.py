"""Stop strings: where the text ends, however the tokens are cut."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from tests.assets.byte_tokenizer import CHAT_TEMPLATE
from tests.assets.tokenizers import byte_level, write_folder
from tests.behaviour import oracles
from tests.behaviour.doors import TEXT_WAYS, Ask, Way, send
from tests.behaviour.pieces import Pieces, cuts
from tests.behaviour.sets import scripted_stack
from tests.behaviour.stack import SCRIPTED_LIMITS, Stack

text_ways = pytest.mark.parametrize("way", TEXT_WAYS, ids=lambda way: way.value)

# The successor model says "ABC" "DEF" "GHI" "inj" "ury." <end_turn> "?\n" "..." after it.
LINE = "go\n"
STOP = "END!"


@text_ways
async def test_b001_stop_string_over_several_tokens(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    output = pieces("alpha", " beta", " gam", "ma", " delta")
    ask = Ask(prompt=scripted.prompt_for(output), stops=("beta gamma",), max_tokens=20)
    answer = await send(scripted, way, ask)
    assert (answer.text, answer.reason, answer.stop_string) == ("alpha ", "stop", "beta gamma")
    assert answer.token_ids == output[:4]


@pytest.fixture(scope="module")
def in_parts() -> list[tuple[tuple[str, ...], str]]:
    """Every cut of a stop string into two and three tokens, with text glued to both ends."""
    found = []
    glues = itertools.product(("", "x", "EN"), ("", "y"))
    for (before, after), parts in itertools.product(glues, (2, 3)):
        for first, *middle, last in cuts(STOP, parts):
            found.append(((before + first, *middle, last + after), before))
    return found


@pytest.fixture(scope="module")
async def scripted_parts(
    in_parts: list[tuple[tuple[str, ...], str]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Stack, Pieces]]:
    """A set whose tokenizer has each of these parts as one token, and their ids."""
    tokenizer = byte_level(more=sorted({part for parts, _ in in_parts for part in parts}))
    folder = tmp_path_factory.mktemp("t") / "parts"
    write_folder(folder, tokenizer, template=CHAT_TEMPLATE)
    async with scripted_stack(tmp_path_factory.mktemp("s"), folder, SCRIPTED_LIMITS) as stack:
        yield stack, Pieces(tokenizer)


@text_ways
async def test_b001_every_cut_of_the_stop_string(
    scripted_parts: tuple[Stack, Pieces],
    in_parts: list[tuple[tuple[str, ...], str]],
    way: Way,
) -> None:
    stack, ids = scripted_parts

    async def one(parts: tuple[str, ...], before: str) -> None:
        ask = Ask(prompt=stack.prompt_for(ids(*parts)), stops=(STOP,), max_tokens=9)
        answer = await send(stack, way, ask)
        assert (answer.text, answer.stop_string) == (before, STOP)
        assert answer.token_ids == ids(*parts)

    await asyncio.gather(*(one(*each) for each in in_parts))
    await oracles.check(stack)


@text_ways
async def test_b001_what_only_begins_like_a_stop_is_shown_in_the_end(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    output = pieces("alpha", " beta", " gam")
    ask = Ask(prompt=scripted.prompt_for(output), stops=("beta gamma",), max_tokens=3)
    answer = await send(scripted, way, ask)
    assert (answer.text, answer.reason) == ("alpha beta gam", "length")


@text_ways
async def test_b002_stop_string_inside_one_token(scripted: Stack, pieces: Pieces, way: Way) -> None:
    async def one(tokens: tuple[str, ...], stop: str, text: str) -> None:
        prompt = scripted.prompt_for(pieces(*tokens))
        answer = await send(scripted, way, Ask(prompt=prompt, stops=(stop,), max_tokens=12))
        assert (answer.text, answer.reason, answer.stop_string) == (text, "stop", stop)

    cases = [
        (("ABC", "DEF", "GHI"), "DE", "ABC"),
        (("ABC", "DEF", "GHI"), "E", "ABCD"),
        (("ABC", "DEF", "GHI"), "EF", "ABCD"),
        (("ABC", "DEF", "GHI"), "DEF", "ABC"),
        (("hello", "...", "!"), ".", "hello"),
        (("hello", '","', "!"), '",', "hello"),
        (("...", "hello"), ".", ""),
    ]
    await asyncio.gather(*(one(*case) for case in cases))


@text_ways
async def test_b002_stop_string_inside_a_token_of_a_model(successor: Stack, way: Way) -> None:
    for stop, text in (("DE", "ABC"), ("F", "ABCDE"), ("GHIin", "ABCDEF")):
        answer = await send(successor, way, Ask(prompt=LINE, stops=(stop,), max_tokens=12))
        assert (answer.text, answer.reason, answer.stop_string) == (text, "stop", stop)


@text_ways
@pytest.mark.parametrize(("include", "text"), [(False, "?"), (True, "?\n")])
async def test_b004_text_before_the_stop_in_the_same_token(
    scripted: Stack, pieces: Pieces, way: Way, include: bool, text: str
) -> None:
    output = pieces("?\n", "hello")
    prompt = scripted.prompt_for(output)
    ask = Ask(prompt=prompt, stops=("\n",), max_tokens=9, include_stop=include)
    answer = await send(scripted, way, ask)
    assert (answer.text, answer.reason, answer.stop_string) == (text, "stop", "\n")
    assert answer.token_ids == output[:1]


@text_ways
@pytest.mark.parametrize(("include", "end"), [(False, "?"), (True, "?\n")])
async def test_b004_text_before_the_stop_in_a_token_of_a_model(
    successor: Stack, way: Way, include: bool, end: str
) -> None:
    ask = Ask(prompt=LINE, stops=("\n",), max_tokens=12, include_stop=include)
    answer = await send(successor, way, ask)
    assert answer.text == f"ABCDEFGHIinjury.{end}"


@text_ways
async def test_b005_several_stop_strings_in_any_order(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    async def one(tokens: tuple[str, ...], stops: tuple[str, ...], text: str) -> None:
        prompt = scripted.prompt_for(pieces(*tokens))
        for order in itertools.permutations(stops):
            answer = await send(scripted, way, Ask(prompt=prompt, stops=order, max_tokens=9))
            assert (answer.text, answer.reason) == (text, "stop")

    cases = [
        ((" Alice", "!", "\n"), ("\n", "Alice:"), " Alice!"),
        (("ABCD",), ("CD", "BC"), "A"),
        (("x", "a", "b", "c"), ("ab", "abc"), "x"),
        (("x", "a", "b", "c"), ("abc", "bc", "c"), "x"),
        (("hello", "ABCD"), ("D", "ABC", "oAB"), "hell"),
    ]
    await asyncio.gather(*(one(*case) for case in cases))


@text_ways
async def test_b007_stop_string_that_is_a_special_token(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    output = pieces("hello", "<end_turn>", "alpha")
    for skip, include in itertools.product((None, True, False), (False, True)):
        ask = Ask(
            prompt=scripted.prompt_for(output),
            stops=("<end_turn>",),
            max_tokens=9,
            skip_special=skip,
            include_stop=include,
        )
        answer = await send(scripted, way, ask)
        assert (answer.reason, answer.stop_string) == ("stop", "<end_turn>")
        assert answer.text == ("hello<end_turn>" if include else "hello")
        assert answer.token_ids == output[:2]


@text_ways
async def test_b007_special_token_of_a_model_stops(successor: Stack, way: Way) -> None:
    answer = await send(successor, way, Ask(prompt=LINE, stops=("<end_turn>",), max_tokens=12))
    assert (answer.text, answer.stop_string) == ("ABCDEFGHIinjury.", "<end_turn>")


@text_ways
@pytest.mark.parametrize(("skip", "text"), [(True, "helloalpha"), (False, "hello<end_turn>alpha")])
async def test_b007_special_tokens_show_when_they_are_asked_for(
    scripted: Stack, pieces: Pieces, way: Way, skip: bool, text: str
) -> None:
    prompt = scripted.prompt_for(pieces("hello", "<end_turn>", "alpha"))
    ask = Ask(prompt=prompt, max_tokens=3, skip_special=skip)
    answer = await send(scripted, way, ask)
    assert (answer.text, answer.reason) == (text, "length")


@text_ways
async def test_b010_stop_in_the_prompt_does_not_count(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    prompt = "a\nb\nc"
    for ids in (scripted.prompt_ids(prompt), scripted.chat_ids(prompt)):
        scripted.script.say(ids, pieces("d", "\n", "alpha"))
    answer = await send(scripted, way, Ask(prompt=prompt, stops=("\n",), max_tokens=9))
    assert (answer.text, answer.reason) == ("d", "stop")
    assert answer.token_ids == pieces("d", "\n")


@text_ways
@pytest.mark.parametrize("stop", ["cd", "c\n", "\nd", "b\ncd"])
async def test_b010_a_match_never_begins_in_the_prompt(
    scripted: Stack, pieces: Pieces, way: Way, stop: str
) -> None:
    prompt = "a\nb\nc"
    for ids in (scripted.prompt_ids(prompt), scripted.chat_ids(prompt)):
        scripted.script.say(ids, pieces("d", "\n", "alpha"))
    answer = await send(scripted, way, Ask(prompt=prompt, stops=(stop,), max_tokens=3))
    assert (answer.text, answer.reason) == ("d\nalpha", "length")
