"""What the core decides by, besides its inputs: one frozen value, replaced whole by `configure`."""

import enum
from dataclasses import dataclass


class Policy(enum.Enum):
    """How waiting requests are ordered.

    FAIR: classes by their weights, tenants of a class evenly, earliest target first.
    PRIORITY: strictly by class, earliest target first; tenants do not count.
    FCFS: order of arrival; neither class nor tenant counts.
    """

    FAIR = "fair"
    PRIORITY = "priority"
    FCFS = "fcfs"


class Eviction(enum.Enum):
    """Which cached blocks are given up first; see `eviction`."""

    LRU = "lru"
    TIME_WHEEL = "time-wheel"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """One class of requests; its place in `Config.classes` is its rank, 0 the most important.

    Args:
        name: unique.
        share: of the tokens while all classes have work, per mille; >= 1.
        floor: what it keeps while more important ones miss their targets, per mille; >= 1.
        ttft_target_us: wanted time to the first token where the request names none; microseconds.
    """

    name: str
    share: int
    floor: int
    ttft_target_us: int | None = None


DEFAULT_CLASSES = (
    PriorityClass(name="interactive", share=700, floor=700),
    PriorityClass(name="standard", share=250, floor=50),
    PriorityClass(name="batch", share=50, floor=10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """What a tenant gets. None: no bound of its own.

    Args:
        weight: of its share among the tenants of a class, per mille of an ordinary tenant's; >= 1.
        max_queued_requests: requests that wait for their first admission.
        max_queued_tokens: their prompt tokens.
        max_live_requests: requests accepted and not ended.
    """

    weight: int = 1000
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_live_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be configured. None means: what the worker announces, or no bound."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int = 512
    """Most tokens of one request in one step while no step-time target cuts it."""
    enable_prefix_caching: bool = True
    worker_grace_us: int = 60_000_000
    """How long requests queue while no worker is attached, microseconds."""
    check_block_tables: bool = False
    """Each step carries a digest of the block tables for the worker to compare."""
    max_new_tokens_per_step: int = 1 << 17
    """Most token ids carried by the new-request records of one step (4 bytes each).

    A longer request goes alone: the step that carries several very long ones comes late for all.
    """
    policy: Policy = Policy.FAIR
    classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES
    default_class: str = "standard"
    tenants: tuple[tuple[str, TenantPolicy], ...] = ()
    """Tenants with a policy of their own, by name."""
    other_tenants: TenantPolicy = TenantPolicy()
    """The policy of everybody else."""
    tpot_target_us: int | None = None
    """Wanted time between tokens, microseconds; cuts prefills. Requests may bring their own."""
    ageing_us: int = 30_000_000
    """Under PRIORITY a request counts as one class more important for each such time it is here."""
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    """Bounds of all requests that wait for their first admission, and of their prompt tokens."""
    eviction: Eviction = Eviction.LRU
    time_wheel_slots: int = 64
    partial_block_reuse: bool = False
    """Copies the equal beginning of a block of which no whole block is equal."""
    max_pinned_share: int = 250
    """Most blocks of a pool that pins may keep, per mille."""
    stall_timeout_us: int = 30_000_000
    """How long work may wait without any step completing before that is called a stall."""
