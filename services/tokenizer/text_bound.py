"""How much text one token can cover, so that what cannot fit is refused before it is encoded.

Pure. A bound exists where every character of a text ends up in some token and no token covers more
than its own characters. It does not where a step drops text (a Strip, a split that removes the
separators), where an unknown token swallows whole words, or where an added token takes the
whitespace beside it along.
"""

import json
from collections.abc import Iterator
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


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one token can cover; None where there is no such bound.

    Never too low: `n` tokens come from at most `n` times as many characters.
    """
    shrinking = _shrinking(tokenizer)
    if shrinking is None or not _keeps_text(tokenizer) or not _knows_all_text(tokenizer):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    texts = [*tokenizer.get_vocab(with_added_tokens=True), *(token.content for token in added)]
    if tokenizer.normalizer is not None:
        texts += [tokenizer.normalizer.normalize_str(token.content) for token in added]
    return max(map(len, texts), default=1) * shrinking


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


def _knows_all_text(tokenizer: Tokenizer) -> bool:
    """Whether the model has a token for any text, none of which covers more than it says."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    steps = [
        *_steps(tokenizer.normalizer, "normalizers"),
        *_steps(tokenizer.pre_tokenizer, "pretokenizers"),
    ]
    return any(step["type"] == "ByteLevel" for step in steps) and all(
        model.token_to_id(character) is not None for character in byte_alphabet()
    )


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
