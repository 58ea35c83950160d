import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from services.tokenizer.detokenizer import Detokenization
from tests.assets.tokenizers import (
    byte_ids,
    byte_level,
    fallback_ids,
    piece_id,
    sentencepiece_like,
)

TEXTS = [
    "é",
    "ď",
    "中文",
    "日本語",
    "مرحبا",
    "🌶",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "สวัสดี",
    "a\x00b",
    "plain text",
]
TWINS = ["byte_level", "sentencepiece_like"]


def tokenizer_of(twin: str) -> Tokenizer:
    return {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like}[twin]()


def ids_of(twin: str, tokenizer: Tokenizer, data: bytes) -> list[int]:
    return byte_ids(data) if twin == "byte_level" else fallback_ids(tokenizer, data)


def deltas(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenization(tokenizer).start(context)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def cuts(ids: Sequence[int], source: random.Random) -> Iterator[Sequence[int]]:
    """`ids` in pieces of 0 to 4."""
    done = 0
    while done < len(ids):
        size = source.randrange(5)
        yield ids[done : done + size]
        done += size


def one_shot(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_many_tokens_come_whole(twin: str, text: str) -> None:
    tokenizer = tokenizer_of(twin)
    parts = deltas(tokenizer, ids_of(twin, tokenizer, text.encode()))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_character_comes_with_its_last_byte(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenization(byte_level()).start()
    so_far = ""
    for end, token_id in enumerate(byte_ids(data), start=1):
        so_far += detokenizer.push([token_id])
        assert so_far == data[:end].decode("utf-8", "ignore")


@pytest.mark.parametrize("twin", TWINS)
def test_text_flows_again_after_an_invalid_byte(twin: str) -> None:
    tokenizer = tokenizer_of(twin)
    if twin == "byte_level":
        cases = {
            "\ufffdab": byte_ids(b"\xc3ab"),
            "\ufffdx": byte_ids(b"\xf0\x9fx"),
        }
    else:
        a, x = tokenizer.token_to_id("▁a"), tokenizer.token_to_id("x")
        cases = {
            "a\ufffd a": [a, *fallback_ids(tokenizer, b"\xc3"), a],
            "a\ufffd\ufffdx": [a, *fallback_ids(tokenizer, b"\xf0\x9f"), x],
        }
    for text, ids in cases.items():
        parts = deltas(tokenizer, ids)
        assert "".join(parts) == text == one_shot(tokenizer, ids)
        assert parts[-2] + parts[-1] == text[-1] or parts[-2].endswith(text[-1])


def wordpiece() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["[UNK]", "hello", "##lo", "world", ".", "n", "'", "##t"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "▁", "▁a", "a", "b", "▁▁", "<0x41>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def suffixed() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "hel", "lo</w>", "wor", "ld</w>", "!</w>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def without_decoder() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "one", "two", "three"])}
    return Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))


def byte_level_and_more() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("alpha", "omega"), decoders.ByteLevel(), decoders.Fuse()]
    )
    return tokenizer


def byte_level_fused() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def unstripped() -> Tokenizer:
    return sentencepiece_like(add_space=False)


EVERY_KIND: list[Callable[[], Tokenizer]] = [
    byte_level,
    byte_level_fused,
    sentencepiece_like,
    unstripped,
    wordpiece,
    metaspace,
    suffixed,
    without_decoder,
]


