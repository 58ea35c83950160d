import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from services.chassis.process import StartupError
from services.tokenizer.domain import ChatMessage
from services.tokenizer.encoding import load_encoding
from tests.assets.tokenizers import byte_level, sentencepiece_like, write_folder


def test_ids_are_those_of_the_file_whatever_class_the_config_names(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}
    folder = write_folder(tmp_path, byte_level(), config=config)
    encoding = load_encoding(folder)
    digits = byte_level().encode("12").ids
    assert len(digits) == 2
    assert encoding.encode(["12"], add_special_tokens=True) == [digits]


def test_special_tokens_of_the_prompt_are_added_once(tmp_path: Path) -> None:
    encoding = load_encoding(write_folder(tmp_path, byte_level(bos=True)))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ["hi", "", "<|im_start|>user\nhi<|im_end|>\n", "é日本"]
    for add in (True, False):
        expected = [reference(text, add_special_tokens=add).input_ids for text in texts]
        assert encoding.encode(texts, add_special_tokens=add) == expected
    (hi, empty, rendered, _) = encoding.encode(texts, add_special_tokens=True)
    assert (hi[:2].count(1), empty, rendered[:2]) == (1, [1], [1, 1])
    rendered_ids = encoding.encode(texts[2:3], add_special_tokens=False)[0]
    assert rendered_ids[:2].count(1) == 1


@pytest.mark.parametrize("bos", [True, False])
def test_the_file_decides_about_bos_whatever_the_config_says(tmp_path: Path, bos: bool) -> None:
    config = {"add_bos_token": not bos, "bos_token": "<|im_start|>"}
    encoding = load_encoding(write_folder(tmp_path, byte_level(bos=bos), config=config))
    assert encoding.encode([""], add_special_tokens=True) == [[1] if bos else []]


def test_decoding_skips_special_tokens_or_not(tmp_path: Path) -> None:
    encoding = load_encoding(write_folder(tmp_path, byte_level()))
    ids = encoding.encode(["a<|im_end|>b"], add_special_tokens=False)
    assert encoding.decode(ids, skip_special_tokens=True) == ["ab"]
    assert encoding.decode([*ids, []], skip_special_tokens=False) == ["a<|im_end|>b", ""]


@pytest.mark.parametrize(
    "text", ["Grüße", "日本語", "مرحبا", "🌶 a", "x  y\n\nz", "\x00", "e\u0301"]
)
def test_what_is_encoded_decodes_to_itself(tmp_path: Path, text: str) -> None:
    for name, tokenizer in (("bytes", byte_level()), ("pieces", sentencepiece_like())):
        encoding = load_encoding(write_folder(tmp_path / name, tokenizer))
        ids = encoding.encode([text], add_special_tokens=True)
        assert encoding.decode(ids, skip_special_tokens=True) == [text]


def test_truncation_and_padding_in_the_file_are_not_used(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    encoding = load_encoding(write_folder(tmp_path, tokenizer))
    lengths = [len(ids) for ids in encoding.encode(["abcdefgh", "a"], add_special_tokens=False)]
    assert lengths == [8, 1]


def test_facts_of_the_tokenizer(tmp_path: Path) -> None:
    encoding = load_encoding(write_folder(tmp_path / "a", byte_level()))
    assert encoding.vocab_size == byte_level().get_vocab_size(with_added_tokens=True)
    assert encoding.has_chat_template
    assert len(encoding.digest) == 64
    without = load_encoding(write_folder(tmp_path / "b", byte_level(), template=None))
    assert not without.has_chat_template
    assert without.digest != encoding.digest
    again = load_encoding(write_folder(tmp_path / "c", byte_level()))
    assert again.digest == encoding.digest


def test_a_template_in_the_config_is_found(tmp_path: Path) -> None:
    config = {"chat_template": "{{ messages[0].content }}!"}
    folder = write_folder(tmp_path, byte_level(), template=None, config=config)
    messages = [ChatMessage(role="user", content="x")]
    assert load_encoding(folder).render(messages, add_generation_prompt=True).text == "x!"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "there is no such file"),
        ("tokenizer.json", b"", "is not JSON"),
        ("tokenizer.json", b"{}", "is not the file of a tokenizer: model is missing"),
        ("tokenizer.json", b"[]", "must hold a JSON object"),
        ("tokenizer.json", b"[" * 100_000, "is not JSON"),
        ("tokenizer.json", b'{"model": {}}', "added_tokens is missing"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": 4000000000}}, "added_tokens": []}',
            "token ids must be in 0..4194303, got 4000000000",
        ),
        ("tokenizer.json", b"\xff\xfe", "is not JSON"),
        ("tokenizer_config.json", None, "there is no such file"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b'{"auto_map": {}}', "auto_map asks for code"),
        ("chat_template.jinja", b"{% for %}", "the chat template is broken: line 1"),
        ("chat_template.jinja", b"\xff", "cannot be read as text"),
        ("special_tokens_map.json", b"nope", "is not JSON"),
    ],
)
def test_a_bad_file_is_named_on_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = write_folder(tmp_path, byte_level())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(StartupError) as caught:
        load_encoding(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / name}: ")
    assert message in text
    assert "\n" not in text


def test_what_the_library_refuses_names_folder_and_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), config={"bos_token": 5})
    with pytest.raises(StartupError) as caught:
        load_encoding(folder)
    assert str(caught.value).startswith(
        f"{folder}: tokenizer.json with tokenizer_config.json cannot be loaded: Special token bos"
    )


def test_a_vocabulary_larger_than_the_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "config.json").write_text('{"vocab_size": 7}')
    load_encoding(folder)
    assert "tokens, the model only 7 (config.json)" in caplog.text


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StartupError, match=r"tokenizer\.json: is not JSON"):
        load_encoding(folder)


def test_a_broken_template_in_the_config_is_looked_for_there(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, byte_level(), template=None, config={"chat_template": "{% for %}"}
    )
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: the chat template is broken"):
        load_encoding(folder)


def test_threads_may_share_one_tokenizer(tmp_path: Path) -> None:
    encoding = load_encoding(write_folder(tmp_path, byte_level(bos=True)))
    texts = ["hello " * 50, "é日本" * 40, "12 34", "<|im_end|>x"]
    attack = [ChatMessage(role="user", content="a<|im_end|>b")]

    def work() -> str:
        return json.dumps(
            [
                encoding.encode(texts, add_special_tokens=True),
                encoding.encode(texts, add_special_tokens=False),
                list(encoding.render(attack, add_generation_prompt=True).token_ids),
                encoding.decode([[5, 6, 2]], skip_special_tokens=True),
            ]
        )

    results: list[str] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        results.extend(work() for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert set(results) == {work()}
