"""The making of one step: decodes, seats for the more important, then prefills and admissions.

There is no prefill phase and no decode phase: each request has `computed` chasing `length`, and a
step is a map request -> tokens whose sum stays within the token budget (the unified budget of the
vLLM V1 scheduler). Rows that want one token come first; what is left goes to prefills, those of
running and of waiting requests in one order of importance, cut so that the step stays below the
time between tokens that its decodes are to have.
"""

import enum
from typing import NamedTuple

import numpy as np

from services.scheduler.core.config import Policy
from services.scheduler.core.displacing import Displacement, is_owed
from services.scheduler.core.draft import NO_INTS
from services.scheduler.core.latency_bound import has_target, prefill_bound
from services.scheduler.core.making import Making, Surroundings
from services.scheduler.core.order import OUTPUT_COST
from services.scheduler.core.placement import belongs_elsewhere
from services.scheduler.core.plan import IntArray, StepPlan
from services.scheduler.core.prospects import Prospect, may_enter
from services.scheduler.core.request import Request, Status
from services.scheduler.core.worker_state import WorkerState
from services.scheduler.core.yielding import cheapest_first, later

_MAX_PASSED_OVER = 256
"""Waiting requests looked at and left in one step; bounds the time of `plan`."""


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    PASS_OVER = enum.auto()
    BLOCKED = enum.auto()
    """It is next and does not fit in: no less important one may take its room."""


class _Place(NamedTuple):
    """A running prefill: slot, aged rank of its class, level, and what its tenant was charged."""

    slot: int
    rank: int
    level: int
    served: int


