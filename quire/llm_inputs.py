"""What users of `LLM` hand in, in its several forms, as requests. Checks forms; knows no server."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard, TypeVar

from quire.answers import ChatMessage, Delta
from quire.batch import Ask
from quire.client import AsyncClient
from quire.errors import InvalidRequest
from quire.params import SamplingParams, Scheduling

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` (text) or `prompt_token_ids`."""

Message: TypeAlias = ChatMessage | Mapping[str, str]

Params: TypeAlias = SamplingParams | Sequence[SamplingParams | None] | None
"""One for all requests of a call, or one for each."""

Schedulings: TypeAlias = Scheduling | Sequence[Scheduling | None] | None
"""One for all requests of a call, or one for each."""

_DEFAULTS = SamplingParams(max_tokens=512)
"""Where nothing is asked for: as of `quire generate`. A small model may never end by itself."""

_NO_SCHEDULING = Scheduling()

Option = TypeVar("Option", SamplingParams, Scheduling)

_FORMS = "must be text, token ids, or a mapping with prompt or prompt_token_ids"
_KEYS = ("prompt", "prompt_token_ids")


def asks_of_prompts(
    prompts: Prompt | Sequence[Prompt], params: Params, scheduling: Schedulings = None
) -> list[Ask]:
    """One request for each prompt.

    Raises:
        InvalidRequest: a prompt has no known form, or there are not as many params, or scheduling
            options, as prompts.
    """
    several = _prompts(prompts)
    each = _params(params, len(several), "prompts")
    urgent = _schedulings(scheduling, len(several), "prompts")
    named = _names(len(several))
    return [
        _ask_of_prompt(_plain(prompt, f"prompts[{index}]"), f"prompts[{index}]", one, own, name)
        for index, (prompt, one, own, name) in enumerate(
            zip(several, each, urgent, named, strict=True)
        )
    ]


def asks_of_chats(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    params: Params,
    scheduling: Schedulings = None,
) -> list[Ask]:
    """One request for each conversation.

    Raises:
        InvalidRequest: it is neither a conversation nor a sequence of them, or there are not as
            many params, or scheduling options, as conversations.
    """
    chats, wheres = _chats(messages)
    each = _params(params, len(chats), "conversations")
    urgent = _schedulings(scheduling, len(chats), "conversations")
    return [
        Ask(
            start=partial(_start_chat, chat, one, own, name),
            deadline_s=own.deadline_s,
            placed=partial(_placed, where, ("messages",)),
            request_id=name,
            prompt=None,
            prompt_token_ids=None,
        )
        for chat, where, one, own, name in zip(
            chats, wheres, each, urgent, _names(len(chats)), strict=True
        )
    ]


def _ask_of_prompt(
    prompt: str | tuple[int, ...],
    where: str,
    params: SamplingParams,
    scheduling: Scheduling,
    name: str,
) -> Ask:
    return Ask(
        start=partial(_start_prompt, prompt, params, scheduling, name),
        deadline_s=scheduling.deadline_s,
        placed=partial(_placed, where, ("prompt", "text", "token_ids")),
        request_id=name,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str) else prompt,
    )


def _start_prompt(
    prompt: str | tuple[int, ...],
    params: SamplingParams,
    scheduling: Scheduling,
    name: str,
    client: AsyncClient,
    left_s: float | None,
) -> AsyncGenerator[Delta, None]:
    return client.generate(
        prompt, params, request_id=name, deadline_s=left_s, scheduling=scheduling
    )


def _start_chat(
    messages: Sequence[Message],
    params: SamplingParams,
    scheduling: Scheduling,
    name: str,
    client: AsyncClient,
    left_s: float | None,
) -> AsyncGenerator[Delta, None]:
    return client.chat(messages, params, request_id=name, deadline_s=left_s, scheduling=scheduling)


def _placed(where: str, own: tuple[str, ...], error: InvalidRequest) -> InvalidRequest:
    """`error` of one request as an error of the call; `own` are names of what stands at `where`."""
    violations = []
    for field, description in error.violations:
        name = next((name for name in own if field == name or field.startswith(f"{name}[")), None)
        if name is not None:
            violations.append((where + field.removeprefix(name), description))
        elif field:
            violations.append((where, f"{field}: {description}"))
        else:
            violations.append((where, description))
    first, *others = violations
    return InvalidRequest(*first, *others)


def _prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest("prompts", f"{_FORMS}, or a list of those; got {_kind(prompts)}")
    if prompts and all(_is_id(one) for one in prompts):
        return [prompts]
    return list(prompts)


def _plain(prompt: Any, where: str) -> str | tuple[int, ...]:
    """A prompt of any form as text or token ids."""
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in _KEYS:
                raise InvalidRequest(f"{where}.{key}", "is not known in this version")
        if len(prompt) != 1:
            raise InvalidRequest(where, f"must have one of {' and '.join(_KEYS)}")
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(where, f"{_FORMS}, got {_kind(prompt)}")
    for index, token_id in enumerate(prompt):
        if not _is_id(token_id):
            raise InvalidRequest(f"{where}[{index}]", f"must be a token id, got {_kind(token_id)}")
    return tuple(prompt)


def _chats(messages: Any) -> tuple[list[Sequence[Message]], list[str]]:
    """The conversations, and how each is called in errors."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise InvalidRequest(
            "messages", f"must be a conversation or a list of them, got {_kind(messages)}"
        )
    if messages and all(isinstance(one, ChatMessage | Mapping) for one in messages):
        return [messages], ["messages"]
    for index, chat in enumerate(messages):
        if not _is_chat(chat):
            raise InvalidRequest(
                f"messages[{index}]",
                f"must be a list of messages as the others are, got {_kind(chat)}",
            )
    return list(messages), [f"messages[{index}]" for index in range(len(messages))]


def _is_chat(chat: Any) -> bool:
    return (
        isinstance(chat, Sequence)
        and not isinstance(chat, str | bytes | bytearray)
        and all(isinstance(one, ChatMessage | Mapping) for one in chat)
    )


def _params(params: Any, count: int, of_what: str) -> Sequence[SamplingParams]:
    return _one_for_each(params, count, of_what, SamplingParams, "sampling_params", _DEFAULTS)


def _schedulings(scheduling: Any, count: int, of_what: str) -> Sequence[Scheduling]:
    return _one_for_each(scheduling, count, of_what, Scheduling, "scheduling", _NO_SCHEDULING)


def _one_for_each(
    given: Any, count: int, of_what: str, kind: type[Option], field: str, default: Option
) -> Sequence[Option]:
    """What was given for all requests, or for each, as one for each."""
    if given is None or isinstance(given, kind):
        return [given or default] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(
            field, f"must be {kind.__name__} or a list of them, got {_kind(given)}"
        )
    if len(given) != count:
        raise InvalidRequest(
            field, f"must be one for all or one for each: got {len(given)} for {count} {of_what}"
        )
    for index, one in enumerate(given):
        if one is not None and not isinstance(one, kind):
            raise InvalidRequest(f"{field}[{index}]", f"must be {kind.__name__}, got {_kind(one)}")
    return [one or default for one in given]


def _names(count: int) -> list[str]:
    """Names of the requests of one call."""
    call = uuid.uuid4().hex
    return [f"q-{call}-{index}" for index in range(count)]


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
