"""Token ids to text, as they come: never half a character, and in the end what decoding all gives.

Owns the state of one text. Pure but for the tokenizer library, whose one-shot `decode` is the
reference: pushing ids in any cut and flushing gives the same text. Knows nothing of requests.

Two kinds of vocabulary:

- Byte-level ones (the decoder is ByteLevel): the text is the tokens' bytes as UTF-8, invalid ones
  replaced. Own tables and an incremental UTF-8 decoder; exact, and a dictionary look-up a token.
- All others: the text of a token depends on its left neighbour alone, so the library decodes
  neighbour and token. Tokens of single bytes (`<0xE4>`) are the exception: the library decodes a
  whole run of them, and one invalid byte makes U+FFFD of every byte of the run. So a run is held
  back until it ends or cannot become valid any more; after `_LONGEST_RUN` valid bytes whole
  characters are released all the same, and only then may a later invalid byte give another text.

The library's own DecodeStream is used for neither: it fails on an invalid byte after a valid
character in a run, waits for ever on a true U+FFFD, and gives back the prompt if that ends inside a
character.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

from tokenizers import Tokenizer

_LONGEST_RUN = 64
_LONGEST_CHARACTER = 4
_CONTEXT_TOKENS = 16
"""Tokens of a prompt that are looked at: more than a character and its left neighbour span."""

_HELD_BACK_TOKENS = 8
"""Tokens of an unusual byte-level decoder that may wait for the end of a character."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """The text of one growing sequence of ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that is certain now; never half a character."""
        ...

    def flush(self) -> str:
        """The rest of the text, once nothing can follow."""
        ...


class Detokenization:
    """What decoding needs to know of a tokenizer; makes the detokenizer of each text.

    Ids that the tokenizer does not know give no text, nor do special tokens unless asked for.

    Args:
        tokenizer: never changed, here or elsewhere, from now on.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special = MappingProxyType(
            {index: token.content for index, token in added.items() if token.special}
        )
        kinds = _decoder_kinds(tokenizer)
        self._skip_special = _starter(tokenizer, frozenset(self.special), kinds)
        self._show_special = _starter(tokenizer, frozenset(), kinds)

    def start(
        self, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A detokenizer for a text of its own, or for one that goes on where `context` ends.

        Args:
            context: ids before the text, e.g. of a prompt. None of their text is given out, but for
                the character that they leave unfinished.
            skip_special_tokens: whether special tokens give no text.
        """
        detokenizer = self._skip_special() if skip_special_tokens else self._show_special()
        detokenizer.follow(context[-_CONTEXT_TOKENS:])
        return detokenizer


def _starter(
    tokenizer: Tokenizer, hidden: frozenset[int], kinds: set[str]
) -> "Callable[[], _ByteLevelDetokenizer | _PieceDetokenizer]":
    """Makes detokenizers that give no text for `hidden`."""
    if kinds == {"ByteLevel"}:
        table = _ByteTable(tokenizer, hidden)
        return lambda: _ByteLevelDetokenizer(table)
    pieces = _PieceTable(tokenizer, hidden, kinds)
    return lambda: _PieceDetokenizer(pieces)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Names of the steps that the tokenizer's decoder consists of."""
    if tokenizer.decoder is None:
        return set()
    description = json.loads(tokenizer.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    return {step["type"] for step in steps} - {"Fuse"}


class _ByteTable(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, found when first asked for.

    None for hidden and unknown tokens.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._alphabet = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        data = self._find(token_id)
        # A model may give ids that the tokenizer does not know; those are not kept.
        if token_id < self._tokenizer.get_vocab_size():
            self[token_id] = data
        return data

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return b""
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:
            return token.encode()  # an added token, written as it is


class _ByteLevelDetokenizer:
    """See the module: tokens are bytes, the text is their UTF-8."""

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._unfinished = b""

    def follow(self, context: Sequence[int]) -> None:
        """Begins after `context`, in the middle of a character if it ends there."""
        self.push(context)

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([self._unfinished, *[table[token_id] for token_id in ids]])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._unfinished = data[used:]
        return text

    def flush(self) -> str:
        text = self._unfinished.decode("utf-8", "replace")
        self._unfinished = b""
        return text


class _PieceTable:
    """The library's decoding, and which tokens are bytes."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], kinds: set[str]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._has_bytes = "ByteFallback" in kinds
        # A decoder with ByteLevel among other steps; U+FFFD at the end may be half a character.
        self.may_end_inside_character = "ByteLevel" in kinds
        self._bytes: dict[int, int | None] = {}

    def shows(self, token_id: int) -> bool:
        """Whether the token is known and not hidden."""
        return token_id not in self._hidden and self._tokenizer.id_to_token(token_id) is not None

    def byte_of(self, token_id: int) -> int | None:
        """The byte that the token stands for, or None."""
        if not self._has_bytes:
            return None
        if token_id not in self._bytes:
            match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
            self._bytes[token_id] = int(match[1], 16) if match else None
        return self._bytes[token_id]

    def count_unfinished(self, ids: Sequence[int]) -> int:
        """How many ids at the end are bytes of a character that is not complete."""
        data = b""
        for token_id in reversed(ids[-_LONGEST_CHARACTER:]):
            byte = self.byte_of(token_id)
            if byte is None:
                return 0
            data = bytes([byte]) + data
            if byte >= 0xC0:  # the first byte of a character
                _, used = codecs.utf_8_decode(data, "replace", False)
                return len(data) - used
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """One-shot decoding by the library."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class _PieceDetokenizer:
    """See the module: the library decodes each token with its left neighbour."""

    def __init__(self, table: _PieceTable) -> None:
        self._table = table
        # The left neighbour: ids whose text is given out, and that text.
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._waiting: list[int] = []
        self._run = _ByteRun(table)

    def follow(self, context: Sequence[int]) -> None:
        """Begins after `context`, in the middle of a character if it ends there."""
        shown = [token_id for token_id in context if self._table.shows(token_id)]
        whole = len(shown) - self._table.count_unfinished(shown)
        words = [token_id for token_id in shown[:whole] if self._table.byte_of(token_id) is None]
        if whole:
            self._set_anchor(words or shown[:whole])
        if self._table.may_end_inside_character:
            self._anchor_text = self._anchor_text.removesuffix(_REPLACEMENT)
        self.push(shown[whole:])

    def push(self, ids: Sequence[int]) -> str:
        text = []
        for token_id in ids:
            if not self._table.shows(token_id):
                continue
            byte = self._table.byte_of(token_id)
            if byte is None:
                text.append(self._end_run())
                text.append(self._push_piece(token_id))
            else:
                text.append(self._run.push(token_id, byte, is_first=not self._anchor))
        return "".join(text)

    def flush(self) -> str:
        text = self._end_run()
        if self._waiting:
            text += self._decode_waiting()
        return text

    def _push_piece(self, token_id: int) -> str:
        self._waiting.append(token_id)
        if self._table.may_end_inside_character and len(self._waiting) < _HELD_BACK_TOKENS:
            whole = self._table.decode([*self._anchor, *self._waiting])
            if whole.endswith(_REPLACEMENT):
                return ""
        return self._decode_waiting()

    def _decode_waiting(self) -> str:
        ids, self._waiting = self._waiting, []
        whole = self._table.decode([*self._anchor, *ids])
        text = whole[len(self._anchor_text) :]
        if text or not self._anchor:
            self._set_anchor(ids)
        return text

    def _end_run(self) -> str:
        if not self._run.ids:
            return ""
        text = self._run.end(is_first=not self._anchor)
        if not self._anchor:
            self._set_anchor(self._run.ids)
        self._run = _ByteRun(self._table)
        return text

    def _set_anchor(self, ids: Sequence[int]) -> None:
        self._anchor = list(ids)
        self._anchor_text = self._table.decode(ids)


class _ByteRun:
    """Byte tokens that follow one another; see the module for what is held back."""

    def __init__(self, table: _PieceTable) -> None:
        self._table = table
        # At most the first `_LONGEST_RUN`: later ones change nothing on the left of what follows.
        self.ids: list[int] = []
        self._held = b""
        self._invalid = False
        self._flows = False

    def push(self, token_id: int, byte: int, *, is_first: bool) -> str:
        """Takes one more byte; `is_first` where nothing precedes the run."""
        if self._invalid:
            return _REPLACEMENT
        self._held += bytes([byte])
        if self._flows:
            return self._take_whole_characters()
        self.ids.append(token_id)
        try:
            codecs.utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            self._invalid = True
            self._held = b""
            return _REPLACEMENT * len(self.ids)
        if len(self.ids) < _LONGEST_RUN:
            return ""
        self._flows = True
        text = self._take_whole_characters()
        if is_first:  # the decoder treats the beginning of a text in its own way
            return self._table.decode(self.ids[: len(self.ids) - len(self._held)])
        return text

    def end(self, *, is_first: bool) -> str:
        """The text still held back, now that the run is over."""
        if self._invalid:
            return ""
        if self._flows:
            return self._held.decode("utf-8", "replace")
        if is_first:
            return self._table.decode(self.ids)
        try:
            return self._held.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(self._held)

    def _take_whole_characters(self) -> str:
        text, used = codecs.utf_8_decode(self._held, "replace", False)
        self._held = self._held[used:]
        return text


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte.

    Printable Latin-1 characters stand for themselves, the other bytes for those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
