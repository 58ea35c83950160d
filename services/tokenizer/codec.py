"""Between the wire contract and the values of `domain`. Checks nothing that `validation` checks."""

from collections.abc import Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from quire.v1 import generation_pb2, text_pb2, token_pb2
from services.tokenizer.block_hashes import PrefixSet
from services.tokenizer.domain import (
    ChatMessage,
    FinishReason,
    Limits,
    LoadReport,
    RawOptions,
    RawSampling,
    RawTokenIds,
    RenderedChat,
    Sampling,
    Scheduling,
    TextEnd,
    TextMessage,
    TokenEnd,
    TokenWork,
    Usage,
)
from services.tokenizer.packing import pack_ids

PROTOCOL_MAJOR = 1
"""Major version of the Session protocol that this service speaks."""

_REASONS = MappingProxyType(
    {
        generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
        generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
        generation_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    }
)
_NO_SCHEDULING = Scheduling()
_REASONS_TO_PROTO = MappingProxyType({reason: number for number, reason in _REASONS.items()})


def options_from_request(
    request: text_pb2.GenerateRequest | text_pb2.ChatRequest,
) -> RawOptions:
    """All of a text request but its prompt."""
    stopping, output = request.stopping, request.output
    return RawOptions(
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling_from_proto(request.sampling),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=stopping.stop_token_ids,
        stop_strings=request.stop_strings,
        stream=flag(output, "stream", default=True),
        return_token_ids=output.return_token_ids,
        include_stop=output.include_stop_str_in_output,
        skip_special_tokens=flag(output, "skip_special_tokens", default=True),
        attempt=request.attempt,
        resumed=token_ids_from_proto(request.resume.token_ids),
        scheduling=_scheduling_from_proto(request.scheduling),
    )


