"""Raw requests to valid ones: every rule once, and every refusal names the field by its proto path.

Owns the rules and the defaults. Knows neither protobuf nor the tokenizer; whoever holds a `Valid…`
value checks nothing again.
"""

import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from services.chassis.errors import InvalidArgument, NotFound, Violations
from services.tokenizer.domain import (
    ChatMessage,
    Limits,
    RawOptions,
    RawSampling,
    RawTokenIds,
    Sampling,
    SamplingDefaults,
    Scheduling,
    ValidOptions,
)
from services.tokenizer.packing import unpack_ids
from services.tokenizer.text_bound import TextBound

MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
CONTEXT_LENGTH = "CONTEXT_LENGTH"
"""ErrorInfo reason of a request that is longer than the model's context."""
EXCEEDS_KV_CAPACITY = "EXCEEDS_KV_CAPACITY"
"""ErrorInfo reason of a request that no worker's KV cache can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """The rules for one model.

    Attributes:
        model: name it is served under.
        vocab_size: ids the tokenizer knows; the bound while no worker has said another.
        defaults: what absent sampling fields take.
    """

    model: str
    vocab_size: int
    defaults: SamplingDefaults

    def options(self, raw: RawOptions, limits: Limits | None) -> ValidOptions:
        """Checks everything but the prompt; mints request id and seed where absent.

        Raises:
            InvalidArgument: fields are wrong; names all of them.
            NotFound: another model is asked for.
        """
        if raw.model and raw.model != self.model:
            raise NotFound(
                f"model: {raw.model!r} is not served here; {self.model!r} is",
                reason="MODEL_NOT_FOUND",
            )
        wrong = Violations()
        with wrong.collected():
            _check_request_id(raw.request_id)
        with wrong.collected():
            sampling = self.sampling(raw.sampling)
        if raw.max_tokens is not None and raw.max_tokens < 1:
            wrong.add("stopping.max_tokens", f"must be >= 1, got {raw.max_tokens}")
        self._check_stop_token_ids(raw.stop_token_ids, limits, wrong)
        _check_stop_strings(raw.stop_strings, wrong)
        with wrong.collected():
            resumed = self._resumed(raw, limits)
        _check_scheduling(raw.scheduling, wrong)
        wrong.raise_any()
        return ValidOptions(
            request_id=raw.request_id or uuid.uuid4().hex,
            model=raw.model,
            sampling=sampling,
            max_tokens=raw.max_tokens,
            ignore_eos=raw.ignore_eos,
            stop_token_ids=frozenset(raw.stop_token_ids),
            stop_strings=tuple(raw.stop_strings),
            stream=raw.stream,
            return_token_ids=raw.return_token_ids,
            include_stop=raw.include_stop,
            skip_special_tokens=raw.skip_special_tokens,
            attempt=raw.attempt,
            resumed=resumed,
            scheduling=raw.scheduling,
        )

    def sampling(self, raw: RawSampling) -> Sampling:
        """Sampling in force: what was asked for, else the defaults.

        Raises:
            InvalidArgument: values are out of range; names all of them.
        """
        wrong = Violations()
        temperature = _given(raw.temperature, self.defaults.temperature)
        if not (math.isfinite(temperature) and temperature >= 0):
            wrong.add("sampling.temperature", f"must be finite and >= 0, got {temperature:g}")
        top_p = _given(raw.top_p, self.defaults.top_p)
        if not 0 < top_p <= 1:
            wrong.add("sampling.top_p", f"must be in (0, 1], got {top_p:g}")
        wrong.raise_any()
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=self.defaults.top_k if raw.top_k is None else raw.top_k,
            seed=secrets.randbits(63) if raw.seed is None else raw.seed,
        )

    def token_ids(self, raw: RawTokenIds, field: str, limits: Limits | None) -> Sequence[int]:
        """The ids in `raw`, in whichever form they came.

        Raises:
            InvalidArgument: both forms are filled, bytes are missing, or an id is out of range.
        """
        if raw.packed and raw.ids:
            raise InvalidArgument(field, "packed and ids are both filled; fill one of them")
        if len(raw.packed) % 4:
            raise InvalidArgument(
                f"{field}.packed", f"must be 4 bytes per id, got {len(raw.packed)} bytes"
            )
        ids = unpack_ids(raw.packed) if raw.packed else list(raw.ids)
        form = "packed" if raw.packed else "ids"
        size = self._num_ids(limits)
        if ids and max(ids) >= size:
            index = next(index for index, token_id in enumerate(ids) if token_id >= size)
            raise InvalidArgument(
                f"{field}.{form}[{index}]",
                f"must be below the vocabulary size {size}, got {ids[index]}",
            )
        return ids

    def prompt_ids(self, raw: RawTokenIds, field: str, limits: Limits | None) -> Sequence[int]:
        """The ids of a prompt that was sent as ids; not even read where there are too many.

        Raises:
            InvalidArgument: see `token_ids`, or they are longer than the context.
        """
        if limits is not None:
            _check_prompt_size("prompt", raw.count, limits)
        return self.token_ids(raw, field, limits)

    def prompt(
        self, ids: Sequence[int], field: str, options: ValidOptions, limits: Limits | None
    ) -> None:
        """Checks an encoded prompt against the context and the KV cache.

        Args:
            ids: the prompt, as the model is given it.
            field: where it came from.
            options: of the same request.
            limits: None while no worker is attached; the scheduler then checks alone.

        Raises:
            InvalidArgument: it is empty, or too long alone or together with max_tokens.
        """
        if not ids:
            raise InvalidArgument(field, "must hold at least one token")
        if limits is None:
            return
        if max(ids) >= limits.vocab_size:
            raise InvalidArgument(
                field,
                f"the tokenizer gives it id {max(ids)}, and the model has {limits.vocab_size} ids",
            )
        longest, size = limits.max_model_len, len(ids)
        _check_prompt_size(field, size, limits)
        if size + len(options.resumed) > longest:
            got = size + len(options.resumed)
            raise _too_long("resume.token_ids", got, longest, f"is {got} tokens with the prompt")
        if options.max_tokens is not None and size + options.max_tokens > longest:
            got = size + options.max_tokens
            raise _too_long(
                "stopping.max_tokens",
                got,
                longest,
                f"is {options.max_tokens}, with {size} prompt tokens {got}",
            )
        _check_kv_capacity(field, size, options, limits.kv_capacity_tokens)

    def _num_ids(self, limits: Limits | None) -> int:
        return self.vocab_size if limits is None else limits.vocab_size

    def _check_stop_token_ids(
        self, ids: Sequence[int], limits: Limits | None, wrong: Violations
    ) -> None:
        field, size = "stopping.stop_token_ids", self._num_ids(limits)
        if len(ids) > MAX_STOP_TOKENS:
            wrong.add(field, f"must hold at most {MAX_STOP_TOKENS} ids, got {len(ids)}")
            return
        for index, token_id in enumerate(ids):
            if token_id >= size:
                limit = f"must be below the vocabulary size {size}, got {token_id}"
                wrong.add(f"{field}[{index}]", limit)

    def _resumed(self, raw: RawOptions, limits: Limits | None) -> Sequence[int]:
        field, count = "resume.token_ids", raw.resumed.count
        if raw.max_tokens and count > raw.max_tokens:
            limit = f"at most stopping.max_tokens = {raw.max_tokens} ids"
            raise InvalidArgument(field, f"must hold {limit}, got {count}")
        if limits is not None and count >= limits.max_model_len:
            raise _too_long(field, count, limits.max_model_len, f"has {count} tokens")
        return self.token_ids(raw.resumed, field, limits)


def check_text(text: str, field: str, *, bound: TextBound | None, limits: Limits | None) -> None:
    """Refuses a text that is too long for the context whatever its tokens are.

    Args:
        text: not yet encoded.
        field: where it came from.
        bound: of the model's tokenizer; None where it has none.
        limits: None while no worker is attached.

    Raises:
        InvalidArgument: it cannot fit.
    """
    if bound is None or limits is None:
        return
    if len(text) < limits.max_model_len:
        return  # nearly every text
    at_least = bound.fewest_tokens(text)
    if at_least >= limits.max_model_len:
        raise _too_long(
            field,
            at_least,
            limits.max_model_len,
            f"has {len(text)} characters, which are at least {at_least} tokens",
        )


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidArgument unless there is a message and each has a usable role."""
    if not messages:
        raise InvalidArgument("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument(
            "messages", f"must hold at most {MAX_MESSAGES} messages, got {len(messages)}"
        )
    wrong = Violations()
    for index, message in enumerate(messages):
        if not message.role or len(message.role) > MAX_ROLE_CHARACTERS:
            wrong.add(
                f"messages[{index}].role",
                f"must have 1 to {MAX_ROLE_CHARACTERS} characters, got {len(message.role)}",
            )
    wrong.raise_any()


