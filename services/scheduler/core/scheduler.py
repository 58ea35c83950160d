"""The scheduler: inputs in, steps and events out.

Owns every live request, the global queue and the attached workers. Verbs: `plan` makes a worker's
next step, `apply` takes a step's result. Nothing raises out of `plan`; `apply` raises LinkFault
when a result does not belong to its step, and the caller answers that with `lost`.

Exactly one terminal event (`Ended`) per request that `add` accepted, on every path.
"""

from dataclasses import replace

from services.scheduler.core import admission, views
from services.scheduler.core.admission import Backlog
from services.scheduler.core.applying import Application, close_step, end_if_complete
from services.scheduler.core.cache_log import CacheLog
from services.scheduler.core.chain import DIGEST_BYTES, Chain, Hashing
from services.scheduler.core.config import Config
from services.scheduler.core.entrance import Entrance
from services.scheduler.core.making import Surroundings
from services.scheduler.core.order import WaitingQueue
from services.scheduler.core.pin_board import PinBoard
from services.scheduler.core.plan import (
    NO_TOKENS,
    AddRequest,
    Counters,
    Ended,
    EndReason,
    Events,
    Limits,
    LinkFault,
    Loads,
    Pin,
    Refused,
    Stall,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.planning import Planner
from services.scheduler.core.queue_model import QueueModel
from services.scheduler.core.request import Request, Status
from services.scheduler.core.targets import met_targets
from services.scheduler.core.timers import Alarm, Timers
from services.scheduler.core.worker_state import WorkerState

_OWN_DEADLINE_US = 100_000
"""An owner that lets go so shortly before the deadline has seen it pass; microseconds."""

_FIXED = ("enable_prefix_caching", "eviction", "time_wheel_slots", "partial_block_reuse")
"""What `configure` cannot change: the workers' pools are made by it."""


class Scheduler:
    """The state machine.

    Args:
        config: see Config.
        hashing: of the prefix cache.
    """

    def __init__(self, config: Config, hashing: Hashing) -> None:
        self._config = config
        self._hashing = hashing
        self._waiting = WaitingQueue(config)
        self._backlog = Backlog(config)
        self._queue_model = QueueModel()
        self._timers = Timers()
        self._workers: dict[str, WorkerState] = {}
        self._pins = PinBoard(self._workers)
        self._entrance = Entrance(
            config, self._waiting, self._backlog, self._queue_model, self._workers
        )
        self._broken: dict[str, str] = {}
        self._blamed: Request | None = None
        """The request whose planning met the last fault."""
        self._by_handle: dict[int, Request] = {}
        self._by_id: dict[tuple[str, str], Request] = {}
        """By tenant and request id: nobody meets the ids of others."""
        self._limits: Limits | None = None
        self._counters = Counters()
        self._next_arrival = 0
        self._next_epoch = 1
        self._accepted = 0
        self._ended = 0
        self._now = 0
        """Of the input that is being taken."""
        self._moved = 0
        """When something moved last: a step was answered, or the first of the work came."""
        self._unasked: list[Ended] = []
        """Ends that came about in `plan`; `expire` gives them."""
        self._homeless: dict[int, int] = {}
        """Handles of queued requests that no attached worker could hold, with the time since when.

        In order of that time.
        """
        self._cache_log: CacheLog | None = None
        self._chain: tuple[int, bytes] | None = None
        """Block size and model digest that the queued requests' hashes were made with."""

    # Inputs

    def add(self, spec: AddRequest, now: int) -> Events:
        """Takes a request.

        Returns:
            The end of a live request of the same id and a lower attempt (REPLACED), and the end of
            this one where what it resumes is complete already.

        Raises:
            Refused: it can never fit, its id is live with this or a higher attempt (DUPLICATE), or
                a bound of the queue or a quota is reached.
        """
        self._now = now
        live = self._by_id.get((spec.tenant, spec.request_id))
        try:
            limit = self._entrance.limit_of(spec, self._limits, live, now)
        except Refused as error:
            self._counters.refused += bool(error.refusal.retry_after_us)
            raise
        ended = [] if live is None else [self._end(live, EndReason.REPLACED)]
        rank = self._waiting.rank(spec.priority_class)
        assert rank is not None
        target = spec.ttft_target_us
        request = Request(
            spec=spec,
            arrival=self._next_arrival,
            arrived=now,
            limit=limit,
            ttft_target_us=target or self._config.classes[rank].ttft_target_us,
            output=spec.resumed.tolist(),
            chain=Chain(spec.prompt_hashes),
        )
        if not self._has_work():
            self._moved = now
        self._next_arrival += 1
        self._accepted += 1
        self._by_id[spec.tenant, spec.request_id] = request
        self._by_handle[spec.handle] = request
        self._backlog.accepted(spec)
        self._waiting.join(request)
        self._waiting.push(request)
        if spec.deadline is not None:
            self._timers.set(spec.deadline, Alarm.DEADLINE, request)
        self._watch_target(request)
        if self._limits is None or limit is None:
            self._homeless[spec.handle] = now
        else:
            ended.extend(end_if_complete(request, self._limits.eos_token_ids, self._end))
        return replace(NO_TOKENS, ended=tuple(ended))

    def abort(self, handle: int, now: int) -> Events:
        """Ends a request; unknown and ended handles are ignored.

        Its owner sees its deadline pass too, and mostly a moment before the core: that is the
        reason then, and not ABORT.
        """
        self._now = now
        request = self._by_handle.get(handle)
        if request is None:
            return NO_TOKENS
        deadline = request.spec.deadline
        late = deadline is not None and now >= deadline - _OWN_DEADLINE_US
        reason = EndReason.DEADLINE if late else EndReason.ABORT
        return replace(NO_TOKENS, ended=(self._end(request, reason),))

    def finish(self, handle: int, kept_tokens: int, now: int) -> Events:
        """Ends a request of whose output `kept_tokens` are wanted; unknown handles are ignored."""
        self._now = now
        request = self._by_handle.get(handle)
        if request is None:
            return NO_TOKENS
        ended = self._end(request, EndReason.STOP)
        kept = min(kept_tokens, ended.completion_tokens)
        return replace(NO_TOKENS, ended=(replace(ended, completion_tokens=kept),))

    def attach(self, spec: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        """Takes a worker with an empty pool.

        A worker of the same id must be `lost` first. All workers attached at one time must be of
        one kind; the caller checks that (`compatible`).

        Returns:
            The worker as it was taken, the epoch of the attachment, and the ends of queued
            requests that cannot fit.

        Raises:
            MemoryError: its tables do not fit; nothing has changed.
        """
        assert spec.worker_id not in self._workers, "the worker is attached already"
        self._now = self._moved = now
        epoch = self._next_epoch
        worker = WorkerState(spec, epoch, self._config, self._hashing)
        self._workers[spec.worker_id] = worker
        self._next_epoch += 1
        chain = (spec.block_size, spec.model_digest)
        if self._chain not in (None, chain):
            for request in self._waiting:
                request.chain.clear()
        self._chain = chain
        self._pins.attached(worker)
        worker.watch(self._cache_log)
        self._refresh_limits()
        ended = self._check_queued()
        self._find_homeless(now)
        return spec, epoch, replace(NO_TOKENS, ended=tuple(ended))

    def compatible(self, spec: WorkerSpec) -> bool:
        """True where the worker can join the attached ones: it would give the same answers."""
        return all(_kind(worker.spec) == _kind(spec) for worker in self._workers.values())

    def lost(self, worker_id: str, now: int) -> None:
        """Takes a worker away. Its requests go back to the queue with their tokens so far; what was
        in flight is generated again, by the same draws.
        """
        self._now = now
        worker = self._workers.pop(worker_id)
        broken = self._broken.pop(worker_id, None)
        for request in worker.orphans.values():
            request.in_flight = 0
        requeued = [worker.requeue(slot, now) for slot in worker.rows.order.tolist()]
        for request in requeued:
            request.in_flight = 0
            request.requeues += 1
            self._counters.requeues += 1
            if broken is None:
                self._waiting.push(request)
        if broken is not None:
            self._rebuild_queue()
            if self._blamed is not None:
                self._end_faulty([(self._blamed, broken)])
            self._blamed = None
        worker.note_loss()
        self._counters.evicted_blocks += worker.pool.evicted_blocks
        self._counters.evicted_lifetime_us += worker.pool.evicted_lifetime_us
        self._counters.evicted_idle_us += worker.pool.evicted_idle_us
        self._refresh_limits()
        if self._limits is not None:
            for request in self._waiting:
                self._cap(request, self._limits)
        self._find_homeless(now)

    def configure(self, config: Config, now: int) -> Events:
        """Takes another configuration, whole; what runs goes on under it.

        Raises:
            ValueError: it changes what is fixed at the start; nothing has changed.
        """
        for name in _FIXED:
            if getattr(config, name) != getattr(self._config, name):
                raise ValueError(f"{name} cannot be changed while the scheduler runs")
        self._now = now
        self._config = self._backlog.config = self._entrance.config = config
        for worker in self._workers.values():
            worker.configure(config)
        self._rebuild_queue()
        return NO_TOKENS

    def pin(self, pin: Pin, now: int) -> int:
        """Keeps a prefix cached on every worker, from when it is cached there.

        Returns:
            Blocks of it that some worker has cached now.

        Raises:
            Refused: all pins together would name more blocks than pins may keep (PIN_LIMIT).
        """
        self._now = now
        self._pins.add(pin, self._config.max_pinned_share)
        return self.cached_blocks(pin.hashes)

    def unpin(self, name: str, now: int) -> bool:
        """Lets a prefix go; False: there is no pin of that name."""
        self._now = now
        return self._pins.remove(name)

    def flush(self, now: int) -> int:
        """Gives up all cached blocks that hold neither a request nor a pin; how many there were."""
        self._now = now
        for worker in self._workers.values():
            worker.pool.now = now
        return sum(worker.pool.flush() for worker in self._workers.values())

    def expire(self, now: int) -> Events:
        """Ends what has run out of time: deadlines, targets that cannot be met any more, the grace
        time for a worker. Lets pins go that have expired. Gives ends that came about in `plan`.
        """
        self._now = now
        ended, self._unasked = self._unasked, []
        for since in list(self._homeless.values()):
            if since + self._config.worker_grace_us > now:
                break
            handle = next(iter(self._homeless))
            ended.append(self._end(self._by_handle[handle], EndReason.NO_WORKER))
        while (due := self._timers.pop(now)) is not None:
            ended.extend(self._ring(*due))
        self._pins.expire(now)
        return replace(NO_TOKENS, ended=tuple(ended))

    # Verbs

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        """The worker's next step; None while enough steps are open, while it is too early for the
        one after the running one, or where there is nothing to do.

        Nothing raises out of it. A fault of its own makes the worker `broken`, to be `lost`.
        """
        worker = self._workers[worker_id]
        if len(worker.open) >= worker.spec.max_in_flight or worker_id in self._broken:
            return None
        if worker.open and worker.due is not None and now < worker.due:
            return None
        self._now = worker.pool.now = now
        planner = Planner(worker, self._surroundings(worker))
        try:
            step = planner.make()
        except Exception as error:  # noqa: BLE001 - the scheduler outlives any fault of a plan
            self._broken[worker_id] = repr(error)
            self._blamed = planner.current
            return None
        if planner.faulty:
            self._end_faulty(planner.faulty)
        if not len(self._waiting):
            self._queue_model.idle(now)
        if step is not None and len(worker.open) == 1:
            worker.step_started(now)
        return step

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        """Takes the result of the worker's oldest open step.

        Raises:
            LinkFault: it is not the answer to that step.
        """
        worker = self._workers[worker_id]
        self._now = worker.pool.now = now
        step = close_step(worker, result)
        self._moved = now
        worker.step_answered(step, result.execute_us, result.idle_us, now)
        if step.num_tokens:
            # A slot vacated meanwhile is not in use again yet; who has it next begins at 0.
            share = result.execute_us * step.tokens // step.num_tokens
            worker.rows.worker_us[step.slots] += share
        made: list[Ended] = []

        def end(request: Request, reason: EndReason) -> Ended:
            made.append(self._end(request, reason))
            return made[-1]

        application = Application(
            worker,
            step,
            result,
            self._counters,
            end=end,
            first_token=self._first_token,
        )
        try:
            return application.events()
        except Exception as error:
            self._unasked.extend(made)
            raise LinkFault(f"the result cannot be applied: {error!r}") from error

    def next_wakeup(self, now: int) -> int | None:
        """When `expire` or `plan` has something to do; None: not before the next input."""
        if self._unasked or self._broken:
            return now
        instants = [
            since + self._config.worker_grace_us for since in list(self._homeless.values())[:1]
        ]
        instants.extend(
            instant
            for instant in (self._pins.next_expiry(), self._timers.next())
            if instant is not None
        )
        if not self.is_idle:
            instants.extend(
                worker.due
                for worker in self._workers.values()
                if len(worker.open) == 1 and worker.due is not None and worker.due > now
            )
        return min(instants, default=None)

    # Views

    @property
    def config(self) -> Config:
        """In force."""
        return self._config

    @property
    def limits(self) -> Limits | None:
        """What the attached workers can serve, or None without workers."""
        return self._limits

    @property
    def is_idle(self) -> bool:
        """No live request."""
        return not self._by_handle

    def broken(self, worker_id: str) -> str | None:
        """The fault that a worker's plan met; the worker is to be lost. None: there was none."""
        return self._broken.get(worker_id)

    def pins(self) -> tuple[Pin, ...]:
        """All pins, by name."""
        return self._pins.pins()

    def cached_blocks(self, hashes: bytes) -> int:
        """How many of these hashes, back to back, some worker has cached."""
        digests = [
            hashes[start : start + DIGEST_BYTES] for start in range(0, len(hashes), DIGEST_BYTES)
        ]
        pools = [worker.pool for worker in self._workers.values()]
        return sum(any(pool.has(digest) for pool in pools) for digest in digests)

    def cached_hashes(self) -> bytes:
        """The hashes of all cached blocks back to back, by worker."""
        return b"".join(worker.pool.cached_hashes() for _, worker in sorted(self._workers.items()))

    def watch_cache(self, log: CacheLog | None) -> None:
        """Notes from now on what is cached and what is given up; None ends that."""
        self._cache_log = log
        for _, worker in sorted(self._workers.items()):
            worker.watch(log)

    def stall(self, now: int) -> Stall | None:
        """What blocks, where work waits and nothing has moved for the stated time."""
        if not self._workers or not self._has_work():
            return None
        if now - self._moved < self._config.stall_timeout_us:
            return None
        homeless = self._homeless.keys()
        return views.stall(list(self._workers.values()), self._waiting, homeless, self._moved)

    def loads(self) -> Loads:
        """Gauges and counters."""
        return views.loads(
            workers=self._workers,
            waiting=self._waiting,
            backlog=self._backlog,
            counters=self._counters,
            accepted=self._accepted,
            ended=self._ended,
        )

    def check_invariants(self) -> None:
        """Asserts that all state agrees; tests call it after every operation."""
        for worker in self._workers.values():
            worker.check_invariants()
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting), "the queue's count is off"
        running = sum(worker.rows.order.size for worker in self._workers.values())
        assert len(self._by_handle) == len(self._by_id) == len(waiting) + running, (
            "a request is lost"
        )
        assert self._accepted - self._ended == len(self._by_handle), "ends do not match accepts"
        specs = [worker.spec for worker in self._workers.values()]
        homeless = {r.spec.handle for r in waiting if not _fits_any(r, specs)}
        assert homeless == set(self._homeless), "requests without a place are not all known"
        for request in waiting:
            assert request.slot == -1, "a waiting request holds a slot"
            if request.limit is not None:
                assert request.num_tokens < request.limit, "a complete request waits"
        fresh = [request for request in self._by_handle.values() if request.is_fresh]
        assert self._backlog.tokens == sum(r.prompt_len for r in fresh), "the backlog is off"
        self._waiting.check_invariants(self._by_handle.values())
        if self.is_idle:
            for worker in self._workers.values():
                kept = worker.pool.available + worker.pool.num_pinned
                assert kept == worker.pool.num_blocks, "blocks leaked"

    # Ends

    def _end(self, request: Request, reason: EndReason) -> Ended:
        """The one place where a request ends: frees what it holds and makes its terminal event."""
        if request.status is Status.RUNNING:
            worker = self._workers[request.worker_id]
            known = int(worker.rows.known[request.slot])
            request.worker_us += int(worker.rows.worker_us[request.slot])
            worker.unseat([request.slot])
        else:
            known = request.num_tokens
            self._waiting.remove(request)
            if not request.is_fresh:
                request.requeued_us += self._now - request.queued_since
        request.status = Status.ENDED
        spec = request.spec
        self._homeless.pop(spec.handle, None)
        del self._by_handle[spec.handle]
        del self._by_id[spec.tenant, spec.request_id]
        self._backlog.ended(spec, fresh=request.is_fresh)
        self._judge(request, reason, known - request.prompt_len)
        self._waiting.leave(request)
        self._ended += 1
        self._counters.deadline_exceeded += reason is EndReason.DEADLINE
        self._counters.shed += reason is EndReason.SHED
        retry = 0
        if reason is EndReason.SHED:
            waited = self._now - request.arrived
            retry = self._queue_model.retry_after_us(request.prompt_len, waited)
        return Ended(
            handle=spec.handle,
            request_id=spec.request_id,
            reason=reason,
            tenant=spec.tenant,
            class_name=self._config.classes[request.rank].name,
            traceparent=spec.traceparent,
            prompt_tokens=request.prompt_len,
            completion_tokens=known - request.prompt_len,
            cached_tokens=request.cached_tokens or 0,
            arrived=request.arrived,
            admitted=request.admitted,
            first_token=request.first_token,
            ended=self._now,
            recomputed_tokens=request.recomputed,
            preemptions=request.preemptions,
            requeues=request.requeues,
            requeued_us=request.requeued_us,
            worker_id=request.last_worker,
            worker_us=request.worker_us,
            retry_after_us=retry,
        )

    def _judge(self, request: Request, reason: EndReason, tokens: int) -> None:
        """Counts whether it met its targets."""
        met = met_targets(request, reason, tokens, self._now, self._config.tpot_target_us)
        if met is not None:
            self._waiting.judged(request, met=met)
        late = reason in (EndReason.DEADLINE, EndReason.SHED) and request.first_token is None
        if late and request.ttft_target_us is not None and not request.spec.resumed.size:
            self._waiting.first_token(request, met=False)

    def _first_token(self, request: Request) -> None:
        request.first_token = self._now
        if request.ttft_target_us is not None:
            met = self._now - request.arrived <= request.ttft_target_us
            self._waiting.first_token(request, met=met)

    def _ring(self, alarm: Alarm, request: Request) -> list[Ended]:
        """What an alarm of a live request comes to."""
        if alarm is Alarm.DEADLINE:
            return [self._end(request, EndReason.DEADLINE)]
        if request.first_token is not None or request.ttft_target_us is None:
            return []
        if self._latest_start(request) > self._now:
            self._watch_target(request)
            return []
        return [self._end(request, EndReason.SHED)]

    def _watch_target(self, request: Request) -> None:
        """Sets the alarm of a request that is to be shed once it cannot meet its TTFT target."""
        spec = request.spec
        has_begun = request.first_token is not None or spec.resumed.size
        if spec.shed_late and request.ttft_target_us is not None and not has_begun:
            instant = max(self._now + 1, self._latest_start(request))
            self._timers.set(instant, Alarm.SHED, request)

    def _latest_start(self, request: Request) -> int:
        """When it is too late for its TTFT target unless its first token is there."""
        assert request.ttft_target_us is not None
        latest = request.arrived + request.ttft_target_us
        return (
            latest
            if request.status is Status.RUNNING
            else latest - self._entrance.service_us(request.spec)
        )

    def _end_faulty(self, faulty: list[tuple[Request, str]]) -> None:
        for request, message in faulty:
            if request.status is Status.ENDED:
                continue
            self._counters.isolated_faults += 1
            end = self._end(request, EndReason.FAULT)
            self._unasked.append(replace(end, message=message))

    def _check_queued(self) -> list[Ended]:
        """Fits queued requests that no worker before could hold, and those that were to use all
        that the workers of that time could hold.
        """
        limits = self._limits
        assert limits is not None
        ended: list[Ended] = []
        for request in list(self._waiting):
            if request.limit is not None:
                self._cap(request, limits)
                continue
            try:
                request.limit = admission.token_limit(request.spec, limits)
            except Refused as error:
                end = self._end(request, EndReason.CANNOT_FIT)
                ended.append(replace(end, refusal=error.refusal))
            else:
                if request.limit is not None:
                    ended.extend(end_if_complete(request, limits.eos_token_ids, self._end))
        return ended

    def _cap(self, request: Request, limits: Limits) -> None:
        """Lowers the limit of a request without max_tokens, where it can still go on."""
        most = min(limits.max_model_len, limits.kv_capacity_tokens + 1)
        if request.limit is None or request.spec.max_tokens is not None:
            return
        if request.num_tokens < most:
            request.limit = min(request.limit, most)

    # Workers and queue

    def _has_work(self) -> bool:
        """Whether the attached workers have something to do, or owe an answer."""
        owed = any(worker.open for worker in self._workers.values())
        return owed or len(self._by_handle) > len(self._homeless)

    def _surroundings(self, worker: WorkerState) -> Surroundings:
        return Surroundings(
            others=[other for other in self._workers.values() if other is not worker],
            waiting=self._waiting,
            backlog=self._backlog,
            queue_model=self._queue_model,
            config=self._config,
            counters=self._counters,
            now=self._now,
        )

    def _rebuild_queue(self) -> None:
        """Has every live request join and queue anew, under the configuration in force."""
        self._waiting.configure(self._config)
        for request in sorted(self._by_handle.values(), key=lambda one: one.arrival):
            self._waiting.join(request)
            target = self._config.classes[request.rank].ttft_target_us
            if request.spec.ttft_target_us is None and target != request.ttft_target_us:
                request.ttft_target_us = target
                self._waiting.order(request)
                self._watch_target(request)
            if request.status is Status.WAITING:
                self._waiting.push(request)
            else:
                self._workers[request.worker_id].rows.classify(request.slot)

    def _refresh_limits(self) -> None:
        prefix_hash = self._hashing.name if self._config.enable_prefix_caching else ""
        specs = [worker.spec for worker in self._workers.values()]
        self._limits = admission.limits_of(specs, prefix_hash)

    def _find_homeless(self, now: int) -> None:
        """Notes which queued requests fit no attached worker any more, or fit one again."""
        specs = [worker.spec for worker in self._workers.values()]
        for request in self._waiting:
            handle = request.spec.handle
            if _fits_any(request, specs):
                self._homeless.pop(handle, None)
            else:
                self._homeless.setdefault(handle, now)


def _kind(spec: WorkerSpec) -> tuple[int, bytes, int, tuple[int, ...]]:
    """What workers of one model have in common."""
    return spec.block_size, spec.model_digest, spec.vocab_size, tuple(sorted(spec.eos_token_ids))


def _fits_any(request: Request, specs: list[WorkerSpec]) -> bool:
    return request.limit is not None and any(admission.fits(request.limit, spec) for spec in specs)
