"""How much text one token can cover, so that what cannot fit is refused before it is encoded.

Pure. A bound exists where every character of a text, but for a few known ones, ends up in some
token and no token covers more than its own characters. It does not where a step drops text (a
Strip, a split that removes the separators), where an unknown token swallows whole words, or where
an added token takes the whitespace beside it along.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

from services.tokenizer.detokenizer import byte_alphabet

_LONGEST_DECOMPOSITION = 4
"""Most characters that canonical composition makes one of (UAX #15, expansion factors of NFD)."""

_GROWING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
"""Normalizers that give at least one character for each."""

_COMPOSING = frozenset({"NFC", "NFKC"})

_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that keep every character."""

_SPLITTING = frozenset({"Split", "Punctuation"})
"""Pre-tokenizers that keep every character unless told to remove some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBound:
    """What is known of a text's tokens before it is encoded.

    Attributes:
        characters_per_token: the most characters that one token can cover.
        ignored: characters that may be in no token at all.
    """

    characters_per_token: int
    ignored: str = ""

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has; it may have many more."""
        size = len(text) - sum(map(text.count, self.ignored))
        return -(-size // self.characters_per_token)


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """The bound for a tokenizer's texts; None where there is none."""
    shrinking = _shrinking(tokenizer)
    ignored = _ignored(tokenizer)
    if shrinking is None or ignored is None or not _keeps_text(tokenizer):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    texts = [*tokenizer.get_vocab(with_added_tokens=True), *(token.content for token in added)]
    if tokenizer.normalizer is not None:
        texts += [tokenizer.normalizer.normalize_str(token.content) for token in added]
    return TextBound(
        characters_per_token=max(map(len, texts), default=1) * shrinking, ignored=ignored
    )


def _shrinking(tokenizer: Tokenizer) -> int | None:
    """How many characters a normalizer may make one of; None for any number."""
    factor = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        if step["type"] in _COMPOSING:
            factor *= _LONGEST_DECOMPOSITION
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] not in _GROWING:
            return None
    return factor


def _keeps_text(tokenizer: Tokenizer) -> bool:
    return all(
        step["type"] in _KEEPING or (step["type"] in _SPLITTING and step["behavior"] != "Removed")
        for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")
    )


def _ignored(tokenizer: Tokenizer) -> str | None:
    """Characters that the model has no token for; None where a token may stand for any text."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.unk_token is not None and not model.fuse_unk:
        return ""
    if model.byte_fallback:
        knows_all = all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
        return "" if knows_all else None
    normalizing = [step["type"] for step in _steps(tokenizer.normalizer, "normalizers")]
    splitting = [step["type"] for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")]
    if model.unk_token is not None or "ByteLevel" not in normalizing + splitting:
        return None
    # Unknown bytes are passed over. Of a character of several bytes, those after the first stay.
    unknown = [byte for text, byte in byte_alphabet().items() if model.token_to_id(text) is None]
    if any(0x80 <= byte < 0xC0 for byte in unknown):
        return None
    ignored = "".join(chr(byte) for byte in sorted(unknown) if byte < 0x80)
    return None if ignored and "Replace" in normalizing else ignored


def _steps(component: Any, parts: str) -> Iterator[dict[str, Any]]:
    """The steps that a normalizer or a pre-tokenizer consists of."""
    if component is None:
        return
    todo = [json.loads(component.__getstate__())]
    while todo:
        step = todo.pop()
        if step["type"] == "Sequence":
            todo += step[parts]
        else:
            yield step