def check_not_empty(items: Sequence[object], field: str) -> None:
    """Raises InvalidArgument if `items` is empty."""
    if not items:
        raise InvalidArgument(field, "must hold at least one entry")


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _too_long(field: str, got: int, limit: int, description: str) -> InvalidArgument:
    return InvalidArgument(
        field,
        f"{description}; the context is {limit} tokens",
        reason=CONTEXT_LENGTH,
        metadata={"limit": str(limit), "got": str(got)},
    )


def _check_prompt_size(field: str, size: int, limits: Limits) -> None:
    if size >= limits.max_model_len:
        raise _too_long(
            field,
            size,
            limits.max_model_len,
            f"has {size} tokens, and at least one is to be generated",
        )


def _check_kv_capacity(field: str, size: int, options: ValidOptions, capacity: int) -> None:
    """As the scheduler will, but with the field's name at this door."""
    # The last token is sampled and never computed, so it needs no place in the cache.
    room = capacity + 1 - size
    if room < 1:
        raise _over_capacity(field, size, capacity, f"has {size} tokens", capacity)
    if len(options.resumed) > room:
        got = len(options.resumed)
        text = f"has {got} tokens, with {size} prompt tokens {size + got}"
        raise _over_capacity("resume.token_ids", got, room, text, capacity)
    if options.max_tokens is not None and options.max_tokens > room:
        got = options.max_tokens
        text = f"is {got}, with {size} prompt tokens at most {room} fit"
        raise _over_capacity("stopping.max_tokens", got, room, text, capacity)


