"""How to sample and when to stop, checked when it is written down."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequest, NotSupported

_LARGEST_FLOAT32 = 3.4028234663852886e38
_MOST_STOPS = 16
_LONGEST_STOP = 256

_LATER = MappingProxyType(
    {
        "n": "several answers to one prompt",
        "best_of": "the best of several answers",
        "use_beam_search": "beam search",
        "beam_width": "beam search",
        "min_p": "dropping tokens far less likely than the best",
        "typical_p": "locally typical sampling",
        "presence_penalty": "penalties",
        "frequency_penalty": "penalties",
        "repetition_penalty": "penalties",
        "logit_bias": "a bias per token",
        "bad_words": "forbidden words",
        "allowed_token_ids": "a choice of tokens",
        "min_tokens": "a least number of tokens",
        "stop_token_ids": "stop tokens of one's own",
        "include_stop_str_in_output": "keeping the stop string in the text",
        "logprobs": "log probabilities",
        "prompt_logprobs": "log probabilities of the prompt",
        "structured_outputs": "answers by a grammar",
        "guided_decoding": "answers by a grammar",
        "response_format": "answers by a grammar",
        "truncate_prompt_tokens": "shortening of the prompt",
        "skip_special_tokens": "special tokens in the text",
        "detokenize": "answers without text",
        "priority": "priorities",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop. None leaves a choice to the model's own configuration.

    Attributes:
        temperature: divides the logits; >= 0, and 0 takes the most likely token every time.
        top_p: keeps the smallest set of tokens whose probability reaches this; in (0, 1].
        top_k: keeps the k most likely tokens; >= 0, and 0 keeps all.
        seed: decides the random draws, 0 to 2**64 - 1; None takes a new one every time.
        max_tokens: most tokens to generate, >= 1; None takes what the context has room for.
        ignore_eos: goes on after the model's end-of-sequence tokens.
        stop: text that ends the answer and is cut from it; at most 16 strings of 1 to 256
            characters. One string may be given as it is.

    Raises:
        InvalidRequest: a value is out of range; names the field.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        _check_number("temperature", self.temperature, 0.0, _LARGEST_FLOAT32, "finite and >= 0")
        _check_number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]")
        if self.top_p == 0:
            raise InvalidRequest("top_p", "must be in (0, 1], got 0")
        _check_whole("top_k", self.top_k, 0, 2**32 - 1, ">= 0 (0 keeps all tokens)")
        _check_whole("seed", self.seed, 0, 2**64 - 1, "from 0 to 2**64 - 1")
        _check_whole("max_tokens", self.max_tokens, 1, 2**32 - 1, ">= 1")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        _check_stop(stop)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Makes parameters of keywords that came from outside, e.g. from JSON.

        Raises:
            NotSupported: a keyword belongs to a later version; names it.
            InvalidRequest: a keyword is unknown, or a value is out of range; names it.
        """
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in known:
                continue
            if name in _LATER:
                raise NotSupported(f"{name} ({_LATER[name]}) is not available in this version")
            raise InvalidRequest(
                name, f"is no sampling parameter; known: {', '.join(sorted(known))}"
            )
        return cls(**values)


def _check_number(name: str, value: object, least: float, most: float, rule: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"must be a number, got {value!r}")
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(name, f"must be {rule}, got {value!r}")


def _check_whole(name: str, value: object, least: int, most: int, rule: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise InvalidRequest(name, f"must be {rule}, got {value}")


def _check_stop(stop: tuple[object, ...]) -> None:
    if len(stop) > _MOST_STOPS:
        raise InvalidRequest("stop", f"must be at most {_MOST_STOPS} strings, got {len(stop)}")
    for text in stop:
        if not isinstance(text, str):
            raise InvalidRequest("stop", f"must be strings, got {text!r}")
        if not 1 <= len(text) <= _LONGEST_STOP:
            raise InvalidRequest(
                "stop", f"must be 1 to {_LONGEST_STOP} characters each, got {len(text)}"
            )
