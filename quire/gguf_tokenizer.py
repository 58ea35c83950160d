"""Turns the tokenizer inside a GGUF file into the files that tokenizer libraries read.

Owns the mapping from `tokenizer.ggml.*` metadata to `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja` and `generation_config.json`. Done once, when a model is pulled; needs no
torch and touches no weights. Byte-level BPE only (`tokenizer.ggml.model` "gpt2"); anything else,
and any way of splitting text that is not in the table below, is refused by name, since a tokenizer
that is almost right degrades every answer in silence.

Sources: the GGUF specification of the metadata keys; the `tokenizer.json` files of the families in
the table for how each one splits text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quire.errors import PullFailed
from quire.gguf_metadata import read_metadata

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`; the others are ordinary tokens."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_DIGITS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_THREE_DIGITS = _WORDS_AND_DIGITS.replace("DIGITS", r"\p{N}{1,3}")
_BY_ONE_DIGIT = _WORDS_AND_DIGITS.replace("DIGITS", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How a family of tokenizers cuts text before merging.

    Attributes:
        pattern: each match is a piece; None for the pattern of GPT-2, which the library has.
        lone_digits: every digit is cut out first.
        compose: text is brought to Unicode form NFC first.
        whole_pieces: a piece that is a token is taken as it is, without merging.
        add_bos: a BOS goes in front where the file does not say.
    """

    pattern: str | None = None
    lone_digits: bool = False
    compose: bool = False
    whole_pieces: bool = False
    add_bos: bool = False


_GPT2 = _Split()
_LONE_DIGITS = _Split(lone_digits=True)
_LLAMA3 = _Split(pattern=_BY_THREE_DIGITS, whole_pieces=True, add_bos=True)
_CL100K = _Split(pattern=_BY_THREE_DIGITS)

_SPLITS: Mapping[str, _Split] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "olmo": _GPT2,
        "smollm": _LONE_DIGITS,
        "starcoder": _LONE_DIGITS,
        "refact": _LONE_DIGITS,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "dbrx": _CL100K,
        "smaug-bpe": _CL100K,
        "qwen2": _Split(pattern=_BY_ONE_DIGIT, compose=True),
        "tekken": _Split(pattern=_BY_CASE, whole_pieces=True, add_bos=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The tokenizer of one file, checked.

    Attributes:
        tokens: by id, in the byte alphabet of GPT-2 except for added ones.
        types: by id; see `_CONTROL`.
        merges: pairs, first ones first.
        split: how text is cut.
        special: token by role ("bos", "eos", "unk", "pad"), where the file has one.
        stop_ids: tokens that end a generation.
        add_bos: whether a prompt gets a BOS in front.
        add_eos: whether a prompt gets an EOS at its end.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[tuple[str, str]]
    split: _Split
    special: Mapping[str, int]
    stop_ids: Sequence[int]
    add_bos: bool
    add_eos: bool


_ROLES = MappingProxyType(
    {
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "unk": "unknown_token_id",
        "pad": "padding_token_id",
    }
)
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Writes the tokenizer files of `gguf` into `folder`.

    Raises:
        PullFailed: the file is damaged, or its tokenizer is of a kind that is not converted.
    """
    try:
        metadata = read_metadata(gguf)
        vocabulary = _vocabulary(metadata)
        tokenizer = _tokenizer(vocabulary)
    except ValueError as error:
        raise PullFailed(f"{gguf.name}: {error}") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary, metadata))
    _write_json(folder / "generation_config.json", _generation_config(vocabulary, metadata))
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is converted, "
            "so pull this model from the hub"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "missing"))
    if pre not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {pre}; known are {', '.join(sorted(_SPLITS))}")
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError("tokenizer.ggml.add_space_prefix is true, which is not converted")
    split = _SPLITS[pre]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens is missing, has duplicates, or lacks token types")
    special = {
        role: _checked_id(metadata, key, len(tokens))
        for role, key in _ROLES.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    stops = [
        _checked_id(metadata, key, len(tokens))
        for key in _STOPS
        if f"tokenizer.ggml.{key}" in metadata
    ]
    return _Vocabulary(
        tokens=tokens,
        types=types,
        merges=_merges(metadata.get("tokenizer.ggml.merges")),
        split=split,
        special=special,
        stop_ids=list(dict.fromkeys(stops)),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", split.add_bos) and "bos" in special,
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in special,
    )


def _checked_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int:
    token_id = int(metadata[f"tokenizer.ggml.{key}"])
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"tokenizer.ggml.{key} is {token_id}, the vocabulary has {vocab_size}")
    return token_id


def _merges(lines: Sequence[str] | None) -> list[tuple[str, str]]:
    if not lines:
        raise ValueError("tokenizer.ggml.merges is missing")
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or not left or not right or " " in right:
            raise ValueError(f"tokenizer.ggml.merges has an entry that is no pair: {line!r}")
        merges.append((left, right))
    return merges


def _tokenizer(vocabulary: _Vocabulary) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(
            vocab=ids,
            merges=list(vocabulary.merges),
            ignore_merges=vocabulary.split.whole_pieces,
        )
    # The library raises bare Exception, e.g. for a merge whose parts are no tokens.
    except Exception as error:
        raise ValueError(f"tokens and merges do not fit together ({error})") from error
    tokenizer = Tokenizer(model)
    if vocabulary.split.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(vocabulary, special=True))
    tokenizer.add_tokens(_added(vocabulary, special=False))
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise ValueError("added tokens changed the size of the vocabulary")
    if vocabulary.add_bos or vocabulary.add_eos:
        tokenizer.post_processor = _frame(vocabulary)
    return tokenizer


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    if split.pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split.lone_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    return by_words


def _added(vocabulary: _Vocabulary, *, special: bool) -> list[AddedToken]:
    named = {*vocabulary.special.values(), *vocabulary.stop_ids}
    return [
        AddedToken(token, normalized=False, special=special)
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if (kind in (_CONTROL, _UNKNOWN) or index in named) == special
        and (special or kind == _USER_DEFINED)
    ]


def _frame(vocabulary: _Vocabulary) -> TemplateProcessing:
    """Puts BOS and EOS around each sequence."""
    roles = [*(["bos"] if vocabulary.add_bos else []), *(["eos"] if vocabulary.add_eos else [])]
    names = {role: vocabulary.tokens[vocabulary.special[role]] for role in roles}

    def around(sequence: str, number: int) -> list[str]:
        parts = [names.get("bos"), sequence, names.get("eos")]
        return [f"{part}:{number}" for part in parts if part is not None]

    return TemplateProcessing(
        single=around("$A", 0),
        pair=[*around("$A", 0), *around("$B", 1)],
        special_tokens=[(names[role], vocabulary.special[role]) for role in roles],
    )


def _tokenizer_config(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(vocabulary.add_bos),
        "add_eos_token": bool(vocabulary.add_eos),
        "clean_up_tokenization_spaces": False,
    }
    for role, index in vocabulary.special.items():
        config[f"{role}_token"] = vocabulary.tokens[index]
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length:
        config["model_max_length"] = int(length)
    return config


def _generation_config(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    stops = list(vocabulary.stop_ids)
    config: dict[str, Any] = {}
    if "bos" in vocabulary.special:
        config["bos_token_id"] = vocabulary.special["bos"]
    if stops:
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    if "pad" in vocabulary.special:
        config["pad_token_id"] = vocabulary.special["pad"]
    for name, key in (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p")):
        if f"general.sampling.{key}" in metadata:
            config[name] = metadata[f"general.sampling.{key}"]
    return config


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
