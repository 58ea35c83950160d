"""Between the client's values and the messages of `quire.v1`. No I/O."""

import array
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from quire.answers import ChatMessage, Delta, Finished, ServerInfo, Usage
from quire.errors import InvalidRequest
from quire.params import SamplingParams, Scheduling
from quire.v1 import generation_pb2, text_pb2

Request = TypeVar("Request", text_pb2.GenerateRequest, text_pb2.ChatRequest)

_NO_SCHEDULING = Scheduling()
_REASONS = MappingProxyType(
    {
        generation_pb2.FINISH_REASON_STOP: "stop",
        generation_pb2.FINISH_REASON_LENGTH: "length",
        generation_pb2.FINISH_REASON_ABORT: "abort",
    }
)


def generate_request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    seed: int,
    scheduling: Scheduling = _NO_SCHEDULING,
) -> text_pb2.GenerateRequest:
    """The first attempt at completing `prompt`.

    Raises:
        InvalidRequest: `prompt` is neither text nor token ids.
    """
    request = text_pb2.GenerateRequest()
    if isinstance(prompt, str):
        request.text = checked_text(prompt, "prompt")
    else:
        request.token_ids.packed = packed(prompt, field="prompt")
    _schedule(request, scheduling)
    return _filled(request, params, request_id=request_id, seed=seed)


def chat_request(
    messages: Sequence[ChatMessage | Mapping[str, str]],
    params: SamplingParams,
    *,
    request_id: str,
    seed: int,
    scheduling: Scheduling = _NO_SCHEDULING,
) -> text_pb2.ChatRequest:
    """The first attempt at answering `messages`.

    Raises:
        InvalidRequest: one of them lacks its role or content.
    """
    request = text_pb2.ChatRequest(messages=chat_messages(messages))
    _schedule(request, scheduling)
    return _filled(request, params, request_id=request_id, seed=seed)


def chat_messages(
    messages: Sequence[ChatMessage | Mapping[str, str]],
) -> list[text_pb2.ChatMessage]:
    """The turns of a conversation, given as `ChatMessage` or as mappings with the same two keys.

    Raises:
        InvalidRequest: some of them lack their role or content, or have more; names all of these.
    """
    turns = []
    wrong: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        try:
            turns.append(_chat_message(index, message))
        except InvalidRequest as error:
            wrong += error.violations
    if wrong:
        first, *others = wrong
        raise InvalidRequest(*first, *others)
    return turns


def attempt_of(
    request: Request, attempt: int, token_ids: Sequence[int], left_s: float | None
) -> Request:
    """`request` as it is sent now, going on after `token_ids`.

    Args:
        request: as it was first asked.
        attempt: how many attempts came before.
        token_ids: what has been received so far.
        left_s: seconds left for it; told where the request has a deadline of its own.
    """
    has_deadline = request.scheduling.HasField("deadline_ms")
    if not attempt and not has_deadline:
        return request
    now = type(request)()
    now.CopyFrom(request)
    now.attempt = attempt
    if token_ids:
        now.resume.token_ids.packed = packed(token_ids, field="resume")
    if has_deadline and left_s is not None:
        own = now.scheduling.deadline_ms
        now.scheduling.deadline_ms = min(own, max(1, int(left_s * 1000)))
    return now


def delta(
    response: text_pb2.GenerateResponse | text_pb2.ChatResponse,
    *,
    request_id: str,
    seed: int,
    trace_id: str = "",
) -> Delta:
    """One message of an answer; `request_id`, `seed` and `trace_id` are those of the request."""
    finished = None
    if response.HasField("finished"):
        end = response.finished
        which = end.WhichOneof("stop")
        finished = Finished(
            reason=_REASONS.get(end.reason, "unknown"),
            stop=None if which is None else getattr(end, which),
            usage=Usage(
                prompt_tokens=end.usage.prompt_tokens,
                completion_tokens=end.usage.completion_tokens,
                cached_tokens=end.usage.cached_tokens,
            ),
            request_id=request_id,
            seed=seed,
            trace_id=trace_id,
        )
    return Delta(text=response.text, token_ids=tuple(response.token_ids), finished=finished)


def server_info(response: text_pb2.GetInfoResponse) -> ServerInfo:
    """Facts about a server."""
    return ServerInfo(
        model=response.model,
        version=response.version,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len if response.HasField("max_model_len") else None,
        kv_capacity_tokens=(
            response.kv_capacity_tokens if response.HasField("kv_capacity_tokens") else None
        ),
        eos_token_ids=tuple(response.eos_token_ids),
        tokenizer_digest=response.tokenizer_digest,
        has_chat_template=response.has_chat_template,
    )


def checked_text(value: object, field: str) -> str:
    """`value`, if it is text that can be sent.

    Raises:
        InvalidRequest: it is not text, or has lone surrogates; names `field`.
    """
    if not isinstance(value, str):
        raise InvalidRequest(field, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode at character {error.start}") from error
    return value


def packed(token_ids: Sequence[int], *, field: str) -> bytes:
    """Token ids as little-endian uint32.

    Raises:
        InvalidRequest: one is no whole number from 0 to 2**32 - 1; names `field`.
    """
    try:
        column = array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(field, "must be text, or whole numbers from 0 to 2**32 - 1") from error
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpacked(token_ids: generation_pb2.TokenIds) -> tuple[int, ...]:
    """Token ids of either form."""
    if token_ids.ids:
        return tuple(token_ids.ids)
    column = array.array("I", token_ids.packed)
    if sys.byteorder == "big":
        column.byteswap()
    return tuple(column)


def _filled(request: Request, params: SamplingParams, *, request_id: str, seed: int) -> Request:
    request.request_id = request_id
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(params, name)
        if value is not None:
            setattr(request.sampling, name, value)
    request.sampling.seed = seed
    if params.max_tokens is not None:
        request.stopping.max_tokens = params.max_tokens
    request.stopping.ignore_eos = params.ignore_eos
    request.stopping.stop_token_ids.extend(params.stop_token_ids)
    request.stop_strings.extend(checked_text(text, "stop") for text in params.stop)
    request.output.return_token_ids = True
    request.output.include_stop_str_in_output = params.include_stop_str_in_output
    request.output.skip_special_tokens = params.skip_special_tokens
    return request


def _schedule(request: Request, scheduling: Scheduling) -> None:
    """Says how urgent it is; nothing at all where nothing is asked for."""
    if scheduling == _NO_SCHEDULING:
        return
    options = request.scheduling
    options.priority_class = scheduling.priority_class
    options.tenant = scheduling.tenant
    if scheduling.deadline_s is not None:
        options.deadline_ms = round(scheduling.deadline_s * 1000)
    for name in ("ttft_target_ms", "tpot_target_ms", "cache_salt"):
        value = getattr(scheduling, name)
        if value is not None:
            setattr(options, name, value)
    options.shed_late = scheduling.shed_late
    options.session_id = scheduling.session_id
    options.skip_reading_prefix_cache = scheduling.skip_reading_prefix_cache


def _chat_message(index: int, message: ChatMessage | Mapping[str, str]) -> text_pb2.ChatMessage:
    where = f"messages[{index}]"
    if isinstance(message, ChatMessage):
        message = {"role": message.role, "content": message.content}
    unknown = [key for key in message if key not in ("role", "content")]
    if unknown:
        first, *others = ((f"{where}.{key}", "is not known in this version") for key in unknown)
        raise InvalidRequest(*first, *others)
    return text_pb2.ChatMessage(
        role=checked_text(message.get("role"), f"{where}.role"),
        content=checked_text(message.get("content"), f"{where}.content"),
    )