def _over_capacity(
    field: str, got: int, limit: int, description: str, capacity: int
) -> InvalidArgument:
    return InvalidArgument(
        field,
        f"{description}; the KV cache holds {capacity} tokens",
        reason=EXCEEDS_KV_CAPACITY,
        metadata={"limit": str(limit), "got": str(got)},
    )


def _check_request_id(request_id: str) -> None:
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(
            "request_id", f"must be at most {MAX_REQUEST_ID_BYTES} bytes, got {size}"
        )


def _check_scheduling(scheduling: Scheduling, wrong: Violations) -> None:
    for name in ("priority_class", "tenant", "session_id", "cache_salt"):
        size = len((getattr(scheduling, name) or "").encode())
        if size > MAX_NAME_BYTES:
            wrong.add(f"scheduling.{name}", f"must be at most {MAX_NAME_BYTES} bytes, got {size}")
    for name in ("deadline_ms", "ttft_target_ms", "tpot_target_ms"):
        if getattr(scheduling, name) == 0:
            wrong.add(f"scheduling.{name}", "must be >= 1, got 0")


def _check_stop_strings(stops: Sequence[str], wrong: Violations) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        limit = f"must hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}"
        wrong.add("stop_strings", limit)
        return
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            limit = f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}"
            wrong.add(f"stop_strings[{index}]", limit)
