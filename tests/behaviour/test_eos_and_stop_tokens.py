"""Tokens that end a generation: the model's own, and the caller's."""

import asyncio

import pytest

from tests.behaviour.doors import ALL_WAYS, NOT_CHAT_WAYS, TEXT_WAYS, Ask, Way, send
from tests.behaviour.pieces import CHAIN_EOS, Pieces, chain
from tests.behaviour.stack import Stack

text_ways = pytest.mark.parametrize("way", TEXT_WAYS, ids=lambda way: way.value)
not_chat_ways = pytest.mark.parametrize("way", NOT_CHAT_WAYS, ids=lambda way: way.value)
all_ways = pytest.mark.parametrize("way", ALL_WAYS, ids=lambda way: way.value)

LINE = "go\n"


@text_ways
async def test_b008_stop_token_takes_only_its_own_text(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    async def one(stop: str, include: bool, skip: bool, text: str) -> None:
        (stop_id,) = pieces(stop)
        ask = Ask(
            prompt=scripted.prompt_for(pieces("inj", "ury.", "<end_turn>", "alpha")),
            stop_token_ids=(stop_id,),
            include_stop=include,
            skip_special=skip,
            max_tokens=9,
        )
        answer = await send(scripted, way, ask)
        assert (answer.text, answer.reason, answer.stop_token_id) == (text, "stop", stop_id)
        assert answer.token_ids[-1] == stop_id

    cases = [
        ("<end_turn>", False, True, "injury."),
        ("<end_turn>", False, False, "injury."),
        ("<end_turn>", True, True, "injury."),
        ("<end_turn>", True, False, "injury.<end_turn>"),
        ("ury.", False, True, "inj"),
        ("ury.", False, False, "inj"),
        ("ury.", True, True, "injury."),
        ("ury.", True, False, "injury."),
    ]
    await asyncio.gather(*(one(*case) for case in cases))


@all_ways
@pytest.mark.parametrize("stop", ["<end_turn>", "ury."])
async def test_b008_stop_token_of_a_model(
    successor: Stack, pieces: Pieces, way: Way, stop: str
) -> None:
    (stop_id,) = pieces(stop)
    ask = Ask(prompt=LINE, stop_token_ids=(1, stop_id), max_tokens=20)
    answer = await send(successor, way, ask)
    said = chain(pieces)
    assert answer.token_ids == said[: said.index(stop_id) + 1]
    assert (answer.reason, answer.stop_token_id) == ("stop", stop_id)
    if way.is_text:
        assert answer.text == ("ABCDEFGHIinjury." if stop == "<end_turn>" else "ABCDEFGHIinj")


@text_ways
async def test_b008_stop_string_and_stop_token_together(
    scripted: Stack, pieces: Pieces, way: Way
) -> None:
    """The one that comes first ends it."""
    prompt = scripted.prompt_for(pieces("inj", "ury.", "<end_turn>", "alpha"))
    (stop_id,) = pieces("<end_turn>")
    first = Ask(prompt=prompt, stops=("y.",), stop_token_ids=(stop_id,), max_tokens=9)
    answer = await send(scripted, way, first)
    assert (answer.text, answer.stop_string, answer.stop_token_id) == ("injur", "y.", None)
    second = Ask(prompt=prompt, stops=("lph",), stop_token_ids=(stop_id,), max_tokens=9)
    answer = await send(scripted, way, second)
    assert (answer.text, answer.stop_string, answer.stop_token_id) == ("injury.", None, stop_id)


@all_ways
async def test_b016_first_listed_end_token_stops(
    successor: Stack, pieces: Pieces, way: Way
) -> None:
    answer = await send(successor, way, Ask(prompt=LINE, max_tokens=30))
    said = chain(pieces)
    assert answer.token_ids == said[: said.index(7) + 1]
    assert (answer.reason, answer.stop_token_id) == ("stop", 7)
    if way.is_text:
        assert answer.text == "ABCDEFGHIinjury.?\n... Alice"


@not_chat_ways
async def test_b016_every_listed_end_token_stops(
    successor: Stack, pieces: Pieces, way: Way
) -> None:
    said = chain(pieces)
    for end in CHAIN_EOS:
        before = said[said.index(end) - 1]
        answer = await send(successor, way, Ask(prompt=(before,), max_tokens=5))
        assert answer.token_ids == (end,)
        assert (answer.reason, answer.stop_token_id) == ("stop", end)


@all_ways
async def test_b016_ignore_eos_lets_all_of_them_pass(
    successor: Stack, pieces: Pieces, way: Way
) -> None:
    said = chain(pieces)
    ask = Ask(prompt=LINE, ignore_eos=True, max_tokens=len(said))
    answer = await send(successor, way, ask)
    assert (answer.token_ids, answer.reason) == (said, "length")
    assert set(CHAIN_EOS) < set(answer.token_ids)


@all_ways
async def test_b016_ignore_eos_keeps_the_callers_own_stop_tokens(
    successor: Stack, pieces: Pieces, way: Way
) -> None:
    said = chain(pieces)
    for own in (7, 9):
        ask = Ask(prompt=LINE, ignore_eos=True, stop_token_ids=(own,), max_tokens=len(said))
        answer = await send(successor, way, ask)
        assert answer.token_ids == said[: said.index(own) + 1]
        assert (answer.reason, answer.stop_token_id) == ("stop", own)
