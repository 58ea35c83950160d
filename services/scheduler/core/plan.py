"""The values that cross the core's border: what goes in, what a step is, what comes out.

Frozen and complete. Arrays are read-only by agreement; token ids are uint32, slots and blocks
int64, which numpy indexes by fastest.
"""

import enum
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint32]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
        prompt: uint32 [n], n >= 1.
        prompt_hashes: chain hashes of the prompt's full blocks back to back, 32 bytes each; may be
            shorter, or empty.
        resumed: uint32 [m], output delivered by an earlier attempt.
        max_tokens: most output tokens, resumed ones included; None: what context and pool hold.
        ignore_eos: end-of-sequence tokens do not end it; `stop_token_ids` do.
        stop_token_ids: more tokens that end it.
        traceparent: W3C trace context or "".
        salt: with whom it shares cached prefixes; `token.proto` has its two kinds.
        read_prefix_cache: False: nothing cached is used for it.
        priority_class: name of a class; "": the default one.
        tenant: whom it is for.
        deadline: when it is ended, microseconds on the clock of `now`.
        ttft_target_us: wanted time from `add` to the first token; None: the class's.
        tpot_target_us: wanted time between tokens; None: the configuration's.
        shed_late: end it as soon as it can no longer meet its TTFT target.
    """

    request_id: str
    handle: int
    attempt: int
    prompt: TokenArray
    prompt_hashes: bytes = b""
    resumed: TokenArray = field(default_factory=lambda: np.empty(0, np.uint32))
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...] = ()
    sampling: Sampling
    traceparent: str = ""
    salt: bytes = b"t"
    read_prefix_cache: bool = True
    priority_class: str = ""
    tenant: str = ""
    deadline: int | None = None
    ttft_target_us: int | None = None
    tpot_target_us: int | None = None
    shed_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A prefix that stays cached, on every worker, until it expires or its blocks are needed.

    Args:
        name: unique; a pin of the same name is replaced.
        hashes: chain hashes of its blocks back to back, 32 bytes each.
        expires: on the clock of `now`, microseconds; None: never.
    """

    name: str
    hashes: bytes
    expires: int | None


WORKER_LIMITS = MappingProxyType(
    {
        "block_size": 1 << 12,
        "num_blocks": 1 << 24,
        "max_num_seqs": 1 << 14,
        "max_num_batched_tokens": 1 << 24,
        "max_model_len": 1 << 24,
        "vocab_size": 1 << 24,
        "max_in_flight": 16,
    }
)
"""Largest values of a WorkerSpec; tables are sized by them."""


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
    model_digest: bytes
    """Enters the first block's hash; differs between models."""

    @property
    def num_slots(self) -> int:
        """Rows the worker keeps."""
        return (self.max_in_flight + 1) * self.max_num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request sent whole: its first step on this worker, or the first after preemption.

    `handle` is for those who watch the steps; the worker is not told.
    """

    slot: int
    handle: int
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
    copied_from: IntArray
    """Blocks to copy before the forward, each to the one at its place in `copied_to`."""
    copied_to: IntArray
    block_table_digest: int | None
    traceparent: str = ""
    """W3C trace context of the step's own span, put in by who watches; "": it has none."""


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
        token_ids: uint32 [sum of counts].
        execute_us: how long the worker computed, microseconds; 0: not told.
        idle_us: how long it had nothing to do before, microseconds.
    """

    epoch: int
    step_id: int
    counts: npt.NDArray[np.uint8]
    token_ids: TokenArray
    failures: tuple[RowFailure, ...] = ()
    execute_us: int = 0
    idle_us: int = 0


class EndReason(enum.Enum):
    """Every way a request can end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPLACED = "replaced"  # a higher attempt took its place
    FAILED = "failed"  # the worker could not compute it
    NO_WORKER = "no_worker"  # none attached within the grace time
    CANNOT_FIT = "cannot_fit"  # refused when the first worker told its limits
    DEADLINE = "deadline"  # not done in the time it was given
    SHED = "shed"  # could no longer meet its time to first token, and asked for that
    FAULT = "fault"  # its data could not be scheduled; a fault of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The one terminal event of a request, with the account of what it took.

    Args:
        traceparent: W3C trace context that it came with, or "".
        arrived: when it came; this and the following instants in microseconds, on the clock of
            `now`.
        admitted: when it was first planned on a worker; None: never.
        first_token: when its first token was applied here; None: never.
        ended: now.
        requeues: how often it went back to the queue since its worker was lost.
        requeued_us: how long it waited in the queue after its first admission, microseconds.
        worker_id: of the worker that had it last, "" without one.
        worker_us: its share, by tokens, of the computing time of the steps it was in, microseconds.
    """

    handle: int
    request_id: str
    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tenant: str = ""
    class_name: str = ""
    traceparent: str = ""
    arrived: int = 0
    admitted: int | None = None
    first_token: int | None = None
    ended: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    requeues: int = 0
    requeued_us: int = 0
    worker_id: str = ""
    worker_us: int = 0
    stop_token_id: int | None = None
    retry_after_us: int = 0
    refusal: "Refusal | None" = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request cannot be admitted, with the true limit.

    Args:
        field: path of the field at fault in the token-level message.
        reason: CONTEXT_LENGTH, EXCEEDS_KV_CAPACITY, EXCEEDS_QUEUE, VOCABULARY, UNKNOWN_CLASS,
            DEADLINE or DUPLICATE; or, where the same request may be taken later, QUEUE_REQUESTS,
            QUEUE_TOKENS, TENANT_REQUESTS, TENANT_TOKENS, TENANT_LIVE or TTFT_TARGET.
        limit: largest value that would be accepted.
        got: value received, or that it would come to.
        retry_after_us: when to try again, microseconds; 0: never.
        choices: the names that would be accepted, of a field that is one.
        others: more fields at fault.
    """

    field: str
    reason: str
    limit: int
    got: int
    retry_after_us: int = 0
    choices: tuple[str, ...] = ()
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
        token_ids: uint32 [tokens].
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
    displaced: int = 0
    deadline_exceeded: int = 0
    shed: int = 0
    refused: int = 0
    evicted_blocks: int = 0
    evicted_lifetime_us: int = 0
    evicted_idle_us: int = 0
    partial_hit_tokens: int = 0
    isolated_faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker now."""

    worker_id: str
    epoch: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_pinned: int
    steps: int
    steps_in_flight: int
    max_num_seqs: int
    max_num_batched_tokens: int
    computed_tokens: int
    execute_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoad:
    """One priority class now; see `ClassLoad` in info.proto."""

    name: str
    running: int
    waiting: int
    weight: int
    ttft_met: int
    ttft_missed: int
    targets_met: int
    targets_missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoad:
    """One tenant now; see `TenantLoad` in info.proto."""

    name: str
    running: int
    waiting: int
    served_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Work waits and no step completes.

    Args:
        request_id: at the head of what waits.
        reason: why it does not move, for people.
        since: when something moved last, microseconds on the clock of `now`.
    """

    request_id: str
    reason: str
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The scheduler now."""

    running: int
    waiting: int
    waiting_tokens: int
    accepted: int
    ended: int
    workers: tuple[WorkerLoad, ...]
    classes: tuple[ClassLoad, ...]
    tenants: tuple[TenantLoad, ...]
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the attached workers can serve."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    eos_token_ids: tuple[int, ...]
    num_workers: int
    block_size: int
    model_digest: bytes
    prefix_hash: str
    """Name of the hash of the prefix cache; "" where prefixes are not cached."""
