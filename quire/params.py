"""How to sample, when to stop, and how urgent it is; checked when it is written down."""

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
_MOST_NAME_BYTES = 128
_MOST_MS = 2**32 - 1

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How urgent a request is, whom it is for, and what it shares with others.

    None and "" leave a choice to the server; where nothing is said, all requests are equal.

    Attributes:
        priority_class: name of one of the server's classes, most important first "interactive",
            "standard" and "batch" unless it was set up otherwise; at most 128 bytes.
        tenant: whom it is for, at most 128 bytes. Tenants of a class get even shares, or what the
            server's weights say, and quotas where it has some.
        deadline_s: seconds in which the whole answer is wanted, all attempts included; from 0.001
            to 4294967.295. After that the server ends it: DeadlineExceeded.
        ttft_target_ms: wanted time to the first token, whole milliseconds, >= 1. Orders the
            requests of one class and tenant; None takes that of the class.
        tpot_target_ms: wanted time between tokens, whole milliseconds, >= 1. While the request
            runs, the prompts of others are computed in pieces small enough for it; None takes that
            of the server.
        shed_late: rather than a late answer wants none: Overloaded, as soon as the time to the
            first token cannot be met any more. Needs a target, its own or the class's.
        session_id: conversation it belongs to, at most 128 bytes, so that a next turn finds what
            the turns before have left in the prefix cache.
        cache_salt: the prefix cache is shared only among requests of one salt; at most 128 bytes.
            None takes the tenant, and "" shares with all that say so.
        skip_reading_prefix_cache: takes nothing from the prefix cache; what it computes is cached.

    Raises:
        InvalidRequest: values are out of range, or a name is unknown; names all their fields.
    """

    priority_class: str = ""
    tenant: str = ""
    deadline_s: float | None = None
    ttft_target_ms: int | None = None
    tpot_target_ms: int | None = None
    shed_late: bool = False
    session_id: str = ""
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    def __new__(cls, *positional: Any, **values: Any) -> "Scheduling":
        """Refuses names that `__init__` would only call unexpected."""
        if positional:
            raise InvalidRequest("scheduling", 'must be keywords, e.g. priority_class="batch"')
        if wrong := _unknown(values, cls):
            first, *others = wrong
            raise InvalidRequest(*first, *others)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        wrong = list(self._violations())
        if wrong:
            first, *others = wrong
            raise InvalidRequest(*first, *others)

    def _violations(self) -> Iterator[tuple[str, str]]:
        yield from _name("priority_class", self.priority_class)
        yield from _name("tenant", self.tenant)
        most = _MOST_MS / 1000
        yield from _number("deadline_s", self.deadline_s, 0.001, most, f"from 0.001 to {most:.3f}")
        for name in ("ttft_target_ms", "tpot_target_ms"):
            yield from _whole(name, getattr(self, name), 1, _MOST_MS, f"from 1 to {_MOST_MS}")
        yield from _flag("shed_late", self.shed_late)
        yield from _name("session_id", self.session_id)
        if self.cache_salt is not None:
            yield from _name("cache_salt", self.cache_salt)
        yield from _flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)


_KINDS: Mapping[type, str] = MappingProxyType(
    {SamplingParams: "sampling parameter", Scheduling: "scheduling option"}
)


def _show_what_is_taken(kind: Any) -> None:
    """Has `help` show of a class what its `__init__` takes, in spite of `__new__`."""
    taken = inspect.signature(kind.__init__)
    # `inspect` reads this attribute; the type of a class does not list it.
    kind.__signature__ = taken.replace(parameters=list(taken.parameters.values())[1:])


_show_what_is_taken(SamplingParams)
_show_what_is_taken(Scheduling)


def _unknown(
    names: Iterable[str], params: type[SamplingParams] | type[Scheduling]
) -> list[tuple[str, str]]:
    """What is wrong with names that are no parameters.

    Raises:
        NotSupported: one belongs to a later version.
    """
    known = [field.name for field in fields(params)]
    wrong = []
    for name in names:
        if name in known:
            continue
        if name == "priority":
            wrong.append((name, 'is a class here: Scheduling(priority_class="interactive")'))
            continue
        if owner := next((kind for kind in _KINDS if name in _names_of(kind)), None):
            wrong.append((name, f"belongs into {owner.__name__}"))
            continue
        if name in LATER:
            raise NotSupported(f"{name} ({LATER[name]}) is not available in this version")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        wrong.append((name, f"is no {_KINDS[params]}{hint or f'; known: {_listed(known)}'}"))
    return wrong


def _names_of(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


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


def _name(name: str, value: object) -> _Violations:
    if not isinstance(value, str):
        yield name, f"must be text, got {value!r}"
        return
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        yield name, f"is not valid Unicode at character {error.start}"
        return
    if size > _MOST_NAME_BYTES:
        yield name, f"must be at most {_MOST_NAME_BYTES} bytes, got {size}"


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
