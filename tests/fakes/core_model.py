"""A plain model of what the scheduler's core promises: who may enter, who ends when, what counts.

It decides nothing about order. It takes what goes in and what comes out, and asserts that they
agree; a test machine drives the core and it side by side.
"""

from dataclasses import dataclass, field

from services.scheduler.core.config import Config, PriorityClass
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    EndReason,
    Events,
    Loads,
    Pin,
    Refused,
    StepPlan,
    WorkerSpec,
)
from tests.fakes.kv_worker import expected_output

DIGEST = 32
_NATURAL = (EndReason.STOP, EndReason.LENGTH)
_TIMED = (EndReason.DEADLINE, EndReason.SHED, EndReason.NO_WORKER)


@dataclass(eq=False)
class Entry:
    """One request that was accepted, in plain terms."""

    spec: AddRequest
    arrived: int
    output: list[int]
    ttft: int | None
    was_admitted: bool = False
    first_token: int | None = None
    end: Ended | None = None

    poisoned: list[int] = field(default_factory=list)
    """Blocks of its prompt with a token that cannot be hashed."""

    @property
    def needs(self) -> int | None:
        """Most tokens in all; None: as many as there is place for."""
        most = self.spec.max_tokens
        return None if most is None else int(self.spec.prompt.size) + most


