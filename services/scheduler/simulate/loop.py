"""The simulated clock: runs an engine against a source of arrivals, from event to event.

Events are arrivals, answers of workers, cancellations and the engine's own wake-ups, each at a time
in whole microseconds; after each the engine plans for every worker that has room. One thread, no
clock of the machine: the same inputs give the same report.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.cli.command import CommandError
from services.scheduler.core.chain import Hashing
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Events,
    Loads,
    Refused,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from services.scheduler.simulate.load import (
    Arrival,
    ClosedLoop,
    OpenLoop,
    Prompts,
    RequestMaker,
    Source,
)
from services.scheduler.simulate.metrics import Figures
from services.scheduler.simulate.report import Report, Usage, report_of
from services.scheduler.simulate.step_model import StepModel
from services.scheduler.simulate.worker import Answer, SimulatedWorker


class Engine(Protocol):
    """What a simulation drives: the verbs of the core, as Scheduler has them."""

    def attach(self, announced: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        """Takes a worker."""

    def add(self, spec: AddRequest, now: int) -> Events:
        """Takes a request, or raises Refused."""

    def abort(self, handle: int, now: int) -> Events:
        """Ends a request."""

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        """The worker's next step, if it may have one."""

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        """Takes the result of the worker's oldest open step."""

    def expire(self, now: int) -> Events:
        """Does what is due."""

    def next_wakeup(self, now: int) -> int | None:
        """When `expire` has something to do."""

    def loads(self) -> Loads:
        """Gauges and counters."""


