"""What the text of an answer must be, worked out the slow way: one-shot decode, then the stop rule.

Shares no code with the service: the library decodes everything at once, and stop strings are
searched by `endswith` after each character.
"""

from collections.abc import Sequence
from typing import Any

from services.tokenizer.encoding import Encoding

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4


def expected_text(encoding: Encoding, ask: Any, answer: Any, context: Sequence[int] = ()) -> str:
    """The text that `answer`'s ids must have given.

    Args:
        encoding: of the model.
        ask: what was asked.
        answer: its ids and how it ended.
        context: the prompt where the text goes on from it; it may end inside a character, but not
            in bytes that are none.
    """
    ids = list(answer.token_ids)
    skip = ask.skip_special is not False
    special = encoding.detokenization.special
    if answer.stop_token_id is not None:
        assert ids[-1] == answer.stop_token_id
        if not ask.include_stop:
            ids.pop()
    if not ask.stops:
        return decoded(encoding, ids, context, skip_special=skip)
    pieces = _pieces(encoding, ids, context, skip)
    before, found, up_to_end = _until_stop(pieces, ask.stops, special.values())
    assert found == answer.stop_string
    return up_to_end if ask.include_stop else before


def decoded(
    encoding: Encoding, ids: Sequence[int], context: Sequence[int], *, skip_special: bool
) -> str:
    """The text of `ids` as it goes on from `context`: what decoding both adds to the prompt's."""
    (both,) = encoding.decode([[*context, *ids]], skip_special_tokens=skip_special)
    before = _finished_text(encoding, context, skip_special)
    assert both.startswith(before)
    return both[len(before) :]


def _finished_text(encoding: Encoding, ids: Sequence[int], skip_special: bool) -> str:
    """The text of `ids` without a character that they leave unfinished."""
    ends = [ids[: len(ids) - left] for left in range(min(_LONGEST_CHARACTER, len(ids) + 1))]
    texts = encoding.decode(ends, skip_special_tokens=skip_special)
    whole = [text for text in texts if not text.endswith(_REPLACEMENT)]
    return whole[0] if whole else texts[0]


def _pieces(
    encoding: Encoding, ids: Sequence[int], context: Sequence[int], skip: bool
) -> list[tuple[str, bool]]:
    """Characters in order, and whether each shows."""
    special = encoding.detokenization.special
    pieces: list[tuple[str, bool]] = []
    run: list[int] = []
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in special:
            run.append(token_id)
            continue
        pieces += [
            (character, True) for character in decoded(encoding, run, context, skip_special=True)
        ]
        context, run = [*context, *run], []
        if token_id is not None:
            pieces += [(character, not skip) for character in special[token_id]]
    return pieces


def _until_stop(
    pieces: Sequence[tuple[str, bool]], stops: Sequence[str], special: Any
) -> tuple[str, str | None, str]:
    """The text before the first stop string to complete (the longest of several), and with it."""
    raw = visible = ""
    naming = [stop for stop in stops if any(name in stop for name in special)]
    for character, shows in pieces:
        raw += character
        visible += character if shows else ""
        found = [stop for stop in naming if raw.endswith(stop)]
        if shows:
            found += [s for s in stops if s not in naming and visible.endswith(s)]
        if found:
            stop = max(found, key=len)
            hidden = len([1 for _, shown in pieces[len(raw) - len(stop) : len(raw)] if not shown])
            length = len(stop) - hidden if stop in naming else len(stop)
            before = visible[: len(visible) - length]
            return before, stop, before + stop
    return visible, None, visible
