"""Between the messages of `vllm.grpc.engine.VllmEngine` and the scheduler's own types.

A request becomes one of the token door, so that both doors check by one set of rules; what is wrong
is then named as it is called here. What this version does not have is refused by name.
"""

import contextlib
import copy
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

import numpy as np
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from quire.v1 import generation_pb2, token_pb2
from services.chassis.errors import InvalidArgument, ServiceError, Unimplemented, Violations
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler import codec
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import Ended, EndReason, Limits, Loads
from services.scheduler.kv_events import BlocksRemoved, BlocksStored, KvBatch, KvEvent
from services.scheduler.model_folder import ModelFolder

Metadata = Iterable[tuple[str, str | bytes]] | None

CHUNK_BYTES = 64 * 1024
"""Of a tokenizer, in one message."""

_NO_PATH = "/get-tokenizer"
"""Told as the model's path: nobody has such a file, so that a gateway asks for the tokenizer here.
It does not ask where it is told nothing, and takes a name for one of a model hub."""

_MOST_MILLISECONDS = 2**32 - 1
_FINISH_REASONS: Mapping[EndReason, str] = MappingProxyType(
    {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.ABORT: "abort"}
)
_NAMES = (
    ("request.prompt", "tokenized.input_ids"),
    ("request.request_id", "request_id"),
    ("request.attempt", "request_id"),
    ("request.stopping.", "sampling_params."),
    ("request.sampling.", "sampling_params."),
    ("request.scheduling.priority_class", "x-quire-priority"),
    ("request.scheduling.tenant", "x-quire-tenant"),
    ("request.scheduling.cache_salt", "x-quire-cache-salt"),
    ("request.scheduling.deadline_ms", "x-quire-deadline-ms"),
)
"""What fields of the token door are called here, by how they begin."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "min_p": (0.0,),
        "frequency_penalty": (0.0,),
        "presence_penalty": (0.0,),
        "repetition_penalty": (0.0, 1.0),
        "min_tokens": (0,),
        "n": (0, 1),
        "grammar_from_first_token": (False,),
    }
)
"""Sampling fields that are not there yet, with the values that ask for nothing."""

_ABSENT = ("logprobs", "prompt_logprobs", "truncate_prompt_tokens")
"""Sampling fields that are not there yet, and ask for something whenever they are set."""

_ABSENT_OF_REQUEST = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


# Requests


def parse_generate(
    request: vllm_engine_pb2.GenerateRequest, metadata: Metadata, folder: ModelFolder | None
) -> codec.TokenCall:
    """Reads and checks a request and what its metadata say.

    Args:
        request: as received.
        metadata: of the call.
        folder: has the defaults of what is unset; None: the contract's.

    Raises:
        ServiceError: names the fields at fault, or what this version does not have.
    """
    refuse_unknown_fields(request)
    _refuse_unsupported(request)
    said = {key: value for key, value in metadata or () if isinstance(value, str)}
    wrong = Violations()
    with wrong.collected():
        _check_input(request)
    deadline_ms: int | None = None
    with wrong.collected():
        deadline_ms = _milliseconds(said, "x-quire-deadline-ms")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        wrong.add("data_parallel_rank", f"there is only rank 0, got {request.data_parallel_rank}")
    wrong.raise_any()
    message = token_pb2.TokenRequest(
        request_id=request.request_id or said.get("x-request-id", ""),
        prompt=generation_pb2.TokenIds(
            packed=np.array(request.tokenized.input_ids, "<u4").tobytes()
        ),
        sampling=_sampling(request.sampling_params, folder),
        stopping=generation_pb2.StoppingCriteria(
            ignore_eos=request.sampling_params.ignore_eos,
            stop_token_ids=request.sampling_params.stop_token_ids,
        ),
        scheduling=generation_pb2.SchedulingOptions(
            priority_class=said.get("x-quire-priority", ""),
            tenant=said.get("x-quire-tenant", ""),
            cache_salt=said.get("x-quire-cache-salt"),
            deadline_ms=deadline_ms,
        ),
    )
    if request.sampling_params.HasField("max_tokens"):
        message.stopping.max_tokens = request.sampling_params.max_tokens
    return codec.parse_request(message, mint_id=True)


@contextlib.contextmanager
def named_as_here() -> Iterator[None]:
    """Calls fields in errors by their names in this protocol."""
    try:
        yield
    except InvalidArgument as error:
        raise _renamed_fields(error) from error
    except ServiceError as error:
        renamed = copy.copy(error)
        renamed.message = _renamed(error.message)
        raise renamed from error


def _renamed_fields(error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument.joined(
        [
            InvalidArgument(
                _renamed(name), description, reason=error.reason, metadata=error.metadata
            )
            for name, description in error.violations
        ]
    )


def _renamed(text: str) -> str:
    for theirs, ours in _NAMES:
        if text.startswith(theirs):
            return ours + text.removeprefix(theirs)
    return text


def _refuse_unsupported(request: vllm_engine_pb2.GenerateRequest) -> None:
    for name in _ABSENT_OF_REQUEST:
        if request.HasField(name):
            raise _unsupported(name)
    if request.extra_mm_inputs:
        raise _unsupported("extra_mm_inputs")
    sampling = request.sampling_params
    for name, neutral in _NEUTRAL.items():
        if getattr(sampling, name) not in neutral:
            raise _unsupported(f"sampling_params.{name}")
    for name in _ABSENT:
        if sampling.HasField(name):
            raise _unsupported(f"sampling_params.{name}")
    if sampling.logit_bias:
        raise _unsupported("sampling_params.logit_bias")
    constraint = sampling.WhichOneof("constraint")
    # A JSON object that is not asked for is no constraint.
    if constraint is not None and (constraint != "json_object" or sampling.json_object):
        raise _unsupported(f"sampling_params.{constraint}")


def _unsupported(field: str) -> Unimplemented:
    return Unimplemented(
        f"{field} is not available in this version", reason="UNSUPPORTED", metadata={"field": field}
    )


def _check_input(request: vllm_engine_pb2.GenerateRequest) -> None:
    kind = request.WhichOneof("input")
    if kind == "text":
        raise InvalidArgument(
            "text",
            "this door takes token ids, in tokenized.input_ids; quire.v1.TextService takes text",
        )
    if kind is None:
        raise InvalidArgument("tokenized", "is missing")


def _milliseconds(said: Mapping[str, str], key: str) -> int | None:
    text = said.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidArgument(key, "must be a whole number of milliseconds")
    value = int(text)
    if not 1 <= value <= _MOST_MILLISECONDS:
        raise InvalidArgument(key, f"must be from 1 to {_MOST_MILLISECONDS}, got {value}")
    return value


def _sampling(
    sampling: vllm_engine_pb2.SamplingParams, folder: ModelFolder | None
) -> generation_pb2.SamplingParams:
    """The token door's parameters; unset ones take the model's defaults, as at the text door."""
    message = generation_pb2.SamplingParams(top_k=sampling.top_k)
    defaults = None if folder is None else folder.sampling
    if sampling.HasField("temperature"):
        message.temperature = sampling.temperature
    elif defaults is not None and defaults.temperature is not None:
        message.temperature = defaults.temperature
    # Zero means unset, says the protocol of top_p; of top_k it means no limit.
    if sampling.top_p != 0:
        message.top_p = sampling.top_p
    elif defaults is not None and defaults.top_p is not None:
        message.top_p = defaults.top_p
    if sampling.HasField("seed"):
        message.seed = sampling.seed % 2**64
    return message


# Answers


def chunk(
    token_ids: list[int], *, prompt_tokens: int, completion_tokens: int
) -> vllm_engine_pb2.GenerateResponse:
    """New tokens of a stream.

    Args:
        token_ids: since the chunk before.
        prompt_tokens: of the request.
        completion_tokens: so far, these among them.
    """
    return vllm_engine_pb2.GenerateResponse(
        chunk=vllm_engine_pb2.GenerateStreamChunk(
            token_ids=token_ids, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )
    )


def complete(token_ids: list[int], end: Ended) -> vllm_engine_pb2.GenerateResponse:
    """The last message of a request that ended well.

    Args:
        token_ids: all of its tokens; of a stream those of the last chunk once more.
        end: how it ended.
    """
    message = vllm_engine_pb2.GenerateComplete(
        output_ids=token_ids,
        finish_reason=_FINISH_REASONS[end.reason],
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        cached_tokens=end.cached_tokens,
    )
    if end.stop_token_id is not None:
        message.matched_token_id = end.stop_token_id
    return vllm_engine_pb2.GenerateResponse(complete=message)


def tokenizer_chunks(folder: ModelFolder) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The zip in pieces; the last one has its digest."""
    data = folder.tokenizer_zip
    for start in range(0, len(data), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield common_pb2.GetTokenizerChunk(
            data=data[start:end], sha256=folder.sha256 if end >= len(data) else ""
        )


# Facts


def model_info(
    limits: Limits, model: str, folder: ModelFolder | None
) -> vllm_engine_pb2.GetModelInfoResponse:
    """What is served. No paths are told: they mean nothing on the asker's machine."""
    message = vllm_engine_pb2.GetModelInfoResponse(
        is_generation=True,
        max_context_length=limits.max_model_len,
        vocab_size=limits.vocab_size,
        served_model_name=model,
        model_path=_NO_PATH,
        eos_token_ids=limits.eos_token_ids,
        # One place is left for the first token of the answer.
        max_req_input_len=min(limits.max_model_len, limits.kv_capacity_tokens + 1) - 1,
    )
    if folder is not None:
        message.model_type = folder.model_type
        message.architectures.extend(folder.architectures)
        message.pad_token_id = folder.pad_token_id or 0
        message.bos_token_id = folder.bos_token_id or 0
        message.default_sampling_params_json = sampling_json(folder)
    return message


def sampling_json(folder: ModelFolder) -> str:
    """The sampling defaults that the model's file has; "" where it has none."""
    file = folder.sampling
    values = {"temperature": file.temperature, "top_p": file.top_p, "top_k": file.top_k}
    told = {name: value for name, value in values.items() if value is not None}
    return json.dumps(told, separators=(",", ":")) if told else ""


def server_info(
    loads: Loads, *, block_size: int, max_num_seqs: int, uptime_s: float, last_request_at: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """The process."""
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=loads.running + loads.waiting,
        last_receive_timestamp=last_request_at,
        uptime_seconds=uptime_s,
        server_type="quire",
        data_parallel_size=1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
    )


def loads_response(
    loads: Loads,
    *,
    now: float,
    version: str,
    block_size: int,
    max_num_seqs: int,
    tokens_per_s: float,
) -> vllm_engine_pb2.GetLoadsResponse:
    """How busy the scheduler is, all its workers together as one rank."""
    total = sum(worker.blocks_total for worker in loads.workers)
    idle = sum(worker.blocks_free + worker.blocks_evictable for worker in loads.workers)
    asked = loads.counters.prefix_query_tokens
    load = vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=loads.running,
        num_waiting_reqs=loads.waiting,
        num_total_reqs=loads.running + loads.waiting,
        num_used_tokens=(total - idle) * block_size,
        max_total_num_tokens=total * block_size,
        token_usage=(total - idle) / total if total else 0.0,
        gen_throughput=tokens_per_s,
        cache_hit_rate=loads.counters.prefix_hit_tokens / asked if asked else 0.0,
        utilization=loads.running / max_num_seqs if max_num_seqs else 0.0,
        max_running_requests=max_num_seqs,
        # What of it will be found in the cache is not known before it is planned.
        num_waiting_uncached_tokens=loads.waiting_tokens,
    )
    return vllm_engine_pb2.GetLoadsResponse(
        timestamp=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        version=version,
        dp_rank_count=1,
        loads=[load],
    )