class Stuck(CommandError):
    """Requests are live and nothing will ever happen again: a fault of the policy."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """One worker, and since when its held blocks count."""

    worker: SimulatedWorker
    usage: Usage
    since: int = 0
    held: int = 0
    filled: int = 0


class Simulation:
    """One engine with its workers and its load.

    Args:
        engine: without workers yet.
        source: of arrivals.
        model: of all workers.
        prompts: gives their tokens; may be shared.
        workers: how many.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        model: StepModel,
        prompts: Prompts,
        *,
        workers: int = 1,
    ) -> None:
        self.engine = engine
        self.figures = Figures()
        self.now = 0
        self._source = source
        self._requests = RequestMaker(prompts)
        self._answers: list[tuple[int, int, str, Answer]] = []
        self._cancels: list[tuple[int, int, int]] = []
        self._sequence = 0
        self._wakeup: int | None = None
        """When the engine wants to be woken, as of the last look."""
        self._places: dict[str, _Place] = {}
        for number in range(workers):
            spec, _, events = engine.attach(model.spec(f"w{number}"), 0)
            usage = Usage(blocks=spec.num_blocks, block_size=spec.block_size)
            worker = SimulatedWorker(spec, model)
            self._places[spec.worker_id] = _Place(worker=worker, usage=usage)
            self._take(events)

    def next_at(self) -> int | None:
        """When the next event is; None: never.

        Raises:
            Stuck: never, and requests are live.
        """
        wakeup = self.engine.next_wakeup(self.now)
        # One that is due and was not enough is asked again with time gone on.
        self._wakeup = None if wakeup is None else max(wakeup, self.now + 1)
        times = (
            self._wakeup,
            self._source.next_at(),
            self._answers[0][0] if self._answers else None,
            self._cancels[0][0] if self._cancels else None,
        )
        known = [time for time in times if time is not None]
        if known:
            return max(self.now, min(known))
        if self.figures.live:
            loads = self.engine.loads()
            raise Stuck(
                f"the simulation is stuck at {self.now / 1e6:.3f} s: {loads.waiting} requests "
                f"wait, {loads.running} run, and no step is open"
            )
        return None

    def advance(self) -> bool:
        """Goes on to the next event and handles all of its time; False: there is none."""
        now = self.next_at()
        if now is None:
            return False
        self.now = now
        while self._answers and self._answers[0][0] <= now:
            _, _, worker_id, answer = heapq.heappop(self._answers)
            self._take(self.engine.apply(worker_id, answer.result, now))
        while self._cancels and self._cancels[0][0] <= now:
            _, handle, came = heapq.heappop(self._cancels)
            if self.figures.is_live(handle, came):
                self._take(self.engine.abort(handle, now))
        self._admit()
        if self._wakeup is not None and self._wakeup <= now:
            self._take(self.engine.expire(now))
            self._admit()
        for worker_id, place in self._places.items():
            while (plan := self.engine.plan(worker_id, now)) is not None:
                self._submit(worker_id, place, plan)
        return True

    def run(self, until: int | None = None) -> None:
        """Goes on until nothing is left to happen, or until that time."""
        while until is None or self.now < until:
            if not self.advance():
                return

    def report(self, policy: str) -> Report:
        """The figures so far."""
        for place in self._places.values():
            self._account(place, look=True)
        usages = [place.usage for place in self._places.values()]
        busy = sum(place.worker.busy_us for place in self._places.values())
        counters = self.engine.loads().counters
        return report_of(policy, self.figures, usages, counters, self.now, busy)

    def _admit(self) -> None:
        """Adds what has come by now; in closed loops an end at once makes room for the next."""
        now, source, figures = self.now, self._source, self.figures
        while (due := source.next_at()) is not None and due <= now:
            arrival = source.take(now)
            handle = figures.arrive(now, _group(arrival))
            try:
                events = self.engine.add(self._requests.make(arrival, handle), now)
            except Refused as error:
                figures.refused(handle, error.refusal.reason)
                source.ended(now)
                continue
            self._take(events)
            if arrival.cancel_after_us is not None and figures.is_live(handle, now):
                heapq.heappush(self._cancels, (now + arrival.cancel_after_us, handle, now))

    def _take(self, events: Events) -> None:
        for _ in range(self.figures.take(events, self.now)):
            self._source.ended(self.now)

    def _submit(self, worker_id: str, place: _Place, plan: StepPlan) -> None:
        answer = place.worker.submit(plan, self.now)
        self._sequence += 1
        heapq.heappush(self._answers, (answer.done_at, self._sequence, worker_id, answer))
        place.usage.steps += 1
        place.usage.rows += answer.rows
        held_changes = plan.new_rows or plan.new_block_ids.size or plan.released_slots.size
        self._account(place, look=bool(held_changes))

    def _account(self, place: _Place, *, look: bool) -> None:
        """Counts what was held since the last time, and takes what is held from now on."""
        elapsed = self.now - place.since
        place.usage.held_block_us += place.held * elapsed
        place.usage.filled_token_us += place.filled * elapsed
        place.usage.elapsed_us += elapsed
        place.since = self.now
        place.filled = place.worker.filled_tokens
        if not look:
            return
        load = next(
            load
            for load in self.engine.loads().workers
            if load.worker_id == place.worker.spec.worker_id
        )
        place.held = load.blocks_total - load.blocks_free - load.blocks_evictable
        place.usage.most_held = max(place.usage.most_held, place.held)
        place.usage.most_running = max(place.usage.most_running, load.running)


def simulate(  # noqa: PLR0913  # keywords with defaults
    arrivals: Iterable[Arrival],
    config: Config,
    model: StepModel,
    *,
    concurrency: int | None = None,
    workers: int = 1,
    seed: int = 0,
    hashing: Hashing = SHA256,
) -> Report:
    """What the core would do with a load.

    Args:
        arrivals: in order of their times; taken one by one.
        config: of the core.
        model: of the workers.
        concurrency: clients of a closed loop; None: everything arrives at its time.
        workers: how many.
        seed: of the prompts' tokens.
        hashing: of the prefix cache.

    Raises:
        Stuck: the core makes no progress.
    """
    source = OpenLoop(arrivals) if concurrency is None else ClosedLoop(arrivals, concurrency)
    engine = Scheduler(config, hashing)
    prompts = Prompts(seed, model.max_model_len)
    simulation = Simulation(engine, source, model, prompts, workers=workers)
    simulation.run()
    return simulation.report(config.policy.value)


def _group(arrival: Arrival) -> str:
    if arrival.priority_class and arrival.tenant:
        return f"{arrival.priority_class}/{arrival.tenant}"
    return arrival.priority_class or arrival.tenant
