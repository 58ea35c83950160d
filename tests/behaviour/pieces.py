"""Names for token ids: tests say what a token reads, not its number."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from tests.assets.tokenizers import FIRST_BYTE, SPECIAL, byte_ids, written


class Pieces:
    """Ids of the byte-level tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *texts: str) -> tuple[int, ...]:
        """One id per text, which must be a whole token."""
        ids = [self._id(text) for text in texts]
        return tuple(ids)

    def bytes(self, data: bytes | str) -> tuple[int, ...]:
        """One id per byte."""
        return tuple(byte_ids(data.encode() if isinstance(data, str) else data))

    def _id(self, text: str) -> int:
        if text in SPECIAL:
            return SPECIAL.index(text)
        if len(text.encode()) == 1:
            return FIRST_BYTE + text.encode()[0]
        token_id = self._tokenizer.token_to_id(written(text))
        assert token_id is not None, f"{text!r} is no token"
        assert isinstance(token_id, int)
        return token_id


def cuts(text: str, parts: int) -> list[tuple[str, ...]]:
    """Every way of cutting `text` into so many parts, none empty."""
    if parts == 1:
        return [(text,)]
    return [
        (text[:at], *rest)
        for at in range(1, len(text) - parts + 2)
        for rest in cuts(text[at:], parts - 1)
    ]


def flat(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """All ids in order."""
    return tuple(token_id for group in groups for token_id in group)


CHAIN_EOS = (2, 7, 9)
"""End tokens of the model that says `chain`: the first in config.json, all in generation_config."""


def chain(pieces: Pieces) -> tuple[int, ...]:
    """What the successor model says after a line break; no token in it comes twice."""
    words = pieces("ABC", "DEF", "GHI", "inj", "ury.", "<end_turn>", "?\n", "...", " Alice")
    return (*words, 7, *pieces("c"), 9, *pieces("d"), 2, *pieces("e", "f", "g"))