class CoreModel:
    """Plain bookkeeping beside a core.

    Args:
        config: of the core.
        vocab: tokens that workers give are below this.
        poison: a token whose blocks cannot be hashed.
    """

    def __init__(self, config: Config, vocab: int, poison: int) -> None:
        self.config = config
        self.vocab = vocab
        self.poison = poison
        self.workers: dict[str, WorkerSpec] = {}
        self.unserved_since = 0
        self.entries: dict[int, Entry] = {}
        self.pins: dict[str, Pin] = {}
        self.refused = 0
        self.tokens = 0
        self.goodput: dict[str, list[int]] = {one.name: [0, 0, 0, 0] for one in config.classes}
        """TTFT met and missed, targets met and missed, by class."""

    @property
    def live(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.end is None]

    @property
    def ended(self) -> list[Ended]:
        return [entry.end for entry in self.entries.values() if entry.end is not None]

    # What goes in

    def expected_refusal(self, spec: AddRequest, now: int) -> tuple[str, int] | None:
        """Reason and limit by which `add` must refuse a request; None: by none that is plain."""
        names = [one.name for one in self.config.classes]
        if (spec.priority_class or self.config.default_class) not in names:
            return "UNKNOWN_CLASS", 0
        if (unfit := self._unfit(spec)) is not None:
            return unfit
        if spec.deadline is not None and spec.deadline <= now:
            return "DEADLINE", 0
        name = (spec.tenant, spec.request_id)
        same = [one for one in self.live if (one.spec.tenant, one.spec.request_id) == name]
        if same:
            newest = same[0].spec.attempt
            return ("DUPLICATE", newest + 1) if spec.attempt <= newest else None
        return self._over_bounds(spec)

    def _unfit(self, spec: AddRequest) -> tuple[str, int] | None:
        if not self.workers or spec.attempt:
            return None  # where it returns it waits for a worker like the one that held it
        prompt = int(spec.prompt.size)
        room = max(self.workers.values(), key=lambda one: one.num_blocks)
        places = room.num_blocks * room.block_size + 1
        if prompt >= room.max_model_len:
            return "CONTEXT_LENGTH", room.max_model_len - 1
        if prompt >= places:
            return "EXCEEDS_KV_CAPACITY", places - 1
        if spec.max_tokens is not None:
            if prompt + spec.max_tokens > room.max_model_len:
                return "CONTEXT_LENGTH", room.max_model_len - prompt
            if prompt + spec.max_tokens > places:
                return "EXCEEDS_KV_CAPACITY", places - prompt
        return None

    def _over_bounds(self, spec: AddRequest) -> tuple[str, int] | None:
        config, size = self.config, int(spec.prompt.size)
        policy = dict(config.tenants).get(spec.tenant, config.other_tenants)
        mine = [entry for entry in self.live if entry.spec.tenant == spec.tenant]
        queued = [entry for entry in self.live if not entry.was_admitted]
        own = [entry for entry in queued if entry.spec.tenant == spec.tenant]
        factor, seats, places = 1, 0, 0
        if spec.attempt:
            if not self.workers:
                return None
            factor = 2
            seats = sum(worker.max_num_seqs for worker in self.workers.values())
            places = sum(one.num_blocks * one.block_size for one in self.workers.values())
        for reason, bound, more, count in (
            ("TENANT_LIVE", policy.max_live_requests, 0, len(mine) + 1),
            ("TENANT_REQUESTS", policy.max_queued_requests, seats, len(own) + 1),
            ("TENANT_TOKENS", policy.max_queued_tokens, places, size + _prompts(own)),
            ("QUEUE_REQUESTS", config.max_queued_requests, seats, len(queued) + 1),
            ("QUEUE_TOKENS", config.max_queued_tokens, places, size + _prompts(queued)),
        ):
            if bound is None:
                continue
            most = factor * bound + more
            if reason.endswith("TOKENS") and size > most:
                return "EXCEEDS_QUEUE", most
            if count > most:
                return reason, most
        return None

    def accept(self, spec: AddRequest, now: int) -> None:
        expected = self.expected_refusal(spec, now)
        assert expected is None, f"taken, and should be refused by {expected}"
        target = spec.ttft_target_us or self._class(spec.priority_class).ttft_target_us
        entry = Entry(spec, now, spec.resumed.tolist(), target)
        size = 4
        places = [i for i, token in enumerate(spec.prompt.tolist()) if token == self.poison]
        entry.poisoned = [place // size for place in places]
        self.entries[spec.handle] = entry

    def refuse(self, spec: AddRequest, error: Refused, now: int) -> None:
        expected, refusal = self.expected_refusal(spec, now), error.refusal
        if expected is not None:
            assert (refusal.reason, refusal.limit) == expected
        else:
            assert refusal.reason == "TTFT_TARGET"
            assert spec.shed_late
            target = spec.ttft_target_us or self._class(spec.priority_class).ttft_target_us
            assert target is not None
            assert refusal.limit == target // 1000
        for_good = {"UNKNOWN_CLASS", "CONTEXT_LENGTH", "EXCEEDS_KV_CAPACITY", "EXCEEDS_QUEUE"}
        temporary = refusal.reason not in {*for_good, "DEADLINE", "DUPLICATE"}
        assert (refusal.retry_after_us > 0) is temporary
        self.refused += temporary

    def configure(self, config: Config) -> None:
        self.config = config
        kept = {one.name: self.goodput.get(one.name, [0, 0, 0, 0]) for one in config.classes}
        self.goodput = kept
        for entry in self.live:
            if entry.spec.ttft_target_us is None:
                entry.ttft = self._class(entry.spec.priority_class).ttft_target_us

    def pin_refusal(self, pin: Pin) -> int | None:
        """The limit by which a pin must be refused; None: it must be taken."""
        blocks = max((one.num_blocks for one in self.workers.values()), default=0)
        others = sum(len(one.hashes) for one in self.pins.values() if one.name != pin.name)
        left = blocks * self.config.max_pinned_share // 1000 - others // DIGEST
        return max(0, left) if len(pin.hashes) // DIGEST > left else None

    def attach(self, spec: WorkerSpec) -> None:
        self.workers[spec.worker_id] = spec

    def lose(self, worker_id: str, now: int) -> None:
        del self.workers[worker_id]
        if not self.workers:
            self.unserved_since = now

    # What comes out

    def planned(self, plan: StepPlan, worker_id: str, running: int) -> None:
        """A step; a request's handle stands in the seed of its draws."""
        spec, config = self.workers[worker_id], self.config
        budget = min(spec.max_num_batched_tokens, config.max_num_batched_tokens or 1 << 30)
        assert plan.num_tokens.sum() <= budget
        for new in plan.new_rows:
            entry = self.entries[new.sampling.seed]
            assert entry.end is None
            assert new.token_ids.tolist() == entry.spec.prompt.tolist() + entry.output
            entry.was_admitted = True
            if not (entry.spec.read_prefix_cache and config.enable_prefix_caching):
                assert new.num_computed == 0
            assert new.num_computed < new.token_ids.size
        if plan.new_rows:
            seats = min(spec.max_num_seqs, config.max_num_seqs or spec.max_num_seqs, budget)
            assert running <= seats, "more run than may"

    def let_go(self, handle: int, events: Events, now: int) -> None:
        """Events of an abort; from 100 ms before its deadline on, that is what ended a request."""
        deadline = self.entries[handle].spec.deadline
        late = deadline is not None and now >= deadline - 100_000
        for end in events.ended:
            assert end.reason is (EndReason.DEADLINE if late else EndReason.ABORT)
            self._close(self.entries[handle], end, now, let_go=True)

    def take(self, events: Events, now: int, *, timed: bool = False) -> None:
        """Events of an input at `now`; `timed`: of `expire`, which alone may end by the clock."""
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            entry = self.entries[handle]
            assert entry.end is None, "a token after the end"
            if not entry.output:
                entry.first_token = now
                if entry.ttft is not None:
                    self._counts(entry)[now - entry.arrived > entry.ttft] += 1
            entry.output.append(token)
            self.tokens += 1
        for end in events.ended:
            assert timed or end.reason not in _TIMED
            self._close(self.entries[end.handle], end, now)

    def _close(self, entry: Entry, end: Ended, now: int, *, let_go: bool = False) -> None:
        spec = entry.spec
        assert entry.end is None, "two ends"
        assert end.request_id == spec.request_id
        assert end.prompt_tokens == spec.prompt.size
        self._check_output(entry, end)
        if not let_go:
            self._check_reason(entry, end, now)
        self._check_cached(entry, end)
        self._judge(entry, end, now)
        entry.end = end

    def _check_output(self, entry: Entry, end: Ended) -> None:
        spec, output = entry.spec, entry.output
        endings = (*(() if spec.ignore_eos else self._eos), *spec.stop_token_ids)
        most = spec.max_tokens if spec.max_tokens is not None else 64 - int(spec.prompt.size)
        wanted = expected_output(spec.prompt.tolist(), most, self.vocab, endings)
        assert output == wanted[: len(output)]
        if end.reason not in _NATURAL or end.completion_tokens < len(output):
            return
        stopped = bool(output) and output[-1] in endings
        if end.reason is EndReason.STOP and end.stop_token_id is None:
            return  # by `finish`
        assert end.reason is (EndReason.STOP if stopped else EndReason.LENGTH)
        assert end.stop_token_id == (output[-1] if stopped else None)
        if len(output) < len(wanted):
            # Capped to what the roomiest worker of some time held.
            assert spec.max_tokens is None
            assert spec.prompt.size + len(output) == 12 * 4 + 1

    @property
    def _eos(self) -> tuple[int, ...]:
        return (5,)

    def _check_reason(self, entry: Entry, end: Ended, now: int) -> None:
        spec, reason = entry.spec, end.reason
        if reason is EndReason.DEADLINE:
            assert spec.deadline is not None
            assert now >= spec.deadline, "ended before its deadline"
        elif reason is EndReason.SHED:
            assert spec.shed_late
            assert entry.ttft is not None
            assert entry.first_token is None
            assert now > entry.arrived
            assert end.retry_after_us > 0
        elif reason is EndReason.NO_WORKER:
            assert now - entry.arrived >= self.config.worker_grace_us
            needs = entry.needs
            if needs is not None:
                held = [one.num_blocks * one.block_size + 1 for one in self.workers.values()]
                assert all(needs > places for places in held)
        elif reason is EndReason.FAULT:
            assert entry.poisoned, f"a fault in sound data: {end.message}"
            assert self.config.enable_prefix_caching
        elif reason is EndReason.CANNOT_FIT:
            assert self._unfit(spec) is not None
        by_finish = reason is EndReason.STOP and end.stop_token_id is None
        if reason in _NATURAL and not by_finish and self.config.enable_prefix_caching:
            full = spec.prompt.size // 4
            assert all(block >= full for block in entry.poisoned), "a fault went unnoticed"

    def _check_cached(self, entry: Entry, end: Ended) -> None:
        if not end.cached_tokens:
            return
        spec = entry.spec
        assert self.config.enable_prefix_caching
        assert spec.read_prefix_cache
        assert end.cached_tokens <= spec.prompt.size
        own = spec.prompt.tolist() + spec.resumed.tolist()
        shared = max(
            (
                _equal(own, other.spec.prompt.tolist() + other.output)
                for other in self.entries.values()
                if other is not entry and other.spec.salt == spec.salt
            ),
            default=0,
        )
        assert end.cached_tokens <= shared, "cached beyond what its salt allows"
        if not self.config.partial_block_reuse:
            assert end.cached_tokens in (spec.prompt.size, end.cached_tokens // 4 * 4)

    def _judge(self, entry: Entry, end: Ended, now: int) -> None:
        spec, counts = entry.spec, self._counts(entry)
        tpot = spec.tpot_target_us or self.config.tpot_target_us
        late = end.reason in (EndReason.DEADLINE, EndReason.SHED)
        if late and entry.ttft is not None and not entry.output:
            counts[1] += 1
        if (entry.ttft is None and tpot is None) or end.reason in (
            EndReason.ABORT,
            EndReason.REPLACED,
        ):
            return
        if end.reason not in _NATURAL:
            counts[3] += 1
        elif entry.first_token is not None:
            gaps = len(entry.output) - 1
            in_time = entry.ttft is None or entry.first_token - entry.arrived <= entry.ttft
            fluent = tpot is None or gaps < 1 or now - entry.first_token <= tpot * gaps
            counts[2 if in_time and fluent else 3] += 1

    def expired(self, now: int, wakeup: int | None) -> None:
        """What must hold right after `expire(now)`."""
        assert wakeup is None or wakeup > now, "expire left something that was due"
        self.pins = {
            name: pin for name, pin in self.pins.items() if pin.expires is None or pin.expires > now
        }
        for entry in self.live:
            spec = entry.spec
            assert spec.deadline is None or spec.deadline > now, "lives beyond its deadline"
            if spec.shed_late and entry.ttft is not None and not entry.output:
                assert now < entry.arrived + entry.ttft, "waits on though it is too late"
            if not self.workers:
                since = max(entry.arrived, self.unserved_since)
                assert since + self.config.worker_grace_us > now, "waits on without a worker"
        instants = [entry.spec.deadline for entry in self.live]
        instants += [pin.expires for pin in self.pins.values()]
        first = min((instant for instant in instants if instant is not None), default=None)
        assert first is None or (wakeup is not None and wakeup <= first), "would be woken late"

    # Gauges

    def agrees(self, loads: Loads, pins: tuple[Pin, ...]) -> None:
        """Gauges and counters are what has been seen."""
        live, ended, counters = self.live, self.ended, loads.counters
        assert loads.running + loads.waiting == len(live)
        assert loads.accepted == len(self.entries)
        assert loads.ended == len(ended)
        assert loads.waiting_tokens == _prompts([one for one in live if not one.was_admitted])
        assert counters.refused == self.refused
        assert counters.generation_tokens == self.tokens
        reasons = [end.reason for end in ended]
        assert counters.deadline_exceeded == reasons.count(EndReason.DEADLINE)
        assert counters.shed == reasons.count(EndReason.SHED)
        assert counters.isolated_faults == reasons.count(EndReason.FAULT)
        assert counters.preemptions >= sum(end.preemptions for end in ended)
        assert counters.displaced <= counters.preemptions
        assert pins == tuple(self.pins[name] for name in sorted(self.pins))
        for load in loads.classes:
            mine = [one for one in live if self._class(one.spec.priority_class).name == load.name]
            assert load.running + load.waiting == len(mine)
            counts = [load.ttft_met, load.ttft_missed, load.targets_met, load.targets_missed]
            assert counts == self.goodput[load.name]
            spec = next(one for one in self.config.classes if one.name == load.name)
            assert min(spec.floor, spec.share) <= load.weight <= spec.share
        for tenant in loads.tenants:
            mine = [one for one in live if one.spec.tenant == tenant.name]
            assert tenant.waiting >= sum(not one.was_admitted for one in mine)
            assert tenant.waiting + tenant.running == len(mine)
        assert sum(tenant.running for tenant in loads.tenants) == loads.running
        assert len(loads.tenants) == len({one.spec.tenant for one in live})

    def at_rest(self, loads: Loads) -> None:
        """Once nothing is left to do."""
        ended, counters = self.ended, loads.counters
        assert not self.live, "a request did not end"
        assert counters.preemptions == sum(end.preemptions for end in ended)
        assert counters.recomputed_tokens == sum(end.recomputed_tokens for end in ended)
        for load in loads.workers:
            assert load.running == 0
            kept = load.blocks_free + load.blocks_evictable + load.blocks_pinned
            assert kept == load.blocks_total

    def _class(self, name: str) -> PriorityClass:
        """The class of a request; that of one that has gone is the default one."""
        classes = {one.name: one for one in self.config.classes}
        return classes.get(name, classes[self.config.default_class])

    def _counts(self, entry: Entry) -> list[int]:
        return self.goodput[self._class(entry.spec.priority_class).name]


def _prompts(entries: list[Entry]) -> int:
    return sum(int(entry.spec.prompt.size) for entry in entries)


def _equal(one: list[int], other: list[int]) -> int:
    """Leading tokens that two sequences share."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
