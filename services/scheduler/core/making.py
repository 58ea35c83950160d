"""The state of one step while it is made, and the moves that its makers share.

Owns what is known of the step so far: its draft, the tokens left for prefills, who gave way.
`planning` and `displacing` decide by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.admission import Backlog
from services.scheduler.core.config import Config, Policy
from services.scheduler.core.draft import Draft
from services.scheduler.core.order import OUTPUT_COST, WaitingQueue
from services.scheduler.core.plan import Counters
from services.scheduler.core.prospects import Prospect, prospect_of
from services.scheduler.core.queue_model import QueueModel
from services.scheduler.core.request import Request
from services.scheduler.core.worker_state import WorkerState
from services.scheduler.core.yielding import Standing, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a step is planned in, beside its worker. `waiting`, `backlog` and the counts change."""

    others: Sequence[WorkerState]
    waiting: WaitingQueue
    backlog: Backlog
    queue_model: QueueModel
    config: Config
    counters: Counters
    now: int


class Making:
    """One step of one worker while it is made.

    Args:
        worker: whose step; its rows and pool change as the step grows.
        around: see Surroundings.
    """

    def __init__(self, worker: WorkerState, around: Surroundings) -> None:
        self.worker = worker
        self.around = around
        self.draft = Draft(worker)
        self.budget = worker.token_budget
        """Tokens left of the budget after the decodes."""
        self.prefill_left = self.budget
        """Tokens left for prefills."""
        self.chunk_size = around.config.prefill_chunk_size
        """Most tokens of one prefill."""
        self.is_short = False
        """Memory was short, so that nobody else is let in."""
        self.current: Request | None = None
        """The request that is being looked at."""
        self.faulty: list[tuple[Request, str]] = []
        """Queued requests whose data cannot be scheduled, and why."""
        self._standing: Standing | None = None
        self._room: int | None = None

    @property
    def is_fair(self) -> bool:
        """Whether classes have shares and tenants count."""
        return self.around.config.policy is Policy.FAIR

    def standing(self) -> Standing:
        """Of the running requests; looked at anew after each change of who runs."""
        if self._standing is None:
            around = self.around
            self._standing = standing(self.worker, around.waiting, around.config, around.now)
        return self._standing

    def room(self) -> int:
        """Blocks beyond what running requests need next."""
        if self._room is None:
            self._room = self.worker.room_beyond_running()
        return self._room

    def blocks_were_taken(self) -> None:
        """A running request took blocks."""
        self._room = None

    def was_seated(self, prospect: Prospect) -> None:
        """A waiting request runs now, and has the room that was told."""
        self._standing = None
        if self._room is not None:
            self._room -= prospect.blocks

    def preempt(self, slot: int) -> None:
        """Has a running request give way: out of the step, and back into the queue."""
        self.draft.drop(slot)
        self._room = self._standing = None
        self.around.counters.preemptions += 1
        self._refund(slot)
        request = self.worker.requeue(slot, self.around.now)
        request.preemptions += 1
        self.around.waiting.push(request)

    def _refund(self, slot: int) -> None:
        """Gives back what a running request was charged for and has not had."""
        rows, size = self.worker.rows, self.worker.spec.block_size
        unplanned = int(rows.length[slot] - rows.computed[slot])
        if unplanned > 1:
            tokens = unplanned + OUTPUT_COST * size
        else:
            left = int(rows.num_blocks[slot]) * size - int(rows.computed[slot])
            tokens = OUTPUT_COST * max(0, left)
        self.around.waiting.charge(rows.request(slot), -tokens)

    def assess(self, request: Request) -> Prospect | None:
        """What its admission would take; None while an open step fills its next block.

        A request whose data cannot be looked up is noted in `faulty`.
        """
        self.current = request
        try:
            return prospect_of(request, self.worker, self.around.config)
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the step
            self.faulty.append((request, repr(error)))
            return None
