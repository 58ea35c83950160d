"""Small tokenizers of every kind, and model folders that hold them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

SMOLLM_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<end_turn>")
FIRST_BYTE = len(SPECIAL)

# Tokens that a generation may hold and that no text is encoded to.
PIECES = (
    "alpha",
    " beta",
    " gam",
    "ma",
    " delta",
    "ABC",
    "DEF",
    "GHI",
    "ABCD",
    "?\n",
    "...",
    '","',
    " Alice",
    "!",
    "\n",
    "inj",
    "ury.",
    "hello",
    "\ufffd",
)


def byte_alphabet() -> dict[int, str]:
    """The character of each byte, as byte-level vocabularies write it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def written(text: str) -> str:
    """`text` in the byte alphabet."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def byte_level(*, bos: bool = False, more: Iterable[str] = ()) -> Tokenizer:
    """256 bytes, four special tokens in front, some whole words behind, a merge, lone digits."""
    alphabet = byte_alphabet()
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {alphabet[byte]: FIRST_BYTE + byte for byte in range(256)}
    for piece in (*(written(piece) for piece in PIECES), "ĊĊ", "12", *map(written, more)):
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer


def piece_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a whole word of `byte_level`."""
    token_id = tokenizer.token_to_id(written(text))
    assert token_id is not None
    return token_id


def byte_ids(data: bytes) -> list[int]:
    """One id per byte of `byte_level`."""
    return [FIRST_BYTE + byte for byte in data]


def sentencepiece_like(*, add_space: bool = True) -> Tokenizer:
    """Words with ▁ for the space, and `<0x00>` … `<0xFF>` for what is not in the vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcxyz!.,/<>|_imendstarsuobeyh\n", "▁a", "▁b", "▁hello"]
    vocab: dict[str, int] = {}
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *steps] if add_space else steps
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if add_space else []),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def fallback_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte of `sentencepiece_like`."""
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    template: str | None = SMOLLM_TEMPLATE,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """A model folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written_config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(written_config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder
