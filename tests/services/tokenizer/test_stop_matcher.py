import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.stop_matcher import StopMatcher


def run(stops: Sequence[str], parts: Sequence[str]) -> tuple[list[str], str | None]:
    """What is released after each part and at the end, and the string found."""
    matcher = StopMatcher(stops)
    released = [matcher.push(part) for part in parts]
    return [*released, matcher.flush()], matcher.found


def expected(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The rule, by trying every end: the first to complete, of these the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held(stops: Sequence[str], text: str) -> str:
    """The longest end of a text that begins a stop string."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[start:]
    return ""


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("glue", [("", ""), ("x", "y"), (" b", "beta")])
def test_a_stop_string_over_several_tokens_never_leaks(pieces: int, glue: tuple[str, str]) -> None:
    stop = "beta gamma"
    for inner in itertools.combinations(range(1, len(stop)), pieces - 1):
        borders = [0, *inner, len(stop)]
        parts = [stop[begin:end] for begin, end in itertools.pairwise(borders)]
        parts[0], parts[-1] = glue[0] + parts[0], parts[-1] + glue[1]
        released, found = run([stop], ["alpha ", *parts, " delta"])
        assert ("".join(released), found) == ("alpha " + glue[0], stop)


@pytest.mark.parametrize(
    ("parts", "stops", "text"),
    [
        (["ABC", "DEF", "GHI"], ["DE"], "ABC"),
        (["ABC", "DEF", "GHI"], ["EF"], "ABCD"),
        (["ABC", "DEF", "GHI"], ["E"], "ABCD"),
        (["a", "..."], ["."], "a"),
        (['","'], ['","'], ""),
        (["x", '","'], ['",'], "x"),
        (["?\n"], ["\n"], "?"),
        ([" Alice", "!", "\n"], ["\n", "Alice:"], " Alice!"),
        (["ABCD"], ["CD", "BC"], "A"),
        (["xabc"], ["ab", "abc"], "x"),
        (["xabc"], ["bc", "abc"], "x"),
        (["aab"], ["ab"], "a"),
        (["aa", "aab"], ["aaab"], "a"),
        (["abab", "abc"], ["ababc"], "ab"),
    ],
)
def test_the_cut_does_not_depend_on_the_order_of_the_list(
    parts: list[str], stops: list[str], text: str
) -> None:
    for order in itertools.permutations(stops):
        released, found = run(order, parts)
        assert "".join(released) == text
        assert found in stops


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == "a "
    assert (matcher.push("c"), matcher.push_hidden("<d>"), matcher.flush()) == ("", "", "")


def test_text_that_cannot_become_a_stop_is_released_at_once() -> None:
    released, found = run(["\n\nUser:"], ["Hi", "!\n", "\nUs", "ually", " so\n"])
    assert released == ["Hi", "!", "", "\n\nUsually", " so", "\n"]
    assert found is None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_any_text_in_any_cut_follows_the_rule(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    text = ""
    for part in parts:
        released += matcher.push(part)
        text += part
        if matcher.found is None:
            assert released + held(stops, text) == text
    assert (released + matcher.flush(), matcher.found) == expected(stops, text)
    including = StopMatcher(stops, include=True)
    shown = "".join(map(including.push, parts)) + including.flush()
    before, found = expected(stops, text)
    assert (shown, including.found) == (before + (found or ""), found)


def test_hidden_text_is_found_and_never_shown() -> None:
    matcher = StopMatcher([], ["<end>"])
    assert matcher.push("answer") == "answer"
    assert (matcher.push_hidden("<end>"), matcher.found) == ("", "<end>")


def test_a_stop_string_may_mix_hidden_and_shown_text() -> None:
    matcher = StopMatcher(["zzz"], ["b<end>c"])
    assert matcher.push("ab") == "a"
    assert matcher.push_hidden("<end>") == ""
    assert (matcher.push("cd"), matcher.found) == ("", "b<end>c")


def test_what_only_began_like_a_mixed_stop_string_is_released() -> None:
    matcher = StopMatcher(["zzz"], ["b<end>c"])
    assert matcher.push("ab") == "a"
    assert matcher.push_hidden("<end>") == ""
    assert matcher.push("d") == "bd"
    assert matcher.push("b") == ""
    assert (matcher.push_hidden("<other>"), matcher.found) == ("b", None)


def test_shown_stop_strings_look_past_hidden_text() -> None:
    matcher = StopMatcher(["bc"], ["<x>"])
    assert matcher.push("ab") == "a"
    assert matcher.push_hidden("<end>") == ""
    assert (matcher.push("cd"), matcher.found) == ("", "bc")


def test_mixed_text_follows_the_rule() -> None:
    source = random.Random(3)
    for _ in range(2000):
        visible = ["".join(source.choices("ab", k=source.randrange(1, 4))) for _ in range(2)]
        raw = ["".join(source.choices("ab<", k=source.randrange(1, 4))) + "<" for _ in range(2)]
        matcher = StopMatcher(visible, raw)
        shown, whole, released = "", "", ""
        for _ in range(source.randrange(8)):
            if matcher.found is not None:
                break
            if source.random() < 0.3:
                whole += "<"
                released += matcher.push_hidden("<")
            else:
                character = source.choice("abc")
                shown, whole = shown + character, whole + character
                released += matcher.push(character)
            ended = [stop for stop in visible if shown.endswith(stop) and whole[-1] != "<"]
            cuts = [len(shown) - len(stop) for stop in ended]
            cuts += [
                len(whole[: len(whole) - len(stop)].replace("<", ""))
                for stop in raw
                if whole.endswith(stop)
            ]
            assert (matcher.found is not None) == bool(cuts)
            if cuts:
                assert released == shown[: min(cuts)]
        if matcher.found is None:
            assert released + matcher.flush() == shown


def test_many_long_strings_with_one_beginning() -> None:
    stops = ["a" * 255 + chr(ord("b") + index) for index in range(16)]
    released, found = run(stops, ["a" * 10_000, "b"])
    assert (len("".join(released)), found) == (10_000 - 255, stops[0])
