"""A tokenizer of single bytes: id = byte, then a few special tokens. Any text, nothing learned."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool|>",
    "<|mask|>",
    "<|sep|>",
    "<|pad|>",
)
"""Ids from 256 on. With them the vocabulary is a prime, 263, which shows padding mistakes."""

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
EOS_TOKEN_IDS = (IM_END, ENDOFTEXT)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_byte_tokenizer(
    folder: Path, *, extra_tokens: Sequence[str] = (), chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`.

    Args:
        folder: made if it is not there.
        extra_tokens: more tokens, ids from VOCAB_SIZE on. They are decoded, and never come out of
            encoding, since nothing merges into them.
        chat_template: None leaves the file out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for number, token in enumerate(extra_tokens):
        vocab["".join(alphabet[byte] for byte in token.encode())] = VOCAB_SIZE + number
    # Special tokens must have their ids before the extra ones, so they stand in the model as well.
    vocab |= {token: 256 + number for number, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[IM_END - 256],
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the others are moved to 256 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
