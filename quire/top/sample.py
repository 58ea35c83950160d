"""What one scheduler says of itself at one instant. Values only; `codec` makes them of messages.

Fields are those of `info.proto`, which says what each means. Times in microseconds. Text is safe to
show: nothing in it moves a cursor.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Of a worker's recent steps."""

    steps: int
    link_us_p50: int
    link_us_p99: int
    execute_us_p50: int
    execute_us_p99: int
    idle_us_p50: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One attached worker; `timings` is None before its first step."""

    worker_id: str
    epoch: int
    running: int
    max_num_seqs: int
    max_num_batched_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_pinned: int
    steps: int
    steps_in_flight: int
    computed_tokens: int
    execute_us: int
    attached_us: int
    device: str
    dtype: str
    version: str
    timings: Timings | None

    @property
    def blocks_held(self) -> int:
        """Blocks that requests hold."""
        others = self.blocks_free + self.blocks_evictable + self.blocks_pinned
        return max(self.blocks_total - others, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of requests that ended lately."""

    requests: int
    ttft_us_p50: int
    ttft_us_p95: int
    tpot_requests: int
    tpot_us_p50: int
    tpot_us_p95: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """One priority class; `latencies` is None where none of its requests ended lately."""

    name: str
    running: int
    waiting: int
    weight: int
    ttft_met: int
    ttft_missed: int
    targets_met: int
    targets_missed: int
    latencies: Latencies | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant; the name is empty for requests without one."""

    name: str
    running: int
    waiting: int
    served_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Work waits and nothing moves."""

    request_id: str
    reason: str
    stalled_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scheduler at one instant of its `uptime_us`."""

    version: str
    model: str
    uptime_us: int
    running: int
    waiting: int
    waiting_tokens: int
    accepted: int
    ended: int
    workers: tuple[Worker, ...]
    classes: tuple[PriorityClass, ...]
    tenants: tuple[Tenant, ...]
    counters: Mapping[str, int]
    latencies: Latencies | None
    stall: Stall | None
