import itertools
import random
from collections.abc import Sequence

import pytest

from services.tokenizer.detokenizer import Detokenization
from services.tokenizer.domain import FinishReason, TextEnd, TokenEnd, Usage
from services.tokenizer.generation import StopFound, TextGeneration, make_matcher
from tests.assets.tokenizers import byte_ids, byte_level, piece_id

TOKENIZER = byte_level()
EOS = frozenset({2})
END_TURN = TOKENIZER.token_to_id("<end_turn>")


def ids(*pieces: str) -> list[int]:
    return [piece_id(TOKENIZER, piece) for piece in pieces]


def start(stops: Sequence[str] = (), *, include: bool = False, skip: bool = True) -> TextGeneration:
    detokenization = Detokenization(TOKENIZER)
    special = detokenization.special
    return TextGeneration(
        detokenization.start(skip_special_tokens=skip),
        make_matcher(stops, special, include_stop=include),
        special,
        shows_special=not skip,
        include_stop=include,
    )


def token_end(
    completion: int, reason: FinishReason = FinishReason.LENGTH, stop: int | None = None
) -> TokenEnd:
    usage = Usage(prompt_tokens=5, completion_tokens=completion, cached_tokens=4)
    return TokenEnd(reason=reason, stop_token_id=stop, usage=usage)


def run(
    tokens: Sequence[int],
    stops: Sequence[str] = (),
    size: int = 1,
    *,
    ending: frozenset[int] = EOS,
    **options: bool,
) -> tuple[str, list[int], TextEnd]:
    """All text, the kept ids and the end, with `size` tokens in each delta."""
    generation = start(stops, **options)
    text, kept = "", []
    for begin in range(0, len(tokens), size):
        new_text, new_ids = generation.push(tokens[begin : begin + size], ending)
        text += new_text
        kept += new_ids
    rest, end = generation.finish(token_end(len(tokens)))
    return text + rest, kept, end


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_a_stop_string_ends_text_ids_and_usage_at_one_token(size: int) -> None:
    tokens = ids("alpha", " beta", " gam", "ma", " delta")
    text, kept, end = run(tokens, ["beta gamma"], size)
    assert (text, kept) == ("alpha ", tokens[:4])
    assert end == TextEnd(
        reason=FinishReason.STOP,
        stop_string="beta gamma",
        stop_token_id=None,
        usage=Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=4),
    )


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "num_kept"),
    [
        (["ABC", "DEF", "GHI"], ["DE"], "ABC", 2),
        (["..."], ["."], "", 1),
        (["?\n"], ["\n"], "?", 1),
        ([" Alice", "!", "\n"], ["\n", "Alice:"], " Alice!", 3),
        (["ABCD"], ["CD", "BC"], "A", 1),
        (["inj", "ury."], ["!"], "injury.", 2),
    ],
)
def test_text_before_the_stop_is_kept(
    pieces: list[str], stops: list[str], text: str, num_kept: int, size: int
) -> None:
    for order in itertools.permutations(stops):
        got, kept, _ = run(ids(*pieces), order, size)
        assert (got, len(kept)) == (text, num_kept)


def test_the_first_match_is_reported_with_its_token() -> None:
    generation = start(["DE"])
    generation.push(ids("ABC", "DEF", "GHI"), EOS)
    assert generation.found == StopFound(stop="DE", kept_tokens=2)
    assert generation.push(ids("ABC"), EOS) == ("", [])


@pytest.mark.parametrize("size", [1, 10])
def test_without_a_match_held_text_comes_at_the_end(size: int) -> None:
    tokens = ids("alpha", " beta", " gam")
    text, kept, end = run(tokens, ["beta gamma"], size)
    assert (text, kept) == ("alpha beta gam", tokens)
    assert (end.reason, end.stop_string) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_the_token_that_ends_adds_no_text(stops: tuple[str, ...]) -> None:
    tokens = [*ids("inj", "ury."), 2]
    assert run(tokens, stops)[:2] == ("injury.", tokens)


def test_an_ending_token_that_is_plain_text_adds_none_either() -> None:
    generation = start()
    (ending,) = ids("...")
    assert generation.push([*ids("alpha"), ending], frozenset({ending})) == (
        "alpha",
        [*ids("alpha"), ending],
    )


@pytest.mark.parametrize("size", [1, 10])
def test_a_special_token_can_be_a_stop_string(size: int) -> None:
    tokens = [*ids("alpha"), END_TURN, *ids("ma")]
    text, kept, end = run(tokens, ["<end_turn>"], size)
    assert (text, kept, end.stop_string) == ("alpha", tokens[:2], "<end_turn>")


def test_the_ending_token_can_be_a_stop_string() -> None:
    tokens = [*ids("alpha"), 2]
    text, kept, end = run(tokens, ["<|im_end|>"])
    assert (text, kept, end.stop_string) == ("alpha", tokens, "<|im_end|>")


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    assert run([*ids("alpha"), *byte_ids("é".encode()[:1])])[0] == "alpha\ufffd"


def test_a_stop_string_may_complete_at_the_very_end() -> None:
    tokens = [*ids("alpha"), *byte_ids("é".encode()[:1])]
    text, kept, end = run(tokens, ["\ufffd"])
    assert (text, kept, end.stop_string) == ("alpha", tokens, "\ufffd")
    assert end.usage.completion_tokens == 2


