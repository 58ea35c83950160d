from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_MODE_UNSPECIFIED: _ClassVar[JournalMode]
    JOURNAL_MODE_TOKENS: _ClassVar[JournalMode]
    JOURNAL_MODE_HASHES: _ClassVar[JournalMode]

class JournalCloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_CLOSE_REASON_UNSPECIFIED: _ClassVar[JournalCloseReason]
    JOURNAL_CLOSE_REASON_STOPPED: _ClassVar[JournalCloseReason]
    JOURNAL_CLOSE_REASON_FAILED: _ClassVar[JournalCloseReason]
JOURNAL_MODE_UNSPECIFIED: JournalMode
JOURNAL_MODE_TOKENS: JournalMode
JOURNAL_MODE_HASHES: JournalMode
JOURNAL_CLOSE_REASON_UNSPECIFIED: JournalCloseReason
JOURNAL_CLOSE_REASON_STOPPED: JournalCloseReason
JOURNAL_CLOSE_REASON_FAILED: JournalCloseReason

class JournalHeader(_message.Message):
    __slots__ = ("magic", "version", "quire_version", "mode", "config_json", "prefix_hash", "hash_key", "digest_bytes", "started_unix_us", "started", "checksum")
    MAGIC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    magic: str
    version: int
    quire_version: str
    mode: JournalMode
    config_json: str
    prefix_hash: str
    hash_key: bytes
    digest_bytes: int
    started_unix_us: int
    started: int
    checksum: int
    def __init__(self, magic: _Optional[str] = ..., version: _Optional[int] = ..., quire_version: _Optional[str] = ..., mode: _Optional[_Union[JournalMode, str]] = ..., config_json: _Optional[str] = ..., prefix_hash: _Optional[str] = ..., hash_key: _Optional[bytes] = ..., digest_bytes: _Optional[int] = ..., started_unix_us: _Optional[int] = ..., started: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("now", "decision", "summary", "ended", "error", "block_hashes", "flush", "add", "abort", "finish", "attach", "lost", "configure_json", "pin", "unpin", "expire", "plan", "apply", "close", "checksum")
    NOW_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_JSON_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    now: int
    decision: int
    summary: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedCompositeFieldContainer[JournalEnd]
    error: str
    block_hashes: bytes
    flush: JournalFlush
    add: JournalAdd
    abort: int
    finish: JournalFinish
    attach: JournalAttach
    lost: str
    configure_json: str
    pin: JournalPin
    unpin: str
    expire: JournalExpire
    plan: str
    apply: JournalApply
    close: JournalClose
    checksum: int
    def __init__(self, now: _Optional[int] = ..., decision: _Optional[int] = ..., summary: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[_Union[JournalEnd, _Mapping]]] = ..., error: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., flush: _Optional[_Union[JournalFlush, _Mapping]] = ..., add: _Optional[_Union[JournalAdd, _Mapping]] = ..., abort: _Optional[int] = ..., finish: _Optional[_Union[JournalFinish, _Mapping]] = ..., attach: _Optional[_Union[JournalAttach, _Mapping]] = ..., lost: _Optional[str] = ..., configure_json: _Optional[str] = ..., pin: _Optional[_Union[JournalPin, _Mapping]] = ..., unpin: _Optional[str] = ..., expire: _Optional[_Union[JournalExpire, _Mapping]] = ..., plan: _Optional[str] = ..., apply: _Optional[_Union[JournalApply, _Mapping]] = ..., close: _Optional[_Union[JournalClose, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class JournalTokens(_message.Message):
    __slots__ = ("packed", "size", "places", "ids", "neutral")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    NEUTRAL_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    size: int
    places: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    neutral: int
    def __init__(self, packed: _Optional[bytes] = ..., size: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., neutral: _Optional[int] = ...) -> None: ...

class JournalAdd(_message.Message):
    __slots__ = ("request_id", "handle", "attempt", "prompt", "prompt_hashes", "resumed", "max_tokens", "ignore_eos", "stop_token_ids", "temperature", "top_p", "top_k", "seed", "traceparent", "salt", "skip_reading_prefix_cache", "priority_class", "tenant", "deadline", "ttft_target_us", "tpot_target_us", "shed_late")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    SHED_LATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    handle: int
    attempt: int
    prompt: JournalTokens
    prompt_hashes: bytes
    resumed: JournalTokens
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    traceparent: str
    salt: bytes
    skip_reading_prefix_cache: bool
    priority_class: str
    tenant: str
    deadline: int
    ttft_target_us: int
    tpot_target_us: int
    shed_late: bool
    def __init__(self, request_id: _Optional[str] = ..., handle: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Union[JournalTokens, _Mapping]] = ..., prompt_hashes: _Optional[bytes] = ..., resumed: _Optional[_Union[JournalTokens, _Mapping]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., traceparent: _Optional[str] = ..., salt: _Optional[bytes] = ..., skip_reading_prefix_cache: _Optional[bool] = ..., priority_class: _Optional[str] = ..., tenant: _Optional[str] = ..., deadline: _Optional[int] = ..., ttft_target_us: _Optional[int] = ..., tpot_target_us: _Optional[int] = ..., shed_late: _Optional[bool] = ...) -> None: ...

class JournalFinish(_message.Message):
    __slots__ = ("handle", "kept_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kept_tokens: int
    def __init__(self, handle: _Optional[int] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class JournalAttach(_message.Message):
    __slots__ = ("spec_json", "refused")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    refused: bool
    def __init__(self, spec_json: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...

class JournalPin(_message.Message):
    __slots__ = ("name", "hashes", "expires")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    name: str
    hashes: bytes
    expires: int
    def __init__(self, name: _Optional[str] = ..., hashes: _Optional[bytes] = ..., expires: _Optional[int] = ...) -> None: ...

class JournalExpire(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalFlush(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JournalApply(_message.Message):
    __slots__ = ("worker_id", "epoch", "step_id", "rows", "counts", "tokens", "failures", "execute_us", "idle_us")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    step_id: int
    rows: int
    counts: bytes
    tokens: JournalTokens
    failures: _containers.RepeatedCompositeFieldContainer[JournalFailure]
    execute_us: int
    idle_us: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., rows: _Optional[int] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[_Union[JournalTokens, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[JournalFailure, _Mapping]]] = ..., execute_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...

class JournalFailure(_message.Message):
    __slots__ = ("slot", "message")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    message: str
    def __init__(self, slot: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class JournalEnd(_message.Message):
    __slots__ = ("handle", "reason", "completion_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    completion_tokens: int
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class JournalClose(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: JournalCloseReason
    message: str
    def __init__(self, reason: _Optional[_Union[JournalCloseReason, str]] = ..., message: _Optional[str] = ...) -> None: ...
