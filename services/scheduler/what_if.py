"""What a recorded load would have met under other settings: the real core, simulated workers.

Requests come at their recorded times with their prompts, hashes, classes, tenants, deadlines, and
go away when their owners did; each says as many tokens as it did then, and the same ones where they
were recorded. The workers take the time of a step model fitted to the recorded steps, and never
fail. Of a recording without token ids neither outputs nor the ends of prompts are known; they count
as unlike all others, so that prompts share the blocks whose hashes were recorded, and nothing else.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.cli.command import CommandError
from services.scheduler import journal_codec as codec
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Events,
    IntArray,
    Loads,
    StepPlan,
    StepResult,
    TokenArray,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step_time import StepShape
from services.scheduler.hashing import SHA256
from services.scheduler.journal_file import JournalFile
from services.scheduler.journal_reader import (
    RecordedRequest,
    StepShapes,
    read_requests,
    read_workers,
)
from services.scheduler.replay import Replay, hashing_of
from services.scheduler.simulate.fit import Fit, fit_steps, fitted_model
from services.scheduler.simulate.load import Arrival, OpenLoop, Prompts
from services.scheduler.simulate.loop import Simulation
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.step_model import EOS_TOKEN, VOCAB_SIZE, StepModel
from services.scheduler.simulate.worker import SAID_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """What a what-if begins with.

    Args:
        requests: in the order in which they came.
        outputs: uint32 tokens of each, as far as they are known.
        workers: as announced.
        fit: of their step times.
        model: the same, with the first worker's limits.
    """

    requests: list[RecordedRequest]
    outputs: list[TokenArray]
    workers: list[WorkerSpec]
    fit: Fit
    model: StepModel


def recorded_load(path: Path) -> RecordedLoad:
    """Reads a journal, by executing it.

    Raises:
        OSError: it cannot be read.
        JournalError: it is no journal, damaged, or not replayed with the same decisions.
        CommandError: no request, worker or too few step times are in it.
    """
    requests, workers = read_requests(path), read_workers(path)
    if not requests or not workers:
        raise CommandError(f"{path}: no request or no worker is in it")
    shapes = StepShapes()
    samples: list[tuple[StepShape, int]] = []
    outputs: list[list[int]] = []
    live: dict[int, list[int]] = {}
    with JournalFile(path) as file:
        veiled = codec.is_hash_only(file.header)
        for played in Replay(file).entries():
            if not played.is_same:
                raise codec.JournalError(
                    f"entry {played.number} ({played.kind}) is not decided as it was recorded"
                )
            if played.request is not None:
                outputs.append([] if veiled else played.request.resumed.tolist())
                if played.events is not None:
                    live[played.request.handle] = outputs[-1]
            if played.spec is not None:
                shapes.attached(played.spec)
            if played.step is not None:
                shapes.planned(played.worker_id, played.step)
            if played.result is not None and not played.recorded.error:
                samples.append((shapes.answered(played.worker_id), played.result.execute_us))
            if played.events is not None and not veiled:
                _collect(live, played.events)
    if veiled:
        requests, outputs = _told_apart(requests)
    try:
        fit = fit_steps(samples)
    except ValueError as error:
        raise CommandError(f"{path}: a what-if {error}") from error
    return RecordedLoad(
        requests=requests,
        outputs=[np.array(output, np.uint32) for output in outputs],
        workers=workers,
        fit=fit,
        model=fitted_model(fit, workers[0], path.name, path.name),
    )


def what_if(path: Path, load: RecordedLoad, config: Config, *, blocks: int | None) -> Report:
    """What the load would have met.

    Args:
        path: of the journal.
        load: that it holds.
        config: of the core.
        blocks: of each worker's KV cache; None: as recorded.

    Raises:
        Stuck: the core makes no progress.
    """
    with JournalFile(path) as file:
        hashing = SHA256 if codec.is_hash_only(file.header) else hashing_of(file)
    engine = _Engine(Scheduler(config, hashing), load, blocks)
    source = OpenLoop(_arrival(one) for one in load.requests)
    longest = max(one.request.prompt.size for one in load.requests)
    prompts = Prompts(0, int(longest))  # made up, and replaced by the recorded ones
    simulation = Simulation(engine, source, load.model, prompts, workers=len(load.workers))
    simulation.run()
    return simulation.report(config.policy.value)


class _Engine:
    """The core, given the recorded requests where the simulation makes up its own."""

    def __init__(self, core: Scheduler, load: RecordedLoad, blocks: int | None) -> None:
        self._core = core
        self._load = load
        self._blocks = blocks
        self._next_request = self._next_worker = 0
        self._prompt_sizes = np.array([one.request.prompt.size for one in load.requests], np.int64)
        # By worker: the request in each slot, and how many tokens it is known to have.
        self._number: dict[str, IntArray] = {}
        self._known: dict[str, IntArray] = {}
        self._computed: dict[str, IntArray] = {}
        self._open: dict[str, list[tuple[IntArray, IntArray]]] = {}

    def attach(self, announced: WorkerSpec, now: int) -> tuple[WorkerSpec, int, Events]:
        recorded = self._load.workers[self._next_worker]
        self._next_worker += 1
        spec, epoch, events = self._core.attach(
            replace(
                recorded,
                worker_id=announced.worker_id,
                num_blocks=self._blocks or recorded.num_blocks,
                vocab_size=max(recorded.vocab_size, VOCAB_SIZE),
                eos_token_ids=announced.eos_token_ids,
            ),
            now,
        )
        self._number[spec.worker_id] = np.zeros(spec.num_slots, np.int64)
        self._known[spec.worker_id] = np.zeros(spec.num_slots, np.int64)
        self._computed[spec.worker_id] = np.zeros(spec.num_slots, np.int64)
        self._open[spec.worker_id] = []
        return spec, epoch, events

    def add(self, spec: AddRequest, now: int) -> Events:
        number = self._next_request
        self._next_request += 1
        one = self._load.requests[number]
        return self._core.add(
            replace(
                one.request,
                # A higher attempt may come under the same id as one that has not ended here yet.
                request_id=spec.request_id,
                handle=spec.handle,
                sampling=spec.sampling,
                # The worker says an end of sequence as the last token of what is known.
                ignore_eos=one.request.max_tokens == one.output_tokens,
                stop_token_ids=(),
                traceparent=str(number),
                deadline=None if one.deadline_us is None else now + one.deadline_us,
            ),
            now,
        )

    def abort(self, handle: int, now: int) -> Events:
        return self._core.abort(handle, now)

    def plan(self, worker_id: str, now: int) -> StepPlan | None:
        step = self._core.plan(worker_id, now)
        if step is None:
            return None
        number, known, computed = (
            columns[worker_id] for columns in (self._number, self._known, self._computed)
        )
        for row in step.new_rows:
            number[row.slot] = int(row.traceparent)
            known[row.slot] = row.token_ids.size
            computed[row.slot] = row.num_computed
        computed[step.slots] += step.num_tokens
        samples = step.slots[computed[step.slots] == known[step.slots]]
        # Which output token each of these rows is about to say, by request.
        requests = number[samples]
        places = known[samples] - self._prompt_sizes[requests]
        known[samples] += 1
        self._open[worker_id].append((requests, places))
        return step

    def apply(self, worker_id: str, result: StepResult, now: int) -> Events:
        requests, places = self._open[worker_id].pop(0)
        tokens = result.token_ids
        said = tokens == SAID_TOKEN
        if said.any():
            tokens = tokens.copy()
            for row in said.nonzero()[0].tolist():
                output = self._load.outputs[requests[row]]
                if places[row] < output.size and output[places[row]] != EOS_TOKEN:
                    tokens[row] = output[places[row]]
            result = replace(result, token_ids=tokens)
        return self._core.apply(worker_id, result, now)

    def expire(self, now: int) -> Events:
        return self._core.expire(now)

    def next_wakeup(self, now: int) -> int | None:
        return self._core.next_wakeup(now)

    def loads(self) -> Loads:
        return self._core.loads()


def _told_apart(
    requests: list[RecordedRequest],
) -> tuple[list[RecordedRequest], list[list[int]]]:
    """Requests and outputs of tokens that no two of them have in common."""
    apart, outputs = [], []
    for number, one in enumerate(requests):
        token = SAID_TOKEN + 1 + number % (VOCAB_SIZE - SAID_TOKEN - 1)
        prompt = np.full(one.request.prompt.size, token, np.uint32)
        resumed = np.full(one.request.resumed.size, token, np.uint32)
        apart.append(replace(one, request=replace(one.request, prompt=prompt, resumed=resumed)))
        outputs.append([token] * one.output_tokens)
    return apart, outputs


def _collect(live: dict[int, list[int]], events: Events) -> None:
    for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
        live[handle].append(token)
    for end in events.ended:
        live.pop(end.handle, None)


def _arrival(one: RecordedRequest) -> Arrival:
    request = one.request
    return Arrival(
        at_us=one.at_us,
        prompt_tokens=int(request.prompt.size),
        output_tokens=one.output_tokens,
        max_tokens=request.max_tokens,
        priority_class=request.priority_class,
        tenant=request.tenant,
        cancel_after_us=one.cancel_after_us,
    )