def test_a_resumed_generation_gives_only_what_is_new() -> None:
    tokens = ids("alpha", " beta", " gam", " delta")
    for cut in range(len(tokens) + 1):
        before = start(["beta gamma"])
        sent = before.push(tokens[:cut], EOS)[0]
        generation = start(["beta gamma"])
        assert generation.push(tokens[:cut], EOS)[0] == sent
        new = generation.push(tokens[cut:], EOS)[0] + generation.finish(token_end(4))[0]
        assert sent + new == "alpha beta gam delta"


def test_a_stop_string_may_begin_in_resumed_tokens() -> None:
    generation = start(["beta gamma"])
    assert generation.push(ids("alpha", " beta", " gam"), EOS)[0] == "alpha "
    assert generation.push(ids("ma", " delta"), EOS) == ("", ids("ma"))
    assert generation.found == StopFound(stop="beta gamma", kept_tokens=4)


def test_a_character_may_begin_in_resumed_tokens() -> None:
    first, second = byte_ids("é".encode())
    generation = start()
    assert generation.push([first], EOS)[0] == ""
    assert generation.push([second], EOS)[0] == "é"


def test_the_prompt_is_not_searched() -> None:
    detokenization = Detokenization(TOKENIZER)
    special = detokenization.special
    prompt = byte_ids(b"a\nb\nc")
    generation = TextGeneration(
        detokenization.start(prompt), make_matcher(["cd", "\n"], special), special
    )
    assert generation.push(byte_ids(b"d"), EOS)[0] == "d"
    assert generation.found is None
    generation.push(byte_ids(b"\n"), EOS)
    assert generation.found == StopFound(stop="\n", kept_tokens=2)


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "num_kept"),
    [
        (["alpha", " beta", " gam", "ma", " delta"], ["beta gamma"], "alpha beta gamma", 4),
        (["ABC", "DEF", "GHI"], ["DE"], "ABCDE", 2),
        (["..."], ["."], ".", 1),
        ([" Alice", "!", "\n"], ["\n", "Alice:"], " Alice!\n", 3),
        (["ABCD"], ["CD", "BC"], "ABC", 1),
        (["ABCD"], ["BC", "C", "ABC"], "ABC", 1),
        (["inj", "ury."], ["!"], "injury.", 2),
    ],
)
def test_the_text_may_end_with_the_stop_string(
    pieces: list[str], stops: list[str], text: str, num_kept: int, size: int
) -> None:
    for order in itertools.permutations(stops):
        got, kept, end = run(ids(*pieces), order, size, include=True)
        assert (got, len(kept)) == (text, num_kept)
        assert end.stop_string is None or text.endswith(end.stop_string)


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("stops", [(), ("zzz",), ("...zzz",)])
@pytest.mark.parametrize(
    ("last", "include", "skip", "shown"),
    [
        ("...", False, True, ""),
        ("...", True, True, "..."),
        ("<end_turn>", False, False, ""),
        ("<end_turn>", True, True, ""),
        ("<end_turn>", True, False, "<end_turn>"),
    ],
)
def test_the_token_that_ends_shows_where_it_is_asked_for(
    last: str, include: bool, skip: bool, shown: str, stops: tuple[str, ...], size: int
) -> None:
    ending = END_TURN if last == "<end_turn>" else ids(last)[0]
    tokens = [*ids("alpha", " beta"), ending]
    text, kept, end = run(
        tokens, stops, size, ending=frozenset({ending}), include=include, skip=skip
    )
    assert (text, kept, end.stop_string) == ("alpha beta" + shown, tokens, None)


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize(
    ("stop", "include", "skip", "text"),
    [
        ("<end_turn>", False, False, "alpha"),
        ("<end_turn>", True, False, "alpha<end_turn>"),
        ("<end_turn>", True, True, "alpha<end_turn>"),
        ("pha<end_turn>m", False, False, "al"),
        ("pha<end_turn>m", True, False, "alpha<end_turn>m"),
        ("pha<end_turn>m", True, True, "alpha<end_turn>m"),
        ("ham", True, False, "alpha<end_turn>ma"),
        ("ham", True, True, "alpham"),
    ],
)
def test_a_stop_string_that_is_kept_shows_whole(
    stop: str, include: bool, skip: bool, text: str, size: int
) -> None:
    tokens = [*ids("alpha"), END_TURN, *ids("ma")]
    assert run(tokens, [stop], size, include=include, skip=skip)[0] == text


@pytest.mark.parametrize(("include", "text"), [(False, "alpha"), (True, "alpha<|im_end|>")])
def test_the_ending_token_can_be_a_stop_string_where_special_tokens_show(
    include: bool, text: str
) -> None:
    tokens = [*ids("alpha"), 2]
    got, kept, end = run(tokens, ["<|im_end|>"], include=include, skip=False)
    assert (got, kept, end.stop_string) == (text, tokens, "<|im_end|>")


@pytest.mark.parametrize("stops", [(), ("\0never",)])
def test_special_tokens_show_as_the_library_decodes_them(stops: tuple[str, ...]) -> None:
    source = random.Random(5)
    for _ in range(200):
        tokens = [source.randrange(TOKENIZER.get_vocab_size()) for _ in range(12)]
        text, kept, _ = run(tokens, stops, 3, ending=frozenset(), skip=False)
        assert (text, kept) == (TOKENIZER.decode(tokens, skip_special_tokens=False), tokens)
