"""Between the messages of callers and the scheduler's own types; workers' are in `worker_codec`.

Everything that enters is checked once, here: after parsing, a value is valid as far as can be known
without the attached workers' limits (those the core checks).
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np

from quire.v1 import generation_pb2, info_pb2, token_pb2
from quire.version import VERSION
from services.chassis.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Overloaded,
    ServiceError,
    Unavailable,
    Violations,
    to_status,
)
from services.chassis.tracing import valid_traceparent
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler.core.plan import (
    Ended,
    EndReason,
    Limits,
    Loads,
    Refusal,
    Sampling,
    Stall,
    TokenArray,
    WorkerLoad,
)
from services.scheduler.digest import LoadReport
from services.scheduler.facts import Attachment, Facts
from services.scheduler.hashing import explicit_salt, tenant_salt
from services.scheduler.latencies import Latencies
from services.scheduler.link_timings import LinkTimings
from services.scheduler.outbox import Delivery, End

PROTOCOL_MAJOR = 1
"""Major version of both protocols this scheduler speaks."""

_MAX_REQUEST_ID_BYTES = 128
_MAX_STOP_TOKENS = 128
_MAX_NAME_BYTES = 128
_FAR_S = 1e9
_MAX_NAME_CHARACTERS = 256

_FAILED: Mapping[EndReason, tuple[type[ServiceError], str, str]] = MappingProxyType(
    {
        EndReason.REPLACED: (
            Aborted,
            "a newer attempt of this request took its place",
            "REPLACED",
        ),
        EndReason.NO_WORKER: (
            Unavailable,
            "no worker that can hold it attached in time",
            "NO_WORKER",
        ),
        EndReason.DEADLINE: (DeadlineExceeded, "the deadline has passed", "DEADLINE"),
        EndReason.FAULT: (Internal, "this request could not be scheduled", "SCHEDULING_FAILED"),
        EndReason.FAILED: (
            Internal,
            "the worker could not compute this request",
            "COMPUTATION_FAILED",
        ),
    }
)
"""Ends that are errors and carry nothing else."""

_BOUNDS = {
    "QUEUE_REQUESTS": "the queue is full: at most {limit} requests may wait, this would be {got}",
    "QUEUE_TOKENS": "the queue is full: at most {limit} prompt tokens may wait, with this {got}",
    "TENANT_REQUESTS": "at most {limit} requests of a tenant may wait, this would be {got}",
    "TENANT_TOKENS": "at most {limit} prompt tokens of a tenant may wait, with this {got}",
    "TENANT_LIVE": "a tenant may have at most {limit} requests at a time, this would be {got}",
    "TTFT_TARGET": "its first token would come after {got} ms, its target is {limit} ms",
}
"""What a refusal that may pass by itself is about."""

_FINISHED = {
    EndReason.STOP: generation_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How urgent a call is, whom it is for; see SchedulingOptions. Times in microseconds."""

    priority_class: str
    tenant: str
    deadline_us: int | None
    ttft_target_us: int | None
    tpot_target_us: int | None
    shed_late: bool
    session_id: str
    salt: bytes
    read_prefix_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A valid token-level request, before hashing and admission."""

    request_id: str
    model: str
    attempt: int
    prompt: TokenArray
    resumed: TokenArray
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    traceparent: str
    scheduling: Scheduling


# Requests


def parse_request(message: token_pb2.TokenRequest, *, mint_id: bool) -> TokenCall:
    """Reads and checks a request.

    Args:
        message: as received.
        mint_id: an empty request id is replaced by a fresh one, else refused.

    Raises:
        ServiceError: names the fields at fault.
    """
    refuse_unknown_fields(message)
    wrong = Violations()
    request_id = message.request_id or (secrets.token_hex(16) if mint_id else "")
    size = len(request_id.encode())
    if not request_id:
        wrong.add("request.request_id", "must not be empty")
    elif size > _MAX_REQUEST_ID_BYTES:
        limit = f"must be at most {_MAX_REQUEST_ID_BYTES} bytes, got {size}"
        wrong.add("request.request_id", limit)
    prompt = resumed = np.empty(0, np.uint32)
    with wrong.collected():
        prompt = parse_token_ids(message.prompt, "request.prompt")
        if not prompt.size:
            wrong.add("request.prompt", "must have at least one token")
    with wrong.collected():
        resumed = parse_token_ids(message.resumed, "request.resumed")
    stopping = message.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        wrong.add("request.stopping.max_tokens", f"must be >= 1, got {max_tokens}")
    elif max_tokens is not None and resumed.size > max_tokens:
        limit = f"must hold at most stopping.max_tokens = {max_tokens} ids, got {resumed.size}"
        wrong.add("request.resumed", limit)
    num_stops = len(stopping.stop_token_ids)
    if num_stops > _MAX_STOP_TOKENS:
        limit = f"must hold at most {_MAX_STOP_TOKENS} ids, got {num_stops}"
        wrong.add("request.stopping.stop_token_ids", limit)
    sampling = _parse_sampling(message.sampling, wrong)
    scheduling = _parse_scheduling(message.scheduling, wrong)
    wrong.raise_any()
    return TokenCall(
        request_id=request_id,
        model=message.model,
        attempt=message.attempt,
        prompt=prompt,
        resumed=resumed,
        max_tokens=max_tokens,
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=tuple(stopping.stop_token_ids),
        sampling=sampling,
        traceparent=valid_traceparent(message.traceparent),
        scheduling=scheduling,
    )


def with_deadline(call: TokenCall, remaining_s: float | None) -> TokenCall:
    """The call with the deadline of its rpc, unless the message's own is earlier.

    Args:
        call: as parsed.
        remaining_s: seconds the rpc still has; None: no deadline.
    """
    if remaining_s is None:
        return call
    # A deadline centuries away is none; and grpc gives such a one where the caller set none.
    remaining_us = int(min(max(remaining_s, 0), _FAR_S) * 1e6)
    own = call.scheduling.deadline_us
    deadline_us = remaining_us if own is None else min(own, remaining_us)
    return replace(call, scheduling=replace(call.scheduling, deadline_us=deadline_us))


def with_traceparent(call: TokenCall, traceparent: str) -> TokenCall:
    """The call with the trace context of its metadata, unless the message carries one."""
    return call if call.traceparent else replace(call, traceparent=traceparent)


def parse_token_ids(message: generation_pb2.TokenIds, field: str) -> TokenArray:
    """uint32 [n] from either form."""
    packed = message.packed  # a copy at each access
    if packed and message.ids:
        raise InvalidArgument(field, "fill either packed or ids, not both")
    if packed:
        return parse_column(packed, f"{field}.packed")
    return np.array(message.ids, np.uint32)


def _parse_sampling(message: generation_pb2.SamplingParams, wrong: Violations) -> Sampling:
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        wrong.add("request.sampling.temperature", f"must be finite and >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        wrong.add("request.sampling.top_p", f"must be in (0, 1], got {top_p}")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
    )


def _parse_scheduling(message: generation_pb2.SchedulingOptions, wrong: Violations) -> Scheduling:
    for name in ("priority_class", "tenant", "session_id", "cache_salt"):
        size = len(getattr(message, name).encode())
        if size > _MAX_NAME_BYTES:
            limit = f"must be at most {_MAX_NAME_BYTES} bytes, got {size}"
            wrong.add(f"request.scheduling.{name}", limit)
    times: dict[str, int | None] = {}
    for name in ("deadline_ms", "ttft_target_ms", "tpot_target_ms"):
        value = getattr(message, name) if message.HasField(name) else None
        if value == 0:
            wrong.add(f"request.scheduling.{name}", "must be >= 1, got 0")
        times[name] = None if value is None else value * 1000
    salted = message.HasField("cache_salt")
    return Scheduling(
        priority_class=message.priority_class,
        tenant=message.tenant,
        deadline_us=times["deadline_ms"],
        ttft_target_us=times["ttft_target_ms"],
        tpot_target_us=times["tpot_target_ms"],
        shed_late=message.shed_late,
        session_id=message.session_id,
        salt=explicit_salt(message.cache_salt) if salted else tenant_salt(message.tenant),
        read_prefix_cache=not message.skip_reading_prefix_cache,
    )


def parse_column(data: bytes, field: str) -> TokenArray:
    """uint32 [n] of a packed column."""
    if len(data) % 4:
        raise InvalidArgument(field, f"must be whole uint32 values, got {len(data)} bytes")
    return np.frombuffer(data, "<u4")


def check_hello(hello: token_pb2.Hello) -> None:
    """Refuses a tokenizer that speaks another protocol, or whose names cannot be told."""
    check_major(hello.protocol_major)
    for field in ("instance_id", "tokenizer_digest"):
        check_name(getattr(hello, field), f"hello.{field}")


def check_name(name: str, field: str) -> None:
    """Refuses a name that would not stand on one line of a log."""
    if len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidArgument(
            field, f"must be at most {_MAX_NAME_CHARACTERS} printable characters, got {len(name)}"
        )


def check_major(major: int) -> None:
    """Refuses another major version of a protocol than ours."""
    if major != PROTOCOL_MAJOR:
        raise FailedPrecondition(
            f"protocol_major: this scheduler speaks {PROTOCOL_MAJOR}, got {major}",
            reason="PROTOCOL_MAJOR",
        )


# Answers to callers


def limits_message(limits: Limits | None, model: str) -> token_pb2.ModelLimits:
    """The limits; without workers all fields are unset."""
    if limits is None:
        return token_pb2.ModelLimits()
    return token_pb2.ModelLimits(
        model=model,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        kv_capacity_tokens=limits.kv_capacity_tokens,
        eos_token_ids=limits.eos_token_ids,
        num_workers=limits.num_workers,
        block_size=limits.block_size,
        model_digest=limits.model_digest.decode(),
        prefix_hash=limits.prefix_hash,
    )


def welcome(
    credits: int, limits: Limits | None, model: str, *, serving: bool
) -> token_pb2.SessionResponse:
    """The first message of a session."""
    message = token_pb2.Welcome(
        credits=credits,
        protocol_major=PROTOCOL_MAJOR,
        readiness=token_pb2.Readiness(serving=serving),
    )
    if limits is not None:
        message.limits.CopyFrom(limits_message(limits, model))
    return token_pb2.SessionResponse(welcome=message)


def readiness_response(serving: bool) -> token_pb2.SessionResponse:
    """Whether requests can be served, after that changed."""
    return token_pb2.SessionResponse(readiness=token_pb2.Readiness(serving=serving))


def limits_response(limits: Limits | None, model: str) -> token_pb2.SessionResponse:
    """The limits after they changed."""
    return token_pb2.SessionResponse(limits=limits_message(limits, model))


def load_response(report: LoadReport) -> token_pb2.SessionResponse:
    """How busy the scheduler is."""
    prefixes = report.prefixes
    return token_pb2.SessionResponse(
        load=token_pb2.LoadReport(
            running=report.running,
            waiting=report.waiting,
            waiting_tokens=report.waiting_tokens,
            prefixes=None
            if prefixes is None
            else token_pb2.PrefixDigest(bloom=prefixes.bloom, items=prefixes.items),
        )
    )


def goodbye(reason: str) -> token_pb2.SessionResponse:
    """The last message of a session."""
    return token_pb2.SessionResponse(bye=token_pb2.Bye(reason=reason))


def batch_response(delivery: Delivery) -> token_pb2.SessionResponse | None:
    """Tokens, ends and credits of one delivery, or None where there are none."""
    if not (delivery.streams.size or delivery.ends or delivery.credits):
        return None
    batch = token_pb2.TokenBatch(
        stream_ids=delivery.streams.astype("<u4", copy=False).tobytes(),
        counts=np.ones(delivery.streams.size, "<u4").tobytes(),
        token_ids=delivery.token_ids.astype("<u4", copy=False).tobytes(),
        credits=delivery.credits,
    )
    for stream, end in delivery.ends:
        error = error_of(end)
        if error is None:
            batch.ends.add(stream_id=stream, finished=finished(end))
        else:
            batch.ends.add(stream_id=stream, status=to_status(error))
    return token_pb2.SessionResponse(batch=batch)


def finished(end: End) -> token_pb2.TokenFinished:
    """The end of a request that ended well (`error_of` is None)."""
    assert isinstance(end, Ended), end
    return token_pb2.TokenFinished(
        reason=_FINISHED[end.reason],
        stop_token_id=end.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
        ),
    )


def error_of(end: End) -> ServiceError | None:
    """The error of a request that did not end well, or None."""
    if isinstance(end, ServiceError):
        return end
    if end.reason in _FINISHED:
        return None
    if end.reason is EndReason.CANNOT_FIT:
        assert end.refusal is not None
        return refusal_error(end.refusal)
    if end.reason is EndReason.SHED:
        return Overloaded(
            "its time to first token could no longer be met",
            reason="SHED",
            retry_after_s=end.retry_after_us / 1e6,
        )
    kind, message, reason = _FAILED[end.reason]
    return kind(message, reason=reason)


def refusal_error(refusal: Refusal) -> ServiceError:
    """The error for a request that the core did not take."""
    if refusal.reason == "DUPLICATE":
        return AlreadyExists("a request with this request_id is live", reason="DUPLICATE")
    if refusal.reason == "DEADLINE":
        return DeadlineExceeded("the deadline had passed when it arrived", reason="DEADLINE")
    if refusal.reason in _BOUNDS:
        retry_after_s = refusal.retry_after_us / 1e6
        bound = _BOUNDS[refusal.reason].format(limit=refusal.limit, got=refusal.got)
        return Overloaded(
            f"{refusal.field}: {bound}; try again in {retry_after_s:.1f} s",
            reason=refusal.reason,
            retry_after_s=retry_after_s,
        )
    return InvalidArgument.joined([_invalid(one) for one in (refusal, *refusal.others)])


def _invalid(refusal: Refusal) -> InvalidArgument:
    limits = {
        "CONTEXT_LENGTH": "the context holds at most",
        "EXCEEDS_KV_CAPACITY": "the KV cache holds at most",
        "EXCEEDS_QUEUE": "the bound of the queue leaves room for at most",
        "VOCABULARY": "the largest id of the vocabulary is",
    }
    if refusal.reason == "UNKNOWN_CLASS":
        known = ", ".join(refusal.choices)
        return InvalidArgument(
            refusal.field,
            f"is no priority class of this scheduler; it has {known}",
            reason=refusal.reason,
        )
    return InvalidArgument(
        refusal.field,
        f"{limits[refusal.reason]} {refusal.limit}, got {refusal.got}",
        reason=refusal.reason,
        metadata={"limit": str(refusal.limit), "got": str(refusal.got)},
    )


# Facts


def loads_response(
    loads: Loads, facts: Facts, stall: Stall | None, now: int
) -> info_pb2.GetLoadsResponse:
    """Gauges and counters for the wire.

    Args:
        loads: of the core.
        facts: what is beside them.
        stall: what blocks, if anything does.
        now: on the clock of the core, microseconds.
    """
    counters, latencies = loads.counters, facts.latencies
    return info_pb2.GetLoadsResponse(
        version=VERSION,
        uptime_us=now - facts.started,
        model=facts.model,
        latencies=_latencies_message(latencies.summary(now)),
        running=loads.running,
        waiting=loads.waiting,
        accepted=loads.accepted,
        ended=loads.ended,
        workers=[
            _worker_message(one, facts.attachments[one.worker_id], now) for one in loads.workers
        ],
        counters=info_pb2.SchedulerCounters(**asdict(counters)),
        waiting_tokens=loads.waiting_tokens,
        classes=[
            info_pb2.ClassLoad(
                **asdict(one), latencies=_latencies_message(latencies.summary(now, one.name))
            )
            for one in loads.classes
        ],
        tenants=[info_pb2.TenantLoad(**asdict(one)) for one in loads.tenants],
        stall=None
        if stall is None
        else info_pb2.Stall(
            request_id=stall.request_id, reason=stall.reason, stalled_us=now - stall.since
        ),
    )


def _worker_message(load: WorkerLoad, attachment: Attachment, now: int) -> info_pb2.WorkerLoad:
    return info_pb2.WorkerLoad(
        **asdict(load),
        **asdict(attachment.kind),
        attached_us=now - attachment.since,
        timings=_timings_message(attachment.timings),
    )


def _latencies_message(latencies: Latencies | None) -> info_pb2.Latencies | None:
    return None if latencies is None else info_pb2.Latencies(**asdict(latencies))


def _timings_message(timings: LinkTimings | None) -> info_pb2.LinkTimings | None:
    return None if timings is None else info_pb2.LinkTimings(**asdict(timings))
