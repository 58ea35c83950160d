"""The scheduler: inputs in, steps and events out.

Owns every live request, the global queue and the attached workers. Verbs: `plan` makes a worker's
next step, `apply` takes a step's result. Nothing raises out of `plan`; `apply` raises LinkFault
when a result does not belong to its step, and the caller answers that with `lost`.

Exactly one terminal event (`Ended`) per request that `add` accepted, on every path.
"""

from dataclasses import replace

from services.scheduler.core import admission
from services.scheduler.core.applying import Application, close_step, end_if_complete
from services.scheduler.core.chain import Chain, Hashing
from services.scheduler.core.config import Config
from services.scheduler.core.order import WaitingQueue
from services.scheduler.core.plan import (
    NO_TOKENS,
    AddRequest,
    Counters,
    Ended,
    EndReason,
    Events,
    Limits,
    Loads,
    Refusal,
    Refused,
    StepPlan,
    StepResult,
    WorkerLoad,
    WorkerSpec,
)
from services.scheduler.core.planning import Draft
from services.scheduler.core.request import Request, Status
from services.scheduler.core.worker_state import WorkerState


class Scheduler:
    """The state machine.

    Args:
        config: see Config.
        hashing: of the prefix cache.
    """

    def __init__(self, config: Config, hashing: Hashing) -> None:
        self._config = config
        self._hashing = hashing
        self._waiting = WaitingQueue()
        self._workers: dict[str, WorkerState] = {}
        self._by_handle: dict[int, Request] = {}
        self._by_id: dict[str, Request] = {}
        self._limits: Limits | None = None
        self._counters = Counters()
        self._next_arrival = 0
        self._next_epoch = 1
        self._accepted = 0
        self._ended = 0
        self._homeless: dict[int, int] = {}
        """Handles of queued requests that no attached worker could hold, with the time since when.

        In order of that time.
        """
        self._chain: tuple[int, bytes] | None = None
        """Block size and model digest that the queued requests' hashes were made with."""

    # Inputs

    def add(self, spec: AddRequest, now: int) -> Events:
        """Takes a request.

        Returns:
            The end of a live request of the same id and a lower attempt (REPLACED), and the end of
            this one where what it resumes is complete already.

        Raises:
            Refused: it can never fit, or its id is live with this or a higher attempt (DUPLICATE).
        """
        limits = self._limits
        limit = None if limits is None else admission.token_limit(spec, limits)
        ended: list[Ended] = []
        live = self._by_id.get(spec.request_id)
        if live is not None:
            if spec.attempt <= live.spec.attempt:
                raise Refused(
                    Refusal(
                        field="request.attempt",
                        reason="DUPLICATE",
                        limit=live.spec.attempt + 1,
                        got=spec.attempt,
                    )
                )
            ended.append(self._end(live, EndReason.REPLACED))
        request = Request(
            spec=spec,
            arrival=self._next_arrival,
            limit=limit,
            output=spec.resumed.tolist(),
            chain=Chain(spec.prompt_hashes),
        )
        self._next_arrival += 1
        self._accepted += 1
        self._by_id[spec.request_id] = request
        self._by_handle[spec.handle] = request
        self._waiting.push(request)
        if limits is None:
            self._homeless[spec.handle] = now
        else:
            ended.extend(end_if_complete(request, limits.eos_token_ids, self._end))
        return replace(NO_TOKENS, ended=tuple(ended))

    def abort(self, handle: int) -> Events:
        """Ends a request; unknown and ended handles are ignored."""
        request = self._by_handle.get(handle)
        if request is None:
            return NO_TOKENS
        return replace(NO_TOKENS, ended=(self._end(request, EndReason.ABORT),))

    def finish(self, handle: int, kept_tokens: int) -> Events:
        """Ends a request of whose output `kept_tokens` are wanted; unknown handles are ignored."""
        request = self._by_handle.get(handle)
        if request is None:
            return NO_TOKENS
        ended = self._end(request, EndReason.STOP)
        kept = min(kept_tokens, ended.completion_tokens)
        return replace(NO_TOKENS, ended=(replace(ended, completion_tokens=kept),))

    def attach(self, announced: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        """Takes a worker with an empty pool.

        A worker of the same id must be `lost` first. All workers attached at one time must be of
        one kind; the caller checks that (`compatible`).

        Returns:
            The worker's limits as lowered by the configuration, the epoch of the attachment, and
            the ends of queued requests that cannot fit.

        Raises:
            MemoryError: its tables do not fit; nothing has changed.
        """
        assert announced.worker_id not in self._workers, "the worker is attached already"
        spec = self._lowered(announced)
        epoch = self._next_epoch
        hashing = self._hashing if self._config.enable_prefix_caching else None
        self._workers[spec.worker_id] = WorkerState(spec, epoch, hashing)
        self._next_epoch += 1
        chain = (spec.block_size, spec.model_digest)
        if self._chain not in (None, chain):
            for request in self._waiting:
                request.chain.clear()
        self._chain = chain
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
        worker = self._workers.pop(worker_id)
        for request in worker.orphans.values():
            request.in_flight = 0
        for slot in worker.rows.order.tolist():
            request = worker.requeue(slot)
            request.in_flight = 0
            self._waiting.push(request)
            self._counters.requeues += 1
        self._refresh_limits()
        if self._limits is not None:
            for request in self._waiting:
                self._cap(request, self._limits)
        self._find_homeless(now)

    def expire(self, now: int) -> Events:
        """Ends what has waited longer than the grace time for a worker that can hold it."""
        ended: list[Ended] = []
        while (wakeup := self.next_wakeup(now)) is not None and wakeup <= now:
            handle = next(iter(self._homeless))
            ended.append(self._end(self._by_handle[handle], EndReason.NO_WORKER))
        return replace(NO_TOKENS, ended=tuple(ended))

    # Verbs

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        """The worker's next step; None while enough steps are open or there is nothing to do."""
        worker = self._workers[worker_id]
        if len(worker.open) >= worker.spec.max_in_flight:
            return None
        others = [other for other in self._workers.values() if other is not worker]
        return Draft(worker, others, self._waiting, self._config, self._counters).make()

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        """Takes the result of the worker's oldest open step.

        Raises:
            LinkFault: it is not the answer to that step.
        """
        worker = self._workers[worker_id]
        step = close_step(worker, result)
        return Application(worker, step, result, self._counters, self._end).events()

    def next_wakeup(self, now: int) -> int | None:
        """When `expire` has something to do, microseconds; None: not before the next input."""
        for since in self._homeless.values():
            return since + self._config.worker_grace_us
        return None

    # Views

    @property
    def limits(self) -> Limits | None:
        """What the attached workers can serve, or None without workers."""
        return self._limits

    @property
    def is_idle(self) -> bool:
        """No live request."""
        return not self._by_handle

    def loads(self) -> Loads:
        """Gauges and counters."""
        workers = tuple(
            WorkerLoad(
                worker_id=worker_id,
                epoch=worker.epoch,
                running=int(worker.rows.order.size),
                blocks_total=worker.pool.num_blocks,
                blocks_free=worker.pool.num_free,
                blocks_evictable=worker.pool.num_evictable,
                blocks_pinned=0,
                steps=worker.next_step_id - 1,
                steps_in_flight=len(worker.open),
            )
            for worker_id, worker in sorted(self._workers.items())
        )
        return Loads(
            running=sum(load.running for load in workers),
            waiting=len(self._waiting),
            accepted=self._accepted,
            ended=self._ended,
            waiting_tokens=0,
            workers=workers,
            classes=(),
            tenants=(),
            counters=replace(self._counters),
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
        if self.is_idle:
            for worker in self._workers.values():
                assert worker.pool.available == worker.pool.num_blocks, "blocks leaked"

    # Ends

    def _end(self, request: Request, reason: EndReason) -> Ended:
        """The one place where a request ends: frees what it holds and makes its terminal event."""
        if request.status is Status.RUNNING:
            worker = self._workers[request.worker_id]
            known = int(worker.rows.known[request.slot])
            worker.unseat([request.slot])
            request.status = Status.ENDED
        else:
            known = request.num_tokens
            request.status = Status.ENDED
            self._waiting.ended()
        self._homeless.pop(request.spec.handle, None)
        del self._by_handle[request.spec.handle]
        del self._by_id[request.spec.request_id]
        self._ended += 1
        return Ended(
            handle=request.spec.handle,
            request_id=request.spec.request_id,
            reason=reason,
            prompt_tokens=request.prompt_len,
            completion_tokens=known - request.prompt_len,
            cached_tokens=request.cached_tokens or 0,
        )

    def _check_queued(self) -> list[Ended]:
        """Fits queued requests that came before any worker did, and those that were to use all
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
                ended.extend(end_if_complete(request, limits.eos_token_ids, self._end))
        return ended

    def _cap(self, request: Request, limits: Limits) -> None:
        """Lowers the limit of a request without max_tokens, where it can still go on."""
        most = min(limits.max_model_len, limits.kv_capacity_tokens + 1)
        if request.limit is None or request.spec.max_tokens is not None:
            return
        if request.num_tokens < most:
            request.limit = min(request.limit, most)

    # Workers

    def _lowered(self, spec: WorkerSpec) -> WorkerSpec:
        config = self._config
        budget = min(
            spec.max_num_batched_tokens,
            config.max_num_batched_tokens or spec.max_num_batched_tokens,
        )
        seqs = min(spec.max_num_seqs, config.max_num_seqs or spec.max_num_seqs, budget)
        return replace(spec, max_num_seqs=seqs, max_num_batched_tokens=budget)

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