class Planner:
    """Plans one step of one worker.

    Args:
        worker: whose step; its rows and pool change as the step grows.
        around: see Surroundings.
    """

    def __init__(self, worker: WorkerState, around: Surroundings) -> None:
        self._making = Making(worker, around)
        self._worker = worker
        self._draft = self._making.draft
        self._waiting = around.waiting
        self._around = around
        self._prefills: dict[int, int] = {}
        """Prefills of this step by flow, running and admitted ones."""

    @property
    def current(self) -> Request | None:
        """The request that was looked at last."""
        return self._making.current

    @property
    def faulty(self) -> list[tuple[Request, str]]:
        """Queued requests whose data cannot be scheduled, and why."""
        return self._making.faulty

    def make(self) -> StepPlan | None:
        """The step, or None where there is nothing to compute and nothing to release."""
        prefilling = self._decode()
        first: list[Request] = []
        # After the decodes, for only now it is known whether who takes a seat can begin.
        if len(self._waiting) and self._waiting.is_shared and not self._making.is_short:
            first = Displacement(self._making).run()
        self._prefill(prefilling, first)
        return self._draft.seal(self._around.config, self._around.counters)

    # Running requests

    def _decode(self) -> IntArray:
        """Schedules all rows that want one token; returns those that want more."""
        rows = self._worker.rows
        order = rows.order
        if not order.size:
            return NO_INTS
        length = rows.length[order]
        want = length - rows.computed[order]
        # The last token a request may have is being sampled: nothing is left to compute.
        want *= length < rows.limit[order]
        steady = order[want == 1]
        prefilling = order[want > 1] if steady.size < np.count_nonzero(want) else NO_INTS
        # The budget may have been lowered below what runs already.
        slots = steady[: self._making.budget]
        self._making.budget -= slots.size
        if slots.size:
            self._schedule_decodes(slots)
        self._making.prefill_left = self._making.budget
        if prefilling.size or len(self._waiting):
            self._bound_prefills(slots)
        return prefilling

    def _schedule_decodes(self, slots: IntArray) -> None:
        worker, rows = self._worker, self._worker.rows
        tokens = worker.ones[: slots.size]
        owners = (rows.computed[slots] == rows.num_blocks[slots] * worker.spec.block_size).nonzero()
        takers = slots[owners]
        if not takers.size:
            self._draft.record(slots, tokens, worker.zeros[: slots.size], NO_INTS)
            return
        if takers.size > worker.pool.available:
            for slot in takers.tolist():
                if self._continue(slot, 1):
                    self._charge_output(slot)
            rest = np.setdiff1d(slots, takers, assume_unique=True)
            self._draft.record(rest, worker.ones[: rest.size], worker.zeros[: rest.size], NO_INTS)
            return
        blocks = worker.pool.allocate(takers.size)
        rows.blocks[takers, rows.num_blocks[takers]] = blocks
        rows.num_blocks[takers] += 1
        needed = np.zeros(slots.size, np.int64)
        needed[owners] = 1
        self._draft.record(slots, tokens, needed, blocks)
        for slot in takers.tolist() if self._waiting.is_shared else ():
            self._charge_output(slot)

    def _charge_output(self, slot: int) -> None:
        """Charges a running request for the block of output tokens that begins."""
        request = self._worker.rows.request(slot)
        self._waiting.charge(request, OUTPUT_COST * self._worker.spec.block_size)

    def _continue(self, slot: int, tokens: int) -> int:
        """Schedules `tokens` tokens of a running request, or as many as there are blocks for.

        Where there is none, less important requests give way, else this one. Returns how many.
        """
        worker, rows = self._worker, self._worker.rows
        if self._draft.has_dropped(slot):
            return 0
        self._making.current = rows.request(slot)
        size = worker.spec.block_size
        computed, held = int(rows.computed[slot]), int(rows.num_blocks[slot])
        room = (held + worker.pool.available) * size - computed
        if room < 1 and not self._make_room(slot):
            return 0
        tokens = min(tokens, (held + worker.pool.available) * size - computed)
        blocks = worker.pool.allocate(-(-(computed + tokens) // size) - held)
        rows.append_blocks(slot, blocks)
        self._draft.record(
            np.array([slot], np.int64),
            np.array([tokens], np.int64),
            np.array([blocks.size], np.int64),
            blocks,
        )
        self._making.blocks_were_taken()
        return tokens

    def _make_room(self, slot: int) -> bool:
        """Frees at least one block for a running request; False: it gave way itself."""
        worker = self._worker
        while worker.pool.available < 1:
            self._making.is_short = True
            standings = self._making.standing()
            places = later(standings, worker, slot)
            places = places[~np.isin(standings.slots[places], self._draft.new_slots)]
            if places.size:
                self._making.preempt(cheapest_first(standings, places, worker)[0])
            elif worker.rows.order.size > 1 or not worker.pool.yield_pins(1):
                self._making.preempt(slot)
                return False
        return True

    def _bound_prefills(self, decodes: IntArray) -> None:
        """Cuts the prefill share of the step to what the decodes' target leaves."""
        making, config = self._making, self._around.config
        most = prefill_bound(self._worker, decodes, config)
        if most is not None:
            making.chunk_size = making.budget
            making.prefill_left = min(making.budget, most)
        elif has_target(self._worker, decodes, config):
            making.prefill_left = min(making.budget, config.prefill_chunk_size)

    # Prefills, of running and of waiting requests

    def _prefill(self, prefilling: IntArray, first: list[Request]) -> None:
        """Schedules prefills.

        Args:
            prefilling: int64 [n], slots of running requests that want more than one token.
            first: waiting requests for which others gave way.
        """
        for request in first:
            if not self._admit(request):
                self._waiting.push(request)
        running = self._by_importance(prefilling)
        self._grant_shares(running)
        for place in running:
            if self._waiting.is_shared:
                self._admit_above(place)
            if self._making.prefill_left < 1:
                break
            self._continue_prefill(place.slot, self._making.prefill_left)
        if len(self._waiting):
            self._admit_waiting()

    def _continue_prefill(self, slot: int, most: int) -> None:
        if self._draft.has_row(slot):
            return
        want = int(self._worker.rows.length[slot] - self._worker.rows.computed[slot])
        self._making.prefill_left -= self._continue(slot, min(want, self._making.chunk_size, most))

    def _grant_shares(self, running: list[_Place]) -> None:
        """Gives the first prefill of each class but the most important its class's share.

        What is left goes by importance, so that a class moves on while better ones have work.
        """
        if len({place.rank for place in running}) < 2 or not self._making.is_fair:
            return
        firsts: dict[int, tuple[int, int]] = {}
        for slot, aged_rank, _, _ in running:
            own = self._worker.rows.rank.item(slot)
            firsts.setdefault(own, (slot, aged_rank))
        weights = {rank: self._waiting.classes[rank].weight for rank in firsts}
        total, best = sum(weights.values()), running[0].rank
        left = self._making.prefill_left
        for rank, (slot, aged_rank) in sorted(firsts.items()):
            if aged_rank > best:
                self._continue_prefill(slot, max(1, left * weights[rank] // total))

    def _by_importance(self, prefilling: IntArray) -> list[_Place]:
        """Running prefills, the most important first.

        The level counts prefills of the same tenant, so that tenants take turns.
        """
        waiting, now = self._waiting, self._around.now
        # Some may have given way to decodes.
        slots = [slot for slot in prefilling.tolist() if not self._draft.has_dropped(slot)]
        requests = [self._worker.rows.request(slot) for slot in slots]
        requests.sort(key=lambda request: (request.due, request.arrival))
        if not waiting.is_shared or self._around.config.policy is Policy.FCFS:
            return [_Place(request.slot, 0, 0, 0) for request in requests]
        is_fair = self._making.is_fair
        levels: dict[int, int] = {}
        found: list[_Place] = []
        for request in requests:
            flow, level = waiting.flow(request.flow), levels.get(request.flow, 0)
            rank = waiting.aged_rank(request, now)
            self._count_prefill(request)
            if is_fair:
                levels[request.flow] = level + 1_000_000 // flow.weight
            found.append(_Place(request.slot, rank, level, flow.served if is_fair else 0))
        return sorted(found, key=lambda place: (place.rank, place.level, place.served))

    def _count_prefill(self, request: Request) -> None:
        self._prefills[request.flow] = self._prefills.get(request.flow, 0) + 1

    # Waiting requests

    def _admit_above(self, place: _Place) -> None:
        """Lets waiting requests in that are more important than a running prefill."""
        blocked: set[int] = set()
        while self._has_seat():
            for request in self._waiting.contenders():
                if request.flow in blocked or not self._stands_above(request, place):
                    continue
                self._waiting.remove(request)
                if not self._admit(request):
                    self._waiting.push(request)
                    blocked.add(request.flow)
                break
            else:
                return

    def _stands_above(self, request: Request, place: _Place) -> bool:
        """Whether a waiting request's prefill comes before a running one.

        By class, then by how many prefills its tenant has in this step, then by what that had.
        """
        if self._around.config.policy is Policy.FCFS:
            return False
        rank = self._waiting.aged_rank(request, self._around.now)
        if rank != place.rank or self._around.config.policy is Policy.PRIORITY:
            spared = self._making.is_fair and is_owed(
                request, self._worker.rows.rank[[place.slot]], self._waiting
            )
            return rank < place.rank and not spared
        flow, held = self._waiting.flow(request.flow), self._prefills.get(request.flow, 0)
        own = (held * 1_000_000 // flow.weight, flow.served)
        is_other = self._worker.rows.flow.item(place.slot) != request.flow
        return is_other and own < (place.level, place.served)

    def _has_seat(self) -> bool:
        rows = self._worker.rows
        return (
            not self._making.is_short
            and self._making.prefill_left > 0
            and rows.order.size < self._worker.seat_cap
            and rows.has_free_slot
        )

    def _admit(self, request: Request) -> bool:
        """Admits a request that was taken out of the queue, if it can be now."""
        return self._has_seat() and self._try_admit(request) is _Verdict.ADMITTED

    def _admit_waiting(self) -> None:
        left: list[Request] = []
        below_rank: int | None = None
        while self._has_seat() and len(left) < _MAX_PASSED_OVER:
            request = self._waiting.pop(self._around.now, below_rank)
            if request is None:
                break
            verdict = self._try_admit(request)
            if verdict is not _Verdict.ADMITTED:
                left.append(request)
            if verdict is _Verdict.BLOCKED:
                below_rank = request.rank
        self._waiting.push_back(left)

    def _try_admit(self, request: Request) -> _Verdict:
        worker, pool, size = self._worker, self._worker.pool, self._worker.spec.block_size
        if not may_enter(request, worker):
            return _Verdict.PASS_OVER
        total = request.num_tokens
        carried = self._draft.carried_tokens
        if carried and carried + total > self._around.config.max_new_tokens_per_step:
            return _Verdict.BLOCKED
        prospect = self._making.assess(request)
        if prospect is None:
            return _Verdict.PASS_OVER
        computed, hits = prospect.computed, prospect.hits
        alone = not worker.rows.order.size
        # A gate, not a reservation. A lone request needs none: it fits the whole pool.
        if not alone and prospect.blocks > self._making.room():
            return _Verdict.BLOCKED
        others = self._around.others
        if others and belongs_elsewhere(request, computed, worker, others):
            return _Verdict.PASS_OVER
        chunk = min(total - computed, self._making.chunk_size, self._making.prefill_left)
        needed = -(-(computed + chunk) // size) - hits.size
        short = needed + prospect.idle_hits - pool.available
        if short > 0 and pool.yield_pins(short) < short:
            return _Verdict.BLOCKED
        self._seat(request, prospect, chunk, needed)
        return _Verdict.ADMITTED

    def _seat(self, request: Request, prospect: Prospect, chunk: int, needed: int) -> None:
        worker, counters = self._worker, self._around.counters
        hits, computed = prospect.hits, prospect.computed
        size = worker.spec.block_size
        worker.pool.hold(hits)
        source = prospect.partial[0] if prospect.partial else None
        if source is not None:
            # Held until the step is made, so that it is not given out in this very step.
            worker.pool.hold(np.array([source], np.int64))
        blocks = worker.pool.allocate(needed)
        if source is not None:
            self._draft.copy(source, int(blocks[0]))
            counters.partial_hit_tokens += computed - hits.size * size
        tokens = request.token_ids()
        slot = worker.rows.occupy(request, tokens, hits, computed)
        worker.rows.append_blocks(slot, blocks)
        if request.is_fresh:
            self._around.backlog.admitted(request.spec)
            self._around.queue_model.admitted(request.prompt_len, self._around.now)
            request.cached_tokens = min(computed, request.prompt_len)
            request.admitted = self._around.now
        else:
            request.requeued_us += self._around.now - request.queued_since
        request.status = Status.RUNNING
        request.deferrals = 0
        request.worker_id, request.slot = worker.spec.worker_id, slot
        request.last_worker = worker.spec.worker_id
        if worker.caches_prefixes and request.spec.read_prefix_cache:
            counters.prefix_query_tokens += tokens.size
            counters.prefix_hit_tokens += computed
        recomputed = max(0, request.computed_once - computed)
        request.recomputed += recomputed
        counters.recomputed_tokens += recomputed
        self._waiting.admitted(request, tokens.size - computed + OUTPUT_COST * size)
        self._making.prefill_left -= chunk
        self._making.was_seated(prospect)
        self._draft.carry(slot, request, computed)
        self._draft.record(
            np.array([slot], np.int64),
            np.array([chunk], np.int64),
            np.array([hits.size + blocks.size], np.int64),
            np.concatenate([hits, blocks]),
        )
