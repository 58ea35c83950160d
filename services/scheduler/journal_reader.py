"""What a recorded run teaches: who came when and for how much, and how long steps took."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.scheduler import journal_codec as codec
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import AddRequest, EndReason, IntArray, StepPlan, WorkerSpec
from services.scheduler.core.step_time import StepShape
from services.scheduler.journal_file import JournalFile
from services.scheduler.replay import Replay
from services.scheduler.simulate.load import Arrival

_KNOWN_LENGTH = (EndReason.STOP.name, EndReason.LENGTH.name, EndReason.FAILED.name)
"""Ends of requests that had said all they had to say."""
_GONE = (EndReason.ABORT.name, EndReason.REPLACED.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request of a recorded run.

    Args:
        at_us: when it came, microseconds since recording began.
        request: as it came in; its deadline is on the recorded clock.
        deadline_us: what was left until its deadline; None: it had none.
        output_tokens: as it turned out, those it had when it came included; where it ended before
            its time, the most it might have had. At least 1.
        cancel_after_us: its owner went away then; None: never.
    """

    at_us: int
    request: AddRequest
    deadline_us: int | None
    output_tokens: int
    cancel_after_us: int | None


@dataclass(slots=True)
class _Open:
    at: int
    request: AddRequest
    ended_at: int | None = None
    reason: str = ""
    completion_tokens: int = 0


def read_requests(path: Path) -> list[RecordedRequest]:
    """The requests of a recorded run in the order in which they came, refused ones included.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal, or damaged.
    """
    came: list[_Open] = []
    live: dict[int, _Open] = {}
    longest = 1
    with JournalFile(path) as file:
        started = last = file.header.started
        for entry in file.entries():
            last = entry.now
            if entry.HasField("attach"):
                longest = max(longest, codec.parse_attach(entry.attach).max_model_len)
            elif entry.HasField("add"):
                one = _Open(last, codec.parse_add(entry.add))
                came.append(one)
                if not entry.error:
                    live[one.request.handle] = one
            for end in entry.ended:
                if (ended := live.pop(end.handle, None)) is not None:
                    ended.ended_at, ended.reason = last, end.reason
                    ended.completion_tokens = end.completion_tokens
    for one in live.values():  # the recording ended before they did
        one.ended_at, one.reason = last, EndReason.ABORT.name
    return [_recorded(one, started, longest) for one in came]


def read_arrivals(path: Path) -> list[Arrival]:
    """The requests of a recorded run, as a simulation takes them.

    Requests share the beginning of their prompts where the recorded block hashes are equal.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal, or damaged.
    """
    block_size = max((spec.block_size for spec in read_workers(path)), default=1)
    seen: set[bytes] = set()
    arrivals = []
    for one in read_requests(path):
        hashes = one.request.prompt_hashes
        chain = [hashes[at : at + DIGEST_BYTES] for at in range(0, len(hashes), DIGEST_BYTES)]
        shared = next((place for place, part in enumerate(chain) if part not in seen), len(chain))
        seen.update(chain)
        arrivals.append(
            Arrival(
                at_us=one.at_us,
                prompt_tokens=int(one.request.prompt.size),
                output_tokens=one.output_tokens,
                max_tokens=one.request.max_tokens,
                priority_class=one.request.priority_class,
                tenant=one.request.tenant,
                session=chain[0].hex() if chain else "",
                shared_tokens=shared * block_size,
                cancel_after_us=one.cancel_after_us,
            )
        )
    return arrivals


def read_workers(path: Path) -> list[WorkerSpec]:
    """What the workers announced that were attached at one time, when they were most.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal, or damaged.
    """
    attached: dict[str, WorkerSpec] = {}
    most: list[WorkerSpec] = []
    with JournalFile(path) as file:
        for entry in file.entries():
            if entry.HasField("attach") and not entry.attach.refused:
                spec = codec.parse_attach(entry.attach)
                attached[spec.worker_id] = spec
                if len(attached) > len(most):
                    most = list(attached.values())
            elif entry.HasField("lost"):
                attached.pop(entry.lost, None)
    return most


def step_samples(path: Path) -> Iterator[tuple[StepShape, int]]:
    """Shape and duration in microseconds of every step that was answered, in order of the answers.

    The journal is executed again for it. Steps whose worker told no duration are left out.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal, damaged, or not replayed with the same decisions.
    """
    with JournalFile(path) as file:
        shapes = StepShapes()
        for played in Replay(file).entries():
            if not played.is_same:
                raise codec.JournalError(
                    f"entry {played.number} ({played.kind}) is not decided as it was recorded"
                )
            if played.spec is not None:
                shapes.attached(played.spec)
            elif played.step is not None:
                shapes.planned(played.worker_id, played.step)
            elif played.kind == "apply" and not played.recorded.error:
                assert played.result is not None
                shape = shapes.answered(played.worker_id)
                if played.result.execute_us:
                    yield shape, played.result.execute_us


class StepShapes:
    """Follows plans, so that the shape of a step is known when its answer comes."""

    def __init__(self) -> None:
        self._computed: dict[str, IntArray] = {}
        self._open: dict[str, list[StepShape]] = {}

    def attached(self, spec: WorkerSpec) -> None:
        """A worker begins, with its limits as lowered."""
        self._computed[spec.worker_id] = np.zeros(spec.num_slots, np.int64)
        self._open[spec.worker_id] = []

    def planned(self, worker_id: str, step: StepPlan) -> StepShape:
        """A step was sent."""
        computed = self._computed[worker_id]
        for row in step.new_rows:
            computed[row.slot] = row.num_computed
        computed[step.slots] += step.num_tokens
        shape = StepShape(
            tokens=int(step.num_tokens.sum()),
            rows=int(step.slots.size),
            context=int(computed[step.slots].sum()),
        )
        self._open[worker_id].append(shape)
        return shape

    def answered(self, worker_id: str) -> StepShape:
        """The oldest open step was answered."""
        return self._open[worker_id].pop(0)


def _recorded(one: _Open, started: int, longest: int) -> RecordedRequest:
    request = one.request
    room = max(1, longest - int(request.prompt.size))
    output = one.completion_tokens
    if one.reason not in _KNOWN_LENGTH:
        output = room if request.max_tokens is None else min(request.max_tokens, room)
    gone = one.reason in _GONE and one.ended_at is not None
    return RecordedRequest(
        at_us=one.at - started,
        request=request,
        deadline_us=None if request.deadline is None else request.deadline - one.at,
        output_tokens=max(1, output),
        cancel_after_us=max(1, one.ended_at - one.at) if gone and one.ended_at else None,
    )
