from google.rpc import status_pb2 as _status_pb2
from quire.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "sampling", "stopping", "attempt", "resumed", "traceparent", "scheduling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: _generation_pb2.TokenIds
    sampling: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StoppingCriteria
    attempt: int
    resumed: _generation_pb2.TokenIds
    traceparent: str
    scheduling: _generation_pb2.SchedulingOptions
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingCriteria, _Mapping]] = ..., attempt: _Optional[int] = ..., resumed: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., traceparent: _Optional[str] = ..., scheduling: _Optional[_Union[_generation_pb2.SchedulingOptions, _Mapping]] = ...) -> None: ...

class TokenServiceGenerateRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: TokenRequest
    def __init__(self, request: _Optional[_Union[TokenRequest, _Mapping]] = ...) -> None: ...

class TokenServiceGenerateResponse(_message.Message):
    __slots__ = ("request_id", "seed", "token_ids", "finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: TokenFinished
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Union[TokenFinished, _Mapping]] = ...) -> None: ...

class TokenFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    stop_token_id: int
    usage: _generation_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "finish", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    finish: Finish
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance_id", "tokenizer_digest", "protocol_major", "wants_load")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    WANTS_LOAD_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    tokenizer_digest: str
    protocol_major: int
    wants_load: bool
    def __init__(self, instance_id: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., protocol_major: _Optional[int] = ..., wants_load: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stream_id", "request")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request: TokenRequest
    def __init__(self, stream_id: _Optional[int] = ..., request: _Optional[_Union[TokenRequest, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("stream_id", "kept_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    kept_tokens: int
    def __init__(self, stream_id: _Optional[int] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "limits", "batch", "bye", "readiness", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    limits: ModelLimits
    batch: TokenBatch
    bye: Bye
    readiness: Readiness
    load: LoadReport
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., batch: _Optional[_Union[TokenBatch, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., readiness: _Optional[_Union[Readiness, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("credits", "limits", "protocol_major", "readiness")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    limits: ModelLimits
    protocol_major: int
    readiness: Readiness
    def __init__(self, credits: _Optional[int] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., protocol_major: _Optional[int] = ..., readiness: _Optional[_Union[Readiness, _Mapping]] = ...) -> None: ...

class Readiness(_message.Message):
    __slots__ = ("serving",)
    SERVING_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    def __init__(self, serving: _Optional[bool] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "prefixes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    prefixes: PrefixDigest
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., prefixes: _Optional[_Union[PrefixDigest, _Mapping]] = ...) -> None: ...

class PrefixDigest(_message.Message):
    __slots__ = ("bloom", "items")
    BLOOM_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    bloom: bytes
    items: int
    def __init__(self, bloom: _Optional[bytes] = ..., items: _Optional[int] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("model", "vocab_size", "max_model_len", "kv_capacity_tokens", "eos_token_ids", "num_workers", "block_size", "model_digest", "prefix_hash")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_workers: int
    block_size: int
    model_digest: str
    prefix_hash: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_workers: _Optional[int] = ..., block_size: _Optional[int] = ..., model_digest: _Optional[str] = ..., prefix_hash: _Optional[str] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("stream_ids", "counts", "token_ids", "ends", "credits")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: bytes
    counts: bytes
    token_ids: bytes
    ends: _containers.RepeatedCompositeFieldContainer[StreamEnd]
    credits: int
    def __init__(self, stream_ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., ends: _Optional[_Iterable[_Union[StreamEnd, _Mapping]]] = ..., credits: _Optional[int] = ...) -> None: ...

class StreamEnd(_message.Message):
    __slots__ = ("stream_id", "finished", "status")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    finished: TokenFinished
    status: _status_pb2.Status
    def __init__(self, stream_id: _Optional[int] = ..., finished: _Optional[_Union[TokenFinished, _Mapping]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
