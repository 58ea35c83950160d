"""How to sample and when to stop, checked when it is written down."""

import difflib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequest, NotSupported

_LARGEST_FLOAT32 = 3.4028234663852886e38
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_STOP_TOKENS = 128

LATER: Mapping[str, str] = MappingProxyType(
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
        "logprobs": "log probabilities",
        "prompt_logprobs": "log probabilities of the prompt",
        "structured_outputs": "answers by a grammar",
        "guided_decoding": "answers by a grammar",
        "response_format": "answers by a grammar",
        "truncate_prompt_tokens": "shortening of the prompt",
        "detokenize": "answers without text",
        "priority": "priorities",
    }
)
"""Parameters of later versions, each with what it would bring; refused by name, never ignored."""


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
        stop_token_ids: tokens that end the answer, as end-of-sequence tokens do and whatever
            `ignore_eos` says; at most 128, each below the model's vocabulary size.
        include_stop_str_in_output: the text ends with the stop string, or with the text of the
            token, that ended the answer.
        skip_special_tokens: leaves special tokens out of the text.

    Raises:
        InvalidRequest: values are out of range, or a name is unknown; names all their fields.
        NotSupported: a name belongs to a later version.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, *positional: Any, **values: Any) -> "SamplingParams":
        """Refuses names that `__init__` would only call unexpected."""
        if positional:
            raise InvalidRequest("sampling_params", "must be keywords, e.g. temperature=0")
        if wrong := _unknown(values, cls):
            first, *others = wrong
            raise InvalidRequest(*first, *others)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, value in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if isinstance(value, str) and name == "stop":
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
                object.__setattr__(self, name, tuple(value))
        wrong = list(self._violations())
        if wrong:
            first, *others = wrong
            raise InvalidRequest(*first, *others)

    def _violations(self) -> Iterator[tuple[str, str]]:
        most = _LARGEST_FLOAT32
        yield from _number(
            "temperature", self.temperature, 0.0, most, f"finite and from 0 to {most:.7e}"
        )
        yield from _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", zero=False)
        yield from _whole(
            "top_k", self.top_k, 0, 2**32 - 1, f"from 0 to {2**32 - 1} (0 keeps all tokens)"
        )
        yield from _whole("seed", self.seed, 0, 2**64 - 1, "from 0 to 2**64 - 1")
        yield from _whole("max_tokens", self.max_tokens, 1, 2**32 - 1, f"from 1 to {2**32 - 1}")
        yield from _flag("ignore_eos", self.ignore_eos)
        yield from _stop(self.stop)
        yield from _stop_token_ids(self.stop_token_ids)
        yield from _flag("include_stop_str_in_output", self.include_stop_str_in_output)
        yield from _flag("skip_special_tokens", self.skip_special_tokens)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Makes parameters of keywords that came from outside, e.g. from JSON.

        Raises:
            NotSupported: a keyword belongs to a later version; names it.
            InvalidRequest: keywords are unknown or values out of range; names all of them.
        """
        known = {field.name for field in fields(cls)}
        wrong = _unknown(values, cls)
        try:
            params = cls(**{name: value for name, value in values.items() if name in known})
        except InvalidRequest as error:
            wrong += error.violations
        if wrong:
            first, *others = wrong
            raise InvalidRequest(*first, *others)
        return params


# What `help` shows of the class is what `__init__` takes, in spite of `__new__`. `inspect` reads
# this attribute; the type of a class does not list it.
_TAKEN = inspect.signature(SamplingParams.__init__)
SamplingParams.__signature__ = _TAKEN.replace(  # type: ignore[attr-defined]
    parameters=list(_TAKEN.parameters.values())[1:]
)


def _unknown(names: Iterable[str], params: type[SamplingParams]) -> list[tuple[str, str]]:
    """What is wrong with names that are no parameters.

    Raises:
        NotSupported: one belongs to a later version.
    """
    known = [field.name for field in fields(params)]
    wrong = []
    for name in names:
        if name in known:
            continue
        if name in LATER:
            raise NotSupported(f"{name} ({LATER[name]}) is not available in this version")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        wrong.append((name, f"is no sampling parameter{hint or f'; known: {_listed(known)}'}"))
    return wrong


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


_Violations = Iterator[tuple[str, str]]
"""Fields that are wrong, each with what is wrong."""


def _number(
    name: str, value: object, least: float, most: float, rule: str, *, zero: bool = True
) -> _Violations:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield name, f"must be a number, got {value!r}"
    elif not math.isfinite(value) or not least <= value <= most or (not zero and value == 0):
        yield name, f"must be {rule}, got {value!r}"


def _whole(name: str, value: object, least: int, most: int, rule: str) -> _Violations:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        yield name, f"must be a whole number, got {value!r}"
    elif not least <= value <= most:
        yield name, f"must be {rule}, got {value}"


def _flag(name: str, value: object) -> _Violations:
    if not isinstance(value, bool):
        yield name, f"must be true or false, got {value!r}"


def _stop(stops: object) -> _Violations:
    if not isinstance(stops, tuple):
        yield "stop", f"must be strings, got {stops!r}"
        return
    if len(stops) > _MOST_STOPS:
        yield "stop", f"must be at most {_MOST_STOPS} strings, got {len(stops)}"
    for text in stops:
        if not isinstance(text, str):
            yield "stop", f"must be strings, got {text!r}"
            return
        if not 1 <= len(text) <= _LONGEST_STOP:
            yield "stop", f"must be 1 to {_LONGEST_STOP} characters each, got {len(text)}"
            return


def _stop_token_ids(ids: object) -> _Violations:
    if not isinstance(ids, tuple):
        yield "stop_token_ids", f"must be whole numbers, got {ids!r}"
        return
    if len(ids) > _MOST_STOP_TOKENS:
        yield "stop_token_ids", f"must be at most {_MOST_STOP_TOKENS} ids, got {len(ids)}"
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            yield "stop_token_ids", f"must be whole numbers, got {token_id!r}"
            return
        if not 0 <= token_id < 2**32:
            yield "stop_token_ids", f"must be from 0 to 2**32 - 1 each, got {token_id}"
            return
