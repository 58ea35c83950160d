from quire.v1 import token_pb2 as _token_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("register", "result", "bye")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    register: Register
    result: StepResult
    bye: _token_pb2.Bye
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., bye: _Optional[_Union[_token_pb2.Bye, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("registered", "step", "bye")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    step: Step
    bye: _token_pb2.Bye
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., bye: _Optional[_Union[_token_pb2.Bye, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("worker_id", "instance_id", "protocol_major", "model", "model_digest", "dtype", "device", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size", "eos_token_ids", "max_in_flight", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    protocol_major: int
    model: str
    model_digest: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_in_flight: int
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., protocol_major: _Optional[int] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_in_flight: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("epoch", "max_num_seqs", "num_slots", "check_block_tables")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    max_num_seqs: int
    num_slots: int
    check_block_tables: bool
    def __init__(self, epoch: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_slots: _Optional[int] = ..., check_block_tables: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("epoch", "step_id", "released_slots", "new_requests", "slots", "num_tokens", "num_new_blocks", "new_block_ids", "block_table_digest", "copied_from", "copied_to", "traceparent")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COPIED_FROM_FIELD_NUMBER: _ClassVar[int]
    COPIED_TO_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    released_slots: bytes
    new_requests: _containers.RepeatedCompositeFieldContainer[NewRequest]
    slots: bytes
    num_tokens: bytes
    num_new_blocks: bytes
    new_block_ids: bytes
    block_table_digest: int
    copied_from: bytes
    copied_to: bytes
    traceparent: str
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., released_slots: _Optional[bytes] = ..., new_requests: _Optional[_Iterable[_Union[NewRequest, _Mapping]]] = ..., slots: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., num_new_blocks: _Optional[bytes] = ..., new_block_ids: _Optional[bytes] = ..., block_table_digest: _Optional[int] = ..., copied_from: _Optional[bytes] = ..., copied_to: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class NewRequest(_message.Message):
    __slots__ = ("slot", "token_ids", "prompt_len", "num_computed", "temperature", "top_p", "top_k", "seed", "traceparent")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: bytes
    prompt_len: int
    num_computed: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    traceparent: str
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., num_computed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step_id", "counts", "token_ids", "errors", "timings")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    counts: bytes
    token_ids: bytes
    errors: _containers.RepeatedCompositeFieldContainer[SlotError]
    timings: StepTimings
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[SlotError, _Mapping]]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ...) -> None: ...

class SlotError(_message.Message):
    __slots__ = ("slot", "message")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    message: str
    def __init__(self, slot: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("wait_us", "execute_us", "idle_us")
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    wait_us: int
    execute_us: int
    idle_us: int
    def __init__(self, wait_us: _Optional[int] = ..., execute_us: _Optional[int] = ..., idle_us: _Optional[int] = ...) -> None: ...
