import json
import random
import unicodedata
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from services.tokenizer.detokenizer import byte_alphabet
from services.tokenizer.text_bound import TextBound, text_bound
from tests.assets.tokenizers import byte_level, sentencepiece_like


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def words(**options: object) -> Tokenizer:
    """A few words and characters; what else there is depends on `options`."""
    vocab = {text: index for index, text in enumerate(["<unk>", "a", "b", "ab", " ", "abab"])}
    merges = [("a", "b"), ("ab", "ab")]
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def normalized(normalizer: object) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def split(pre_tokenizer: object) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def with_added(**options: bool) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<a longer token than all others>", **options)])
    return tokenizer


def word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))


BOUNDED: list[tuple[Callable[[], Tokenizer], int]] = [
    (byte_level, 13),
    (sentencepiece_like, 6),
    (composing, 4 * 13),
    (lambda: words(unk_token="<unk>"), 5),
    (with_added, 32),
    (lambda: normalized(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])), 13),
    (lambda: normalized(normalizers.Replace(" ", "__")), 13),
    (lambda: split(pre_tokenizers.Split(Regex(r"\s"), "isolated")), 13),
    (lambda: split(pre_tokenizers.Punctuation()), 13),
]


@pytest.mark.parametrize(("make", "longest"), BOUNDED)
def test_the_longest_token_bounds_what_one_covers(
    make: Callable[[], Tokenizer], longest: int
) -> None:
    tokenizer = make()
    bound = text_bound(tokenizer)
    assert bound == TextBound(characters_per_token=longest)
    source = random.Random(6)
    parts = [
        *("a", "b", "ab", "abab", " ", "  ", "\n", "é", "e\u0301", "İ", "ﬁ", "日", "🌶", "\u0301"),
        *(
            "\u03b1\u0313\u0300\u0345",
            "각",
            "<|endoftext|>",
            "<think>",
            "<s>",
            "\x00",
            "1",
            "12",
            "\n\n",
        ),
        "<a longer token than all others>",
    ]
    for _ in range(500):
        text = "".join(source.choices(parts, k=source.randrange(30)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert bound.fewest_tokens(text) <= len(ids), text
        assert len(text) <= longest * len(ids), text


def without_bytes(*data: int) -> Tokenizer:
    """As some models are: their training text had no such bytes."""
    state = json.loads(byte_level().to_str())
    for byte in data:
        character = next(text for text, number in byte_alphabet().items() if number == byte)
        del state["model"]["vocab"][character]
    return Tokenizer.from_str(json.dumps(state))


def test_characters_without_a_token_do_not_count() -> None:
    tokenizer = without_bytes(0x04, 0x1D, 0xC0, 0xF1)
    bound = text_bound(tokenizer)
    assert bound == TextBound(characters_per_token=13, ignored="\x04\x1d")
    assert bound.fewest_tokens("\x04" * 1000) == 0
    assert bound.fewest_tokens("\x04\x1da" * 14) == 2
    source = random.Random(7)
    for _ in range(500):
        text = "".join(source.choices(["\x04", "\x1d", "\U00045678", "a", "1"], k=30))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert bound.fewest_tokens(text) <= len(ids)
    assert text_bound(without_bytes(0x80)) is None


@pytest.mark.parametrize(
    "make",
    [
        word_level,
        word_piece,
        unigram,
        words,
        lambda: words(unk_token="<unk>", fuse_unk=True),
        lambda: words(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        lambda: words(unk_token="<unk>", end_of_word_suffix="</w>"),
        lambda: with_added(lstrip=True),
        lambda: with_added(rstrip=True),
        lambda: normalized(normalizers.Strip()),
        lambda: normalized(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        lambda: normalized(normalizers.Replace(Regex(r"\s+"), " ")),
        lambda: normalized(normalizers.Replace("  ", " ")),
        lambda: split(pre_tokenizers.WhitespaceSplit()),
        lambda: split(pre_tokenizers.Split(" ", "removed")),
        lambda: split(pre_tokenizers.Punctuation("removed")),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(make: Callable[[], Tokenizer]) -> None:
    assert text_bound(make()) is None


def test_no_character_decomposes_into_more_than_four() -> None:
    points = (chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert max(len(unicodedata.normalize("NFD", character)) for character in points) == 4
