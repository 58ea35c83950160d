from quire.v1 import token_pb2 as _token_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("version", "limits")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    version: str
    limits: _token_pb2.ModelLimits
    def __init__(self, version: _Optional[str] = ..., limits: _Optional[_Union[_token_pb2.ModelLimits, _Mapping]] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("running", "waiting", "accepted", "ended", "workers", "counters")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    accepted: int
    ended: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    counters: SchedulerCounters
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., accepted: _Optional[int] = ..., ended: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., counters: _Optional[_Union[SchedulerCounters, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "epoch", "running", "blocks_total", "blocks_free", "blocks_evictable", "steps", "steps_in_flight", "timings")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    steps: int
    steps_in_flight: int
    timings: LinkTimings
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_evictable: _Optional[int] = ..., steps: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., timings: _Optional[_Union[LinkTimings, _Mapping]] = ...) -> None: ...

class LinkTimings(_message.Message):
    __slots__ = ("steps", "link_us_p50", "link_us_p99", "execute_us_p50", "execute_us_p99", "idle_us_p50")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LINK_US_P50_FIELD_NUMBER: _ClassVar[int]
    LINK_US_P99_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_P50_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_P99_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_P50_FIELD_NUMBER: _ClassVar[int]
    steps: int
    link_us_p50: int
    link_us_p99: int
    execute_us_p50: int
    execute_us_p99: int
    idle_us_p50: int
    def __init__(self, steps: _Optional[int] = ..., link_us_p50: _Optional[int] = ..., link_us_p99: _Optional[int] = ..., execute_us_p50: _Optional[int] = ..., execute_us_p99: _Optional[int] = ..., idle_us_p50: _Optional[int] = ...) -> None: ...

class SchedulerCounters(_message.Message):
    __slots__ = ("steps", "mixed_steps", "chunked_prefills", "preemptions", "requeues", "recomputed_tokens", "prefix_query_tokens", "prefix_hit_tokens", "prompt_tokens", "generation_tokens", "discarded_rows")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEUES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    mixed_steps: int
    chunked_prefills: int
    preemptions: int
    requeues: int
    recomputed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generation_tokens: int
    discarded_rows: int
    def __init__(self, steps: _Optional[int] = ..., mixed_steps: _Optional[int] = ..., chunked_prefills: _Optional[int] = ..., preemptions: _Optional[int] = ..., requeues: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., discarded_rows: _Optional[int] = ...) -> None: ...
