"""One request as the core keeps it from `add` to its terminal event.

While it runs, its tokens and lengths live in the worker's row table (`rows`); here is what outlives
a stay on a worker.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.chain import Chain
from services.scheduler.core.plan import AddRequest, TokenArray


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable state of a live request; owned by the Scheduler.

    Args:
        spec: as it came in.
        arrival: position in the order of arrival; unique.
        arrived: when it came, microseconds.
        limit: most tokens in all, prompt included; None until a worker has told its limits.
        ttft_target_us: its own or its class's; None: none.
        recomputed: tokens computed again after a preemption or a requeue.
        preemptions: how often it gave way.
        requeues: how often its worker was lost.
        queued_since: when it came to the queue last, microseconds.
        requeued_us: how long it waited there after its first admission, as far as that is over.
        last_worker: that had it last, "" before.
        worker_us: computing time of the stays that are over; see `Ended`.
        admitted: when it was first planned, microseconds; None before.
        rank: of its class, 0 the most important.
        flow: number of its tenant's place in its class; set by `WaitingQueue.join`.
        due: what it is ordered by within its flow.
        ticket: of its entry in the queue; an entry with another one is stale.
        queued_tokens: its tokens when it was queued last.
        output: tokens applied so far; complete only while WAITING.
        chain: hashes of its full blocks, as far as known.
        in_flight: sampled tokens still to come from steps planned before it was preempted.
        computed_once: tokens whose keys and values have been computed at least once.
        cached_tokens: prompt tokens found in the prefix cache at its first admission; None before.
        first_token: when its first token was applied, microseconds; None before.
        deferrals: how often it was left to another worker since it was queued.
    """

    spec: AddRequest
    arrival: int
    arrived: int
    limit: int | None
    ttft_target_us: int | None
    rank: int = 0
    flow: int = -1
    due: int = 0
    ticket: int = 0
    queued_tokens: int = 0
    output: list[int] = field(default_factory=list)
    chain: Chain = field(default_factory=Chain)
    status: Status = Status.WAITING
    worker_id: str = ""
    slot: int = -1
    in_flight: int = 0
    computed_once: int = 0
    recomputed: int = 0
    preemptions: int = 0
    requeues: int = 0
    queued_since: int = 0
    requeued_us: int = 0
    last_worker: str = ""
    worker_us: int = 0
    admitted: int | None = None
    cached_tokens: int | None = None
    first_token: int | None = None
    deferrals: int = 0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return int(self.spec.prompt.size)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output; exact only while WAITING."""
        return self.prompt_len + len(self.output)

    @property
    def is_fresh(self) -> bool:
        """Whether it was never admitted to a worker."""
        return self.cached_tokens is None

    def token_ids(self) -> TokenArray:
        """Prompt and output so far; exact only while WAITING."""
        if not self.output:
            return self.spec.prompt
        return np.concatenate([self.spec.prompt, np.array(self.output, np.uint32)])