def prompt_from_request(request: text_pb2.GenerateRequest) -> str | RawTokenIds | None:
    """The prompt as text or ids; None where there is none."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return token_ids_from_proto(request.token_ids)
        case _:
            return None


def messages_from_proto(messages: Sequence[text_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    """A conversation."""
    return tuple(ChatMessage(role=message.role, content=message.content) for message in messages)


def token_ids_from_proto(ids: generation_pb2.TokenIds) -> RawTokenIds:
    """Ids in either form; not copied, since their number is still to be checked."""
    return RawTokenIds(packed=ids.packed, ids=ids.ids)


def flag(message: Message, name: str, *, default: bool) -> bool:
    """An optional bool of a message, or its default where it is absent."""
    return bool(getattr(message, name)) if message.HasField(name) else default


def to_generate_response(message: TextMessage) -> text_pb2.GenerateResponse:
    """One message of a Generate stream."""
    response = text_pb2.GenerateResponse(text=message.text, token_ids=message.token_ids)
    _fill(response, message)
    return response


def to_chat_response(message: TextMessage) -> text_pb2.ChatResponse:
    """One message of a Chat stream."""
    response = text_pb2.ChatResponse(text=message.text, token_ids=message.token_ids)
    _fill(response, message)
    return response


def to_token_ids(ids: Sequence[int]) -> generation_pb2.TokenIds:
    """Ids in the packed form."""
    return generation_pb2.TokenIds(packed=pack_ids(ids))


def to_tokenize_response(results: Sequence[Sequence[int]]) -> text_pb2.TokenizeResponse:
    """Ids of each text."""
    return text_pb2.TokenizeResponse(results=[to_token_ids(ids) for ids in results])


def to_render_response(chat: RenderedChat) -> text_pb2.RenderChatResponse:
    """A rendered conversation."""
    return text_pb2.RenderChatResponse(text=chat.text, token_ids=to_token_ids(chat.token_ids))


def to_hello(
    instance_id: str, tokenizer_digest: str, *, wants_load: bool
) -> token_pb2.SessionRequest:
    """The first message of a Session."""
    hello = token_pb2.Hello(
        instance_id=instance_id,
        tokenizer_digest=tokenizer_digest,
        protocol_major=PROTOCOL_MAJOR,
        wants_load=wants_load,
    )
    return token_pb2.SessionRequest(hello=hello)


def to_submit(stream_id: int, work: TokenWork) -> token_pb2.SessionRequest:
    """A request to the scheduler."""
    request = token_pb2.TokenRequest(
        request_id=work.request_id,
        model=work.model,
        prompt=to_token_ids(work.prompt),
        sampling=_sampling_to_proto(work.sampling),
        stopping=generation_pb2.StoppingCriteria(
            max_tokens=work.max_tokens,
            ignore_eos=work.ignore_eos,
            stop_token_ids=sorted(work.stop_token_ids),
        ),
        attempt=work.attempt,
        resumed=to_token_ids(work.resumed) if work.resumed else None,
        traceparent=work.traceparent,
        scheduling=_scheduling_to_proto(work.scheduling),
    )
    submit = token_pb2.Submit(stream_id=stream_id, request=request)
    return token_pb2.SessionRequest(submit=submit)


def to_abort(stream_id: int) -> token_pb2.SessionRequest:
    """The end of a request that nobody waits for."""
    return token_pb2.SessionRequest(abort=token_pb2.Abort(stream_id=stream_id))


def to_finish(stream_id: int, kept_tokens: int) -> token_pb2.SessionRequest:
    """The end of a request whose text met a stop string."""
    finish = token_pb2.Finish(stream_id=stream_id, kept_tokens=kept_tokens)
    return token_pb2.SessionRequest(finish=finish)


def to_bye(reason: str) -> token_pb2.SessionRequest:
    """The last message of a Session."""
    return token_pb2.SessionRequest(bye=token_pb2.Bye(reason=reason))


def limits_from_proto(limits: token_pb2.ModelLimits) -> Limits | None:
    """What the workers can serve; None while there has been none to say."""
    if not limits.max_model_len:
        return None
    return Limits(
        model=limits.model,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        kv_capacity_tokens=limits.kv_capacity_tokens,
        eos_token_ids=frozenset(limits.eos_token_ids),
        num_workers=limits.num_workers,
        block_size=limits.block_size,
        model_digest=limits.model_digest,
        prefix_hash=limits.prefix_hash if limits.block_size else "",
    )


def load_from_proto(report: token_pb2.LoadReport) -> LoadReport:
    """How busy a scheduler is.

    Raises:
        ValueError: the digest of what it has cached is none.
    """
    changed = report.HasField("prefixes")
    return LoadReport(
        running=report.running,
        waiting=report.waiting,
        waiting_tokens=report.waiting_tokens,
        prefixes=PrefixSet(report.prefixes.bloom) if changed else None,
    )


def end_from_proto(finished: token_pb2.TokenFinished) -> TokenEnd | None:
    """The end of a request; None where the reason is none that this version knows."""
    reason = _REASONS.get(finished.reason)
    if reason is None:
        return None
    has_stop = finished.HasField("stop_token_id")
    return TokenEnd(
        reason=reason,
        stop_token_id=finished.stop_token_id if has_stop else None,
        usage=Usage(
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            cached_tokens=finished.usage.cached_tokens,
        ),
    )


def _sampling_from_proto(sampling: generation_pb2.SamplingParams) -> RawSampling:
    return RawSampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
    )


def _sampling_to_proto(sampling: Sampling) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
    )


def _scheduling_from_proto(options: generation_pb2.SchedulingOptions) -> Scheduling:
    def given(name: str) -> Any:
        return getattr(options, name) if options.HasField(name) else None

    return Scheduling(
        priority_class=options.priority_class,
        tenant=options.tenant,
        deadline_ms=given("deadline_ms"),
        ttft_target_ms=given("ttft_target_ms"),
        tpot_target_ms=given("tpot_target_ms"),
        shed_late=options.shed_late,
        session_id=options.session_id,
        cache_salt=given("cache_salt"),
        skip_reading_prefix_cache=options.skip_reading_prefix_cache,
    )


def _scheduling_to_proto(scheduling: Scheduling) -> generation_pb2.SchedulingOptions | None:
    """The options; None where nothing is asked for."""
    if scheduling == _NO_SCHEDULING:
        return None
    return generation_pb2.SchedulingOptions(**asdict(scheduling))


def _fill(
    response: text_pb2.GenerateResponse | text_pb2.ChatResponse, message: TextMessage
) -> None:
    if message.opening is not None:
        response.request_id, response.seed = message.opening
    if message.end is not None:
        response.finished.CopyFrom(_end_to_proto(message.end))


def _end_to_proto(end: TextEnd) -> text_pb2.Finished:
    return text_pb2.Finished(
        reason=_REASONS_TO_PROTO[end.reason],
        stop_string=end.stop_string,
        stop_token_id=end.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
        ),
    )
