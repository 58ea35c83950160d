import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quire.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SchedulingPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULING_POLICY_UNSPECIFIED: _ClassVar[SchedulingPolicy]
    SCHEDULING_POLICY_FAIR: _ClassVar[SchedulingPolicy]
    SCHEDULING_POLICY_PRIORITY: _ClassVar[SchedulingPolicy]
    SCHEDULING_POLICY_FCFS: _ClassVar[SchedulingPolicy]

class EvictionPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_POLICY_UNSPECIFIED: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_LRU: _ClassVar[EvictionPolicy]
    EVICTION_POLICY_TIME_WHEEL: _ClassVar[EvictionPolicy]
SCHEDULING_POLICY_UNSPECIFIED: SchedulingPolicy
SCHEDULING_POLICY_FAIR: SchedulingPolicy
SCHEDULING_POLICY_PRIORITY: SchedulingPolicy
SCHEDULING_POLICY_FCFS: SchedulingPolicy
EVICTION_POLICY_UNSPECIFIED: EvictionPolicy
EVICTION_POLICY_LRU: EvictionPolicy
EVICTION_POLICY_TIME_WHEEL: EvictionPolicy

class SchedulerConfig(_message.Message):
    __slots__ = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size", "tpot_target_ms", "policy", "classes", "default_class", "tenants", "other_tenants", "ageing_ms", "max_queued_requests", "max_queued_tokens", "max_pinned_share", "stall_timeout_ms", "enable_prefix_caching", "eviction", "time_wheel_slots", "partial_block_reuse", "worker_grace_ms")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_TENANTS_FIELD_NUMBER: _ClassVar[int]
    AGEING_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_SHARE_FIELD_NUMBER: _ClassVar[int]
    STALL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    TIME_WHEEL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_BLOCK_REUSE_FIELD_NUMBER: _ClassVar[int]
    WORKER_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    tpot_target_ms: int
    policy: SchedulingPolicy
    classes: _containers.RepeatedCompositeFieldContainer[PriorityClassConfig]
    default_class: str
    tenants: _containers.RepeatedCompositeFieldContainer[TenantConfig]
    other_tenants: TenantConfig
    ageing_ms: int
    max_queued_requests: int
    max_queued_tokens: int
    max_pinned_share: int
    stall_timeout_ms: int
    enable_prefix_caching: bool
    eviction: EvictionPolicy
    time_wheel_slots: int
    partial_block_reuse: bool
    worker_grace_ms: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., prefill_chunk_size: _Optional[int] = ..., tpot_target_ms: _Optional[int] = ..., policy: _Optional[_Union[SchedulingPolicy, str]] = ..., classes: _Optional[_Iterable[_Union[PriorityClassConfig, _Mapping]]] = ..., default_class: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[TenantConfig, _Mapping]]] = ..., other_tenants: _Optional[_Union[TenantConfig, _Mapping]] = ..., ageing_ms: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_pinned_share: _Optional[int] = ..., stall_timeout_ms: _Optional[int] = ..., enable_prefix_caching: _Optional[bool] = ..., eviction: _Optional[_Union[EvictionPolicy, str]] = ..., time_wheel_slots: _Optional[int] = ..., partial_block_reuse: _Optional[bool] = ..., worker_grace_ms: _Optional[int] = ...) -> None: ...

class PriorityClassConfig(_message.Message):
    __slots__ = ("name", "share", "floor", "ttft_target_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    share: int
    floor: int
    ttft_target_ms: int
    def __init__(self, name: _Optional[str] = ..., share: _Optional[int] = ..., floor: _Optional[int] = ..., ttft_target_ms: _Optional[int] = ...) -> None: ...

class TenantConfig(_message.Message):
    __slots__ = ("name", "weight", "max_queued_requests", "max_queued_tokens", "max_live_requests", "remove")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: int
    max_queued_requests: int
    max_queued_tokens: int
    max_live_requests: int
    remove: bool
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_live_requests: _Optional[int] = ..., remove: _Optional[bool] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("config", "version")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    config: SchedulerConfig
    version: int
    def __init__(self, config: _Optional[_Union[SchedulerConfig, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class SetConfigRequest(_message.Message):
    __slots__ = ("change", "actor", "reason", "expected_version")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    change: SchedulerConfig
    actor: str
    reason: str
    expected_version: int
    def __init__(self, change: _Optional[_Union[SchedulerConfig, _Mapping]] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class SetConfigResponse(_message.Message):
    __slots__ = ("config", "version", "changes")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    config: SchedulerConfig
    version: int
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, config: _Optional[_Union[SchedulerConfig, _Mapping]] = ..., version: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class ListChangesRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListChangesResponse(_message.Message):
    __slots__ = ("changes", "total")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    total: int
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("time", "actor", "peer", "reason", "field", "old_value", "new_value", "version")
    TIME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OLD_VALUE_FIELD_NUMBER: _ClassVar[int]
    NEW_VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    actor: str
    peer: str
    reason: str
    field: str
    old_value: str
    new_value: str
    version: int
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., old_value: _Optional[str] = ..., new_value: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("name", "tokens", "tenant", "cache_salt", "ttl_s", "actor", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: _generation_pb2.TokenIds
    tenant: str
    cache_salt: str
    ttl_s: int
    actor: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttl_s: _Optional[int] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("blocks", "blocks_cached")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    blocks_cached: int
    def __init__(self, blocks: _Optional[int] = ..., blocks_cached: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("name", "actor", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    actor: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "blocks_pinned")
    PINS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    blocks_pinned: int
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ..., blocks_pinned: _Optional[int] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "blocks", "blocks_cached", "expires_in_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    blocks_cached: int
    expires_in_ms: int
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...