@pytest.mark.parametrize("make", EVERY_KIND)
def test_random_ids_in_random_cuts_give_what_decoding_all_gives(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    detokenization = Detokenization(tokenizer)
    source = random.Random(1)
    size = tokenizer.get_vocab_size()
    for _ in range(400):
        # Two ids more than there are.
        ids = [source.randrange(size + 2) for _ in range(source.randrange(40))]
        detokenizer = detokenization.start()
        text = "".join(detokenizer.push(cut) for cut in cuts(ids, source)) + detokenizer.flush()
        assert text == one_shot(tokenizer, ids), ids


@pytest.mark.parametrize("make", EVERY_KIND)
def test_special_tokens_show_as_the_library_decodes_them(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    detokenization = Detokenization(tokenizer)
    source = random.Random(4)
    known = range(tokenizer.get_vocab_size() + 2)
    special = sorted(detokenization.special) or [0]
    for _ in range(400):
        ids = [
            source.choice(special if source.random() < 0.3 else known)
            for _ in range(source.randrange(40))
        ]
        detokenizer = detokenization.start(skip_special_tokens=False)
        text = "".join(detokenizer.push(cut) for cut in cuts(ids, source)) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=False), ids


@pytest.mark.parametrize("twin", TWINS)
def test_special_tokens_show_after_a_prompt_too(twin: str) -> None:
    tokenizer = tokenizer_of(twin)
    special = tokenizer.id_to_token(2)
    data = "é!".encode()
    prompt = [1, *ids_of(twin, tokenizer, data[:1])]
    ids = [*ids_of(twin, tokenizer, data[1:]), 2, tokenizer.token_to_id("a")]
    detokenizer = Detokenization(tokenizer).start(prompt, skip_special_tokens=False)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert text == f"é!{special}a"


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("kind", ["any", "nearly valid"])
def test_random_bytes_give_what_decoding_all_gives(twin: str, kind: str) -> None:
    tokenizer = tokenizer_of(twin)
    detokenization = Detokenization(tokenizer)
    source = random.Random(2)
    for _ in range(400):
        if kind == "any":
            data = source.randbytes(source.randrange(1, 40))
        else:
            characters = "".join(source.choices("aé中🌶\x00 ", k=source.randrange(1, 12)))
            data = bytearray(characters.encode())
            del data[source.randrange(len(data))]
            data = bytes(data)
        ids = ids_of(twin, tokenizer, data)
        for place in source.sample(range(len(ids) + 1), k=min(2, len(ids))):
            ids.insert(place, tokenizer.token_to_id("a"))
        detokenizer = detokenization.start()
        text = "".join(detokenizer.push(cut) for cut in cuts(ids, source)) + detokenizer.flush()
        assert text == one_shot(tokenizer, ids), data


def test_a_decoder_that_changes_the_text_of_bytes_holds_half_characters_back() -> None:
    tokenizer = byte_level_and_more()
    ids = [piece_id(tokenizer, "alpha"), *byte_ids("é!".encode()), *byte_ids(b"\xc3!")]
    parts = deltas(tokenizer, ids)
    assert parts == ["omega", "", "é", "!", "", "\ufffd!", ""]
    assert "".join(parts) == one_shot(tokenizer, ids)


def test_a_real_replacement_character_does_not_wait() -> None:
    tokenizer = byte_level()
    assert deltas(tokenizer, [piece_id(tokenizer, "\ufffd"), *byte_ids(b"a")]) == [
        "\ufffd",
        "a",
        "",
    ]


def test_unknown_and_special_ids_give_no_text() -> None:
    tokenizer = byte_level()
    ids = [*byte_ids(b"a"), 2, 99_999, *byte_ids(b"b")]
    assert deltas(tokenizer, ids) == ["a", "", "", "b", ""]
    twin = sentencepiece_like()
    b = twin.token_to_id("b")
    assert deltas(twin, [twin.token_to_id("▁a"), 2, 99_999, b]) == ["a", "", "", "b", ""]


def test_a_character_may_go_on_after_a_special_token() -> None:
    tokenizer = byte_level()
    first, *rest = byte_ids("中".encode())
    assert (
        "".join(deltas(tokenizer, [first, 2, *rest]))
        == "中"
        == one_shot(tokenizer, [first, 2, *rest])
    )


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("text", ["🌶", "中文", "สวัสดี", "é"])
def test_a_prompt_that_ends_inside_a_character_is_not_given_back(twin: str, text: str) -> None:
    tokenizer = tokenizer_of(twin)
    data = f"Hello world {text}!".encode()
    begin = len(b"Hello world ")
    for cut in range(begin, len(data)):
        ids = ids_of(twin, tokenizer, data)
        parts = deltas(tokenizer, ids[cut:], context=ids[:cut])
        whole = len(data[:cut].decode("utf-8", "ignore"))
        assert "".join(parts) == data.decode()[whole:]


@pytest.mark.parametrize("twin", TWINS)
def test_a_prompt_may_be_less_than_a_character(twin: str) -> None:
    tokenizer = tokenizer_of(twin)
    ids = ids_of(twin, tokenizer, "🌶!".encode())
    assert "".join(deltas(tokenizer, ids[2:], context=ids[:2])) == "🌶!"


def test_a_prompt_inside_a_character_of_an_unusual_decoder_is_not_given_back() -> None:
    tokenizer = byte_level_and_more()
    ids = byte_ids("say 🌶!".encode())
    assert "".join(deltas(tokenizer, ids[6:], context=ids[:6])) == "🌶!"


def test_a_text_goes_on_where_the_prompt_ends_with_its_space() -> None:
    tokenizer = sentencepiece_like()
    a, b = tokenizer.token_to_id("▁a"), tokenizer.token_to_id("▁b")
    assert "".join(deltas(tokenizer, [b], context=[a])) == " b"
    assert "".join(deltas(tokenizer, [b])) == "b"


def test_a_prompt_of_special_tokens_is_no_context() -> None:
    tokenizer = sentencepiece_like()
    assert "".join(deltas(tokenizer, [tokenizer.token_to_id("▁b")], context=[1, 1])) == "b"


def test_a_prompt_that_ends_in_invalid_bytes_does_not_spoil_the_text() -> None:
    for tokenizer, ids in (
        (byte_level(), byte_ids(b"\xff\xffab")),
        (sentencepiece_like(), fallback_ids(sentencepiece_like(), b"\xff\xffab")),
    ):
        assert "".join(deltas(tokenizer, ids[2:], context=ids[:2])) == "ab"


def test_long_runs_of_byte_tokens_flow() -> None:
    tokenizer = sentencepiece_like()
    text = "ကြိုဆိုပါတယ်" * 10
    parts = deltas(tokenizer, fallback_ids(tokenizer, text.encode()))
    assert "".join(parts) == text
    assert sum(map(bool, parts)) > 50  # not all of it at the end
    assert all("\ufffd" not in part for part in parts)


def test_the_first_characters_of_a_long_run_lose_their_space_as_ever() -> None:
    tokenizer = sentencepiece_like()
    data = b" " + "é".encode() * 60
    ids = [*fallback_ids(tokenizer, data), tokenizer.token_to_id("▁a")]
    assert "".join(deltas(tokenizer, ids)) == one_shot(tokenizer, ids) == "é" * 60 + " a"


def test_after_a_long_run_only_the_invalid_byte_is_replaced() -> None:
    tokenizer = sentencepiece_like()
    ids = [*fallback_ids(tokenizer, "é".encode() * 60 + b"\xc3a"), tokenizer.token_to_id("▁a")]
    assert "".join(deltas(tokenizer, ids)) == "é" * 60 + "\ufffda a"


def test_invalid_runs_do_not_wait_and_do_not_grow() -> None:
    tokenizer = sentencepiece_like()
    ids = fallback_ids(tokenizer, b"\xff" * 1000)
    parts = deltas(tokenizer, ids)
    assert parts == ["\ufffd"] * 1000 + [""]
