"""A GGUF file with a tokenizer small enough to work out by hand.

Ids: 0 `<|unk|>`, 1 `<|start|>`, 2 `<|end|>`, 3 `<think>` (no special token), then byte b at 4 + b,
then the merges in order, then "xyz", which no merge leads to.
"""

from pathlib import Path
from typing import Any

from gguf import GGUFWriter

ADDED = ["<|unk|>", "<|start|>", "<|end|>", "<think>"]
TYPES = [2, 3, 3, 4]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "1 2", "Ċ Ċ"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def symbol(byte: int) -> str:
    """The character that stands for a byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in plain:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in plain].index(byte))


TOKENS = [
    *ADDED,
    *(symbol(byte) for byte in range(256)),
    *(merge.replace(" ", "") for merge in MERGES),
    "xyz",
]


def bytes_of(text: str) -> list[int]:
    """The ids of a text that no merge touches."""
    return [4 + byte for byte in text.encode()]


def token(text: str) -> int:
    """The id of a token as the vocabulary spells it."""
    return TOKENS.index(text)


def write_gguf(path: Path, **changes: Any) -> Path:
    """Writes the file.

    Args:
        path: where.
        changes: metadata by key with `__` for dots, without `tokenizer.ggml.`; None leaves it out.
    """
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [*TYPES, *[1] * (len(TOKENS) - len(TYPES))],
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
    }
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_chat_template(TEMPLATE)
    for key, value in {**values, **changes}.items():
        _add(writer, f"tokenizer.ggml.{key}" if "__" not in key else key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
