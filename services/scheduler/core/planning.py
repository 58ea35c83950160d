"""The making of one step: seats for the more important, decodes, then prefills and admissions.

There is no prefill phase and no decode phase: each request has `computed` chasing `length`, and a
step is a map request -> tokens whose sum stays within the token budget (the unified budget of the
vLLM V1 scheduler). Rows that want one token come first; what is left goes to prefills, those of
running and of waiting requests in one order of importance, cut so that the step stays below the
time between tokens that its decodes are to have.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.scheduler.core.admission import Backlog, fits
from services.scheduler.core.config import Config, Policy
from services.scheduler.core.draft import NO_INTS, Draft
from services.scheduler.core.order import OUTPUT_COST, WaitingQueue
from services.scheduler.core.placement import belongs_elsewhere
from services.scheduler.core.plan import Counters, IntArray, Mask, StepPlan
from services.scheduler.core.queue_model import QueueModel
from services.scheduler.core.request import Request, Status
from services.scheduler.core.rows import NO_TARGET
from services.scheduler.core.step_time import StepShape
from services.scheduler.core.worker_state import WorkerState
from services.scheduler.core.yielding import (
    Standing,
    below,
    cheapest_first,
    later,
    standing,
    standing_of,
)

_MAX_PASSED_OVER = 256
"""Waiting requests looked at and left in one step; bounds the time of `plan`."""

_TARGET_RESERVE = 32
"""This part of the time between tokens is left to their way to the client."""

_MOST_STEPS_WITHOUT_PREFILL = 4
"""After so many steps whose decodes left no time for prefills, a block is computed all the same."""

_MAX_DISPLACING = 8
"""Waiting requests that displace running ones in one step; bounds the time of `plan`."""


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


@dataclass(frozen=True, slots=True)
class _Prospect:
    """What the admission of a waiting request would take.

    Args:
        hits: int64 [n], its cached prefix.
        partial: a block whose first tokens are the next ones, and how many those are.
        computed: tokens that need not be computed.
        ahead: blocks it needs besides `hits` until it has one block's worth of output.
        idle_hits: blocks of `hits` that nobody holds.
    """

    hits: IntArray
    partial: tuple[int, int] | None
    computed: int
    ahead: int
    idle_hits: int


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


class Planner:
    """Plans one step of one worker.

    Args:
        worker: whose step; its rows and pool change as the step grows.
        around: see Surroundings.
    """

    def __init__(self, worker: WorkerState, around: Surroundings) -> None:
        self._worker = worker
        self._around = around
        self._waiting = around.waiting
        self._config = around.config
        self._draft = Draft(worker)
        self._budget = worker.token_budget
        self._prefill_left = self._budget
        self._chunk_size = self._config.prefill_chunk_size
        self._first: list[Request] = []
        """Waiting requests for which others gave way."""
        self._promised_blocks = 0
        self._promised_tokens = 0
        """What they need, and want computed in this step."""
        self._prefills: dict[int, int] = {}
        """Prefills of this step by flow, running and admitted ones."""
        self._standings: Standing | None = None
        self._room: int | None = None
        """Blocks beyond what running requests need next; None: not known."""
        self._short = False
        """Memory was short, so that nobody else is let in."""
        self.current: Request | None = None
        """The request that is being looked at."""
        self.faulty: list[tuple[Request, str]] = []
        """Queued requests whose data cannot be scheduled, and why."""

    def make(self) -> StepPlan | None:
        """The step, or None where there is nothing to compute and nothing to release."""
        prefilling = self._decode()
        # After the decodes, for only now it is known whether who takes a seat can begin.
        if len(self._waiting) and self._waiting.is_shared and not self._short:
            self._displace()
        self._prefill(prefilling)
        return self._draft.seal(self._config, self._around.counters)

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
        slots = steady[: self._budget]
        self._budget -= slots.size
        if slots.size:
            self._schedule_decodes(slots)
        self._prefill_left = self._budget
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
        self.current = rows.request(slot)
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
        self._room = None
        return tokens

    def _make_room(self, slot: int) -> bool:
        """Frees at least one block for a running request; False: it gave way itself."""
        worker = self._worker
        while worker.pool.available < 1:
            self._short = True
            standings = self._standing()
            places = later(standings, worker, slot)
            places = places[~np.isin(standings.slots[places], self._draft.new_slots)]
            if places.size:
                self._preempt(cheapest_first(standings, places, worker)[0])
            elif worker.rows.order.size > 1 or not worker.pool.yield_pins(1):
                self._preempt(slot)
                return False
        return True

    def _standing(self) -> Standing:
        """Of the running requests, looked at anew after each change of who runs."""
        if self._standings is None:
            around = self._around
            self._standings = standing(self._worker, self._waiting, self._config, around.now)
        return self._standings

    def _preempt(self, slot: int) -> None:
        self._draft.drop(slot)
        self._room = self._standings = None
        self._around.counters.preemptions += 1
        request = self._worker.requeue(slot)
        request.preemptions += 1
        self._waiting.push(request)

    # Prefills, of running and of waiting requests

    def _bound_prefills(self, decodes: IntArray) -> None:
        """Cuts the prefill share of the step to what the decodes' target leaves."""
        worker, rows, config = self._worker, self._worker.rows, self._config
        if not decodes.size:
            return
        target = min(config.tpot_target_us or NO_TARGET, int(rows.tpot_target_us[decodes].min()))
        if target == NO_TARGET:
            return
        # Streams see steps from answer to answer, and their tokens take a way of their own.
        target = max(0, target - worker.pacing.overhead_us - target // _TARGET_RESERVE)
        shape = StepShape(
            tokens=decodes.size,
            rows=decodes.size,
            context=int(rows.computed[decodes].sum()) + decodes.size,
        )
        most = worker.step_time.tokens_within(target, shape, self._longest_prefill())
        if most is None:
            most = config.prefill_chunk_size
        else:
            self._chunk_size = self._budget
        # A block every now and then, so that new prompts are never shut out.
        worker.steps_without_prefill += 1
        if most < 1 and worker.steps_without_prefill >= _MOST_STEPS_WITHOUT_PREFILL:
            most = worker.spec.block_size
        if most > 0:
            worker.steps_without_prefill = 0
        self._prefill_left = min(self._budget, most)

    def _longest_prefill(self) -> int:
        """Tokens computed of the running prefill that has got furthest."""
        rows = self._worker.rows
        unfinished = rows.computed[rows.order] < rows.length[rows.order] - 1
        computed = rows.computed[rows.order][unfinished]
        return int(computed.max()) if computed.size else 0

    def _prefill(self, prefilling: IntArray) -> None:
        for request in self._first:
            if not self._admit(request):
                self._waiting.push(request)
        running = self._by_importance(prefilling)
        self._grant_shares(running)
        for place in running:
            if self._waiting.is_shared:
                self._admit_above(place)
            if self._prefill_left < 1:
                break
            self._continue_prefill(place.slot, self._prefill_left)
        if len(self._waiting):
            self._admit_waiting()

    def _continue_prefill(self, slot: int, most: int) -> None:
        if self._draft.has_row(slot):
            return
        want = int(self._worker.rows.length[slot] - self._worker.rows.computed[slot])
        self._prefill_left -= self._continue(slot, min(want, self._chunk_size, most))

    def _grant_shares(self, running: list[_Place]) -> None:
        """Gives the first prefill of each class but the most important its class's share.

        What is left goes by importance, so that a class moves on while better ones have work.
        """
        if len({place.rank for place in running}) < 2 or self._config.policy is not Policy.FAIR:
            return
        firsts: dict[int, tuple[int, int]] = {}
        for slot, aged_rank, _, _ in running:
            own = self._worker.rows.rank.item(slot)
            firsts.setdefault(own, (slot, aged_rank))
        weights = {rank: self._waiting.classes[rank].weight for rank in firsts}
        total, best = sum(weights.values()), running[0].rank
        left = self._prefill_left
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
        if not waiting.is_shared or self._config.policy is Policy.FCFS:
            return [_Place(request.slot, 0, 0, 0) for request in requests]
        is_fair = self._config.policy is Policy.FAIR
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
        if self._config.policy is Policy.FCFS:
            return False
        rank = self._waiting.aged_rank(request, self._around.now)
        if rank != place.rank or self._config.policy is Policy.PRIORITY:
            is_owed = self._config.policy is Policy.FAIR and self._is_owed(
                request, self._worker.rows.rank[[place.slot]]
            )
            return rank < place.rank and not is_owed
        flow, held = self._waiting.flow(request.flow), self._prefills.get(request.flow, 0)
        own = (held * 1_000_000 // flow.weight, flow.served)
        is_other = self._worker.rows.flow.item(place.slot) != request.flow
        return is_other and own < (place.level, place.served)

    def _has_seat(self) -> bool:
        rows = self._worker.rows
        return (
            not self._short
            and self._prefill_left > 0
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
        if not self._may_enter(request):
            return _Verdict.PASS_OVER
        total = request.num_tokens
        carried = self._draft.carried_tokens
        if carried and carried + total > self._config.max_new_tokens_per_step:
            return _Verdict.BLOCKED
        prospect = self._assess(request)
        if prospect is None:
            return _Verdict.PASS_OVER
        computed, hits = prospect.computed, prospect.hits
        alone = not worker.rows.order.size
        # A gate, not a reservation. A lone request needs none: it fits the whole pool.
        if not alone and prospect.ahead + prospect.idle_hits > self._room_beyond_running():
            return _Verdict.BLOCKED
        others = self._around.others
        if others and belongs_elsewhere(request, computed, worker, others):
            return _Verdict.PASS_OVER
        chunk = min(total - computed, self._chunk_size, self._prefill_left)
        needed = -(-(computed + chunk) // size) - hits.size
        short = needed + prospect.idle_hits - pool.available
        if short > 0 and pool.yield_pins(short) < short:
            return _Verdict.BLOCKED
        self._seat(request, prospect, chunk, needed)
        return _Verdict.ADMITTED

    def _room_beyond_running(self) -> int:
        if self._room is None:
            self._room = self._worker.room_beyond_running()
        return self._room

    def _may_enter(self, request: Request) -> bool:
        self.current = request
        assert request.limit is not None
        # Tokens of a preempted request that are still being sampled must come home first.
        return not request.in_flight and fits(request.limit, self._worker.spec)

    def _assess(self, request: Request) -> _Prospect | None:
        """What its admission would take; None while an open step fills its next block.

        A request whose data cannot be looked up is noted in `faulty`.
        """
        try:
            return self._prospect(request)
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the step
            self.faulty.append((request, repr(error)))
            return None

    def _prospect(self, request: Request) -> _Prospect | None:
        worker, size = self._worker, self._worker.spec.block_size
        assert request.limit is not None
        total = request.num_tokens
        hits, partial = NO_INTS, None
        if worker.caches_prefixes:
            if len(request.chain) < total // size:
                worker.extend_hashes(request, request.token_ids())
            if request.spec.read_prefix_cache:
                # At least one token is computed, for there must be something to sample from.
                most = (total - 1) // size
                hits = worker.pool.match(request.chain, most)
                if hits.size < most and request.chain[hits.size] in worker.pending:
                    return None
                if self._config.partial_block_reuse:
                    partial = self._partial_hit(request, hits.size, total)
        computed = hits.size * size + (partial[1] if partial else 0)
        ahead = -(-min(total + size, request.limit - 1) // size) - hits.size
        idle_hits = worker.pool.unreferenced(hits)
        if partial is not None and ahead + idle_hits >= worker.pool.available:
            # Its source is held while the step is made; that must not stand in the way.
            partial, computed = None, hits.size * size
        return _Prospect(hits, partial, int(computed), int(ahead), idle_hits)

    def _partial_hit(self, request: Request, hits: int, total: int) -> tuple[int, int] | None:
        worker, size = self._worker, self._worker.spec.block_size
        parent = request.chain[hits - 1] if hits else worker.root(request)
        tokens = request.token_ids()[hits * size : min(hits * size + size, total - 1)]
        return worker.pool.partial_match(parent, tokens)

    def _seat(self, request: Request, prospect: _Prospect, chunk: int, needed: int) -> None:
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
        request.status = Status.RUNNING
        request.deferrals = 0
        request.worker_id, request.slot = worker.spec.worker_id, slot
        if worker.caches_prefixes and request.spec.read_prefix_cache:
            counters.prefix_query_tokens += tokens.size
            counters.prefix_hit_tokens += computed
        recomputed = max(0, request.computed_once - computed)
        request.recomputed += recomputed
        counters.recomputed_tokens += recomputed
        self._waiting.admitted(request, tokens.size - computed + OUTPUT_COST * size)
        self._prefill_left -= chunk
        self._standings = None
        if self._room is not None:
            self._room -= prospect.ahead + prospect.idle_hits
        self._draft.carry(slot, request, computed)
        self._draft.record(
            np.array([slot], np.int64),
            np.array([chunk], np.int64),
            np.array([hits.size + blocks.size], np.int64),
            np.concatenate([hits, blocks]),
        )

    # Displacement

    def _is_owed(self, request: Request, ranks: IntArray) -> Mask:
        """Which running requests of these classes are safe from a waiting one of a better class.

        Those of classes that had less of their share of the tokens than its class has: else
        displacement alone would give all tokens to the best class that has a backlog.
        """
        served = np.array([group.served for group in self._waiting.classes], np.int64)
        owed: Mask = (ranks > request.rank) & (served[ranks] < served[request.rank])
        return owed

    def _displace(self) -> None:
        """Has running requests give way to waiting ones that are strictly more important."""
        if self._config.policy is Policy.FCFS or not self._worker.rows.order.size:
            return
        blocked: set[int] = set()
        while self._promised_tokens < self._prefill_left and len(self._first) < _MAX_DISPLACING:
            for request in self._waiting.contenders():
                if request.flow in blocked:
                    continue
                if self._displace_for(request):
                    break
                blocked.add(request.flow)
            else:
                return

    def _displace_for(self, head: Request) -> bool:
        """Takes a seat, and the blocks it needs, for the head of a class. False: none are to be."""
        worker, rows, now = self._worker, self._worker.rows, self._around.now
        promised = len(self._first)
        if not self._may_enter(head) or rows.num_free_slots <= promised:
            return False
        ahead = sum(one.flow == head.flow for one in self._first)
        rank, level = standing_of(head, worker, self._waiting, self._config, now, ahead)
        standings = self._standing()
        places = below(standings, rank, level)
        if self._config.policy is Policy.FAIR:
            places = places[~self._is_owed(head, rows.rank[standings.slots[places]])]
        if not places.size:
            return False
        prospect = self._assess(head)
        if prospect is None:
            return False
        lacks_seat = rows.order.size + promised >= worker.seat_cap
        needed = prospect.ahead + prospect.idle_hits
        lacking = needed + self._promised_blocks - self._room_beyond_running()
        if not lacks_seat and lacking <= 0:
            return False
        others = self._around.others
        if others and belongs_elsewhere(head, prospect.computed, worker, others):
            return False
        victims: list[int] = []
        for slot in cheapest_first(standings, places, worker):
            if not (lacks_seat and not victims) and lacking <= 0:
                break
            victims.append(slot)
            lacking -= worker.blocks_freed_by(slot)
        if lacking > 0:
            return False
        for slot in victims:
            self._around.counters.displaced += 1
            self._preempt(slot)
        self._waiting.remove(head)
        self._first.append(head)
        self._promised_blocks += needed
        self._promised_tokens += min(head.num_tokens - prospect.computed, self._chunk_size)
        return True
