"""The values that cross the core's border: what goes in, what a step is, what comes out.

Frozen and complete. Arrays are read-only by agreement; token ids are uint32, slots and blocks
int64, which numpy indexes by fastest.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint32]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be configured. None means: what the worker announces."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int = 512
    """Most tokens of one request in one step."""
    enable_prefix_caching: bool = True
    worker_grace_us: int = 60_000_000
    """How long requests queue while no worker is attached, microseconds."""
    check_block_tables: bool = False
    """Each step carries a digest of the block tables for the worker to compare."""
    max_new_tokens_per_step: int = 1 << 20
    """Most token ids carried by the new-request records of one step (4 bytes each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw; passed through to the worker."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """A request as it enters the core.

    Args:
        request_id: unique among live requests.
        handle: the caller's name for it in events; unique among live requests.
        attempt: a higher one replaces the live request of the same id.
        prompt: uint64 [n], n >= 1.
        prompt_hashes: chain hashes of the prompt's full blocks; may be shorter, or empty.
        resumed: uint64 [m], output delivered by an earlier attempt.
        max_tokens: most output tokens, resumed ones included; None: what context and pool hold.
        ignore_eos: end-of-sequence tokens do not end it; `stop_token_ids` do.
        stop_token_ids: more tokens that end it.
        traceparent: W3C trace context or "".
    """

    request_id: str
    handle: int
    attempt: int
    prompt: TokenArray
    prompt_hashes: tuple[bytes, ...] = ()
    resumed: TokenArray = field(default_factory=lambda: np.empty(0, np.uint32))
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...] = ()
    sampling: Sampling
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker announced, limits already lowered by the configuration."""

    worker_id: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_in_flight: int
    chain_root: bytes
    """Parent of every first block's hash; differs between models."""

    @property
    def num_slots(self) -> int:
        """Rows the worker keeps."""
        return (self.max_in_flight + 1) * self.max_num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request sent whole: its first step on this worker, or the first after preemption."""

    slot: int
    token_ids: TokenArray
    prompt_len: int
    num_computed: int
    sampling: Sampling
    traceparent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One batch for one worker. Rows in batch order."""

    epoch: int
    step_id: int
    released_slots: IntArray
    new_rows: tuple[NewRow, ...]
    slots: IntArray
    num_tokens: IntArray
    num_new_blocks: IntArray
    new_block_ids: IntArray
    block_table_digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """The worker could not compute this row."""

    slot: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, rows in the plan's order.

    Args:
        counts: uint8 [rows], tokens sampled per row.
        token_ids: uint64 [sum of counts].
    """

    epoch: int
    step_id: int
    counts: npt.NDArray[np.uint8]
    token_ids: TokenArray
    failures: tuple[RowFailure, ...] = ()


class EndReason(enum.Enum):
    """Every way a request can end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPLACED = "replaced"  # a higher attempt took its place
    FAILED = "failed"  # the worker could not compute it
    NO_WORKER = "no_worker"  # none attached within the grace time
    CANNOT_FIT = "cannot_fit"  # refused when the first worker told its limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The one terminal event of a request."""

    handle: int
    request_id: str
    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    refusal: "Refusal | None" = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request cannot be admitted, with the true limit.

    Args:
        field: path of the field at fault in the token-level message.
        reason: CONTEXT_LENGTH, EXCEEDS_KV_CAPACITY, VOCABULARY or DUPLICATE.
        limit: largest value that would be accepted.
        got: value received.
        others: more fields at fault.
    """

    field: str
    reason: str
    limit: int
    got: int
    others: "tuple[Refusal, ...]" = ()


class Refused(Exception):
    """`add` did not take the request."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.field}: {refusal.reason}")
        self.refusal = refusal


class LinkFault(Exception):
    """A result that does not belong to its step: the worker's state cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What happened, for the callers of the requests.

    Args:
        handles: int64 [tokens], whose token it is; in order of generation per handle.
        token_ids: uint64 [tokens].
        ended: terminal events; each comes after its request's last token.
    """

    handles: npt.NDArray[np.int64]
    token_ids: TokenArray
    ended: tuple[Ended, ...] = ()


NO_TOKENS = Events(handles=np.empty(0, np.int64), token_ids=np.empty(0, np.uint32))


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since start; the core's own copy counts up, others get copies."""

    steps: int = 0
    mixed_steps: int = 0
    chunked_prefills: int = 0
    preemptions: int = 0
    requeues: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    discarded_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker now."""

    worker_id: str
    epoch: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    steps: int
    steps_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The scheduler now."""

    running: int
    waiting: int
    accepted: int
    ended: int
    workers: tuple[WorkerLoad, ...]
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the attached workers can serve."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    eos_token_ids: tuple[int, ...]
    num_workers: int
