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
    __slots__ = ("running", "waiting", "accepted", "ended", "workers", "counters", "waiting_tokens", "classes", "tenants", "stall", "version", "uptime_us", "model", "latencies")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    accepted: int
    ended: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    counters: SchedulerCounters
    waiting_tokens: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassLoad]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    stall: Stall
    version: str
    uptime_us: int
    model: str
    latencies: Latencies
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., accepted: _Optional[int] = ..., ended: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., counters: _Optional[_Union[SchedulerCounters, _Mapping]] = ..., waiting_tokens: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassLoad, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., stall: _Optional[_Union[Stall, _Mapping]] = ..., version: _Optional[str] = ..., uptime_us: _Optional[int] = ..., model: _Optional[str] = ..., latencies: _Optional[_Union[Latencies, _Mapping]] = ...) -> None: ...

class Latencies(_message.Message):
    __slots__ = ("requests", "ttft_us_p50", "ttft_us_p95", "tpot_requests", "tpot_us_p50", "tpot_us_p95")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_P95_FIELD_NUMBER: _ClassVar[int]
    TPOT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TPOT_US_P50_FIELD_NUMBER: _ClassVar[int]
    TPOT_US_P95_FIELD_NUMBER: _ClassVar[int]
    requests: int
    ttft_us_p50: int
    ttft_us_p95: int
    tpot_requests: int
    tpot_us_p50: int
    tpot_us_p95: int
    def __init__(self, requests: _Optional[int] = ..., ttft_us_p50: _Optional[int] = ..., ttft_us_p95: _Optional[int] = ..., tpot_requests: _Optional[int] = ..., tpot_us_p50: _Optional[int] = ..., tpot_us_p95: _Optional[int] = ...) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("name", "running", "waiting", "weight", "ttft_met", "ttft_missed", "targets_met", "targets_missed", "latencies")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TTFT_MISSED_FIELD_NUMBER: _ClassVar[int]
    TARGETS_MET_FIELD_NUMBER: _ClassVar[int]
    TARGETS_MISSED_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    running: int
    waiting: int
    weight: int
    ttft_met: int
    ttft_missed: int
    targets_met: int
    targets_missed: int
    latencies: Latencies
    def __init__(self, name: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., weight: _Optional[int] = ..., ttft_met: _Optional[int] = ..., ttft_missed: _Optional[int] = ..., targets_met: _Optional[int] = ..., targets_missed: _Optional[int] = ..., latencies: _Optional[_Union[Latencies, _Mapping]] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("name", "running", "waiting", "served_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    running: int
    waiting: int
    served_tokens: int
    def __init__(self, name: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., served_tokens: _Optional[int] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("request_id", "reason", "stalled_us")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STALLED_US_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    stalled_us: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., stalled_us: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "epoch", "running", "blocks_total", "blocks_free", "blocks_evictable", "steps", "steps_in_flight", "timings", "blocks_pinned", "max_num_seqs", "max_num_batched_tokens", "computed_tokens", "execute_us", "attached_us", "device", "dtype", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_US_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    steps: int
    steps_in_flight: int
    timings: LinkTimings
    blocks_pinned: int
    max_num_seqs: int
    max_num_batched_tokens: int
    computed_tokens: int
    execute_us: int
    attached_us: int
    device: str
    dtype: str
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_evictable: _Optional[int] = ..., steps: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., timings: _Optional[_Union[LinkTimings, _Mapping]] = ..., blocks_pinned: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., execute_us: _Optional[int] = ..., attached_us: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("steps", "mixed_steps", "chunked_prefills", "preemptions", "requeues", "recomputed_tokens", "prefix_query_tokens", "prefix_hit_tokens", "prompt_tokens", "generation_tokens", "discarded_rows", "displaced", "deadline_exceeded", "shed", "refused", "evicted_blocks", "evicted_lifetime_us", "evicted_idle_us", "partial_hit_tokens", "isolated_faults")
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
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_LIFETIME_US_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IDLE_US_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FAULTS_FIELD_NUMBER: _ClassVar[int]
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
    displaced: int
    deadline_exceeded: int
    shed: int
    refused: int
    evicted_blocks: int
    evicted_lifetime_us: int
    evicted_idle_us: int
    partial_hit_tokens: int
    isolated_faults: int
    def __init__(self, steps: _Optional[int] = ..., mixed_steps: _Optional[int] = ..., chunked_prefills: _Optional[int] = ..., preemptions: _Optional[int] = ..., requeues: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., discarded_rows: _Optional[int] = ..., displaced: _Optional[int] = ..., deadline_exceeded: _Optional[int] = ..., shed: _Optional[int] = ..., refused: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., evicted_lifetime_us: _Optional[int] = ..., evicted_idle_us: _Optional[int] = ..., partial_hit_tokens: _Optional[int] = ..., isolated_faults: _Optional[int] = ...) -> None: ...