# Cached blocks


def kv_batch(batch: KvBatch) -> common_pb2.KvEventBatch:
    """A batch for the wire."""
    message = common_pb2.KvEventBatch(sequence_number=batch.number, timestamp=batch.at, dp_rank=0)
    for event in batch.events:
        _fill_event(message.events.add(event_id=0 if batch.snapshot else batch.number), event)
    if batch.snapshot is not None:
        place = batch.snapshot
        message.snapshot.MergeFrom(
            common_pb2.KvSnapshotChunk(
                index=place.index,
                count=place.count,
                blocks=place.blocks,
                unknown_before=0 if place.complete else 1,
            )
        )
    return message


def _fill_event(message: common_pb2.KvCacheEvent, event: KvEvent) -> None:
    if isinstance(event, BlocksStored):
        stored = message.stored
        for digest, tokens in zip(_hashes(event.digests), event.tokens, strict=True):
            stored.blocks.add(block_hash=digest, token_ids=tokens.tolist(), block_size=tokens.size)
        if event.parent:
            (stored.parent_block_hash,) = _hashes(event.parent)
        stored.tier = common_pb2.KV_CACHE_TIER_DEVICE
        namespace = _namespace(event.salt)
        if namespace:
            stored.cache_salt = namespace
    elif isinstance(event, BlocksRemoved):
        message.removed.block_hashes.extend(_hashes(event.digests))
        message.removed.tier = common_pb2.KV_CACHE_TIER_DEVICE
    else:
        message.cleared.SetInParent()


def _hashes(digests: bytes) -> list[int]:
    """The first 8 bytes of each digest as a signed number: what a block is called on the wire."""
    return [value for (value,) in _HEAD.iter_unpack(digests)]


def _namespace(salt: bytes) -> str:
    """What keeps blocks of this salt apart from others', "" for those of requests without one."""
    kind, value = salt[:1], salt[1:].decode("utf-8", "replace")
    if kind == b"t":
        return f"tenant:{value}" if value else ""
    return value


_HEAD = struct.Struct(f"<q{DIGEST_BYTES - 8}x")
