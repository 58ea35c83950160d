"""What a recorded run was like, gathered while it is executed again."""

from dataclasses import asdict, dataclass, field
from typing import Any

from services.scheduler import journal_digest as digest
from services.scheduler.core.plan import Counters, Events, StepPlan
from services.scheduler.replay import Played
from services.scheduler.simulate.metrics import Histogram, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first entry that the core decided otherwise."""

    entry: int
    input: str
    worker_id: str
    at_s: float
    recorded: str
    decided: str


@dataclass(slots=True, kw_only=True)
class Summary:
    """Figures of one journal; times are those of the recorded clock.

    Args:
        entries: inputs executed.
        requests: that came.
        refused: of them.
        ends: how many ended in which way.
        prompt_tokens: of the requests taken.
        output_tokens: that were sampled for them.
        steps: planned.
        preemptions: requests that lost their place for want of memory or to a more important one.
        requeues: requests whose worker went.
        recomputed_tokens: computed again after either.
        cached_tokens: of the prompts, found in the prefix cache.
        duration_s: from the first to the last entry, seconds.
        workers: ids of the workers that were attached at some time.
        configurations: changes of the configuration.
        ttft_ms: from the arrival of a request at the core to its first token.
        queue_ms: from the arrival of a request to its first step.
        tpot_ms: from its first to its last token, by the number of tokens but one.
        difference: where replay left the record; None: nowhere.
    """

    entries: int = 0
    requests: int = 0
    refused: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    requeues: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    duration_s: float = 0.0
    workers: list[str] = field(default_factory=list)
    configurations: int = 0
    ttft_ms: Spread = field(default_factory=Spread)
    queue_ms: Spread = field(default_factory=Spread)
    tpot_ms: Spread = field(default_factory=Spread)
    difference: Difference | None = None

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens by the duration."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "output_tokens_per_s": self.output_tokens_per_s}


@dataclass(slots=True)
class _Course:
    came: int
    queued: bool = True
    first: int | None = None
    last: int = 0
    tokens: int = 0


class Gatherer:
    """Takes executed entries in order."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._began: int | None = None
        self._live: dict[int, _Course] = {}
        self._ttft, self._queue, self._tpot = Histogram(), Histogram(), Histogram()

    def take(self, played: Played) -> None:
        """Counts one entry."""
        summary = self.summary
        summary.entries += 1
        if self._began is None:
            self._began = played.now
        summary.duration_s = (played.now - self._began) / 1e6
        if not played.is_same and summary.difference is None:
            summary.difference = _difference(played, summary.duration_s)
        if played.request is not None:
            summary.requests += 1
            if played.events is None:
                summary.refused += 1
            else:
                summary.prompt_tokens += int(played.request.prompt.size)
                self._live[played.request.handle] = _Course(played.now)
        elif played.spec is not None and played.worker_id not in summary.workers:
            summary.workers.append(played.worker_id)
        elif played.kind == "configure_json":
            summary.configurations += 1
        if played.step is not None:
            self._planned(played.step, played.now)
        if played.events is not None:
            self._happened(played.events, played.now)

    def finish(self, counters: Counters) -> Summary:
        """The figures, with those that the core counted."""
        summary = self.summary
        summary.preemptions = counters.preemptions
        summary.requeues = counters.requeues
        summary.recomputed_tokens = counters.recomputed_tokens
        summary.cached_tokens = counters.prefix_hit_tokens
        summary.ttft_ms = self._ttft.spread()
        summary.queue_ms = self._queue.spread()
        summary.tpot_ms = self._tpot.spread()
        return summary

    def _planned(self, step: StepPlan, now: int) -> None:
        self.summary.steps += 1
        for row in step.new_rows:
            course = self._live.get(row.handle)
            if course is not None and course.queued:
                course.queued = False
                self._queue.add(now - course.came)

    def _happened(self, events: Events, now: int) -> None:
        self.summary.output_tokens += events.handles.size
        live = self._live
        for handle in events.handles.tolist():
            course = live[handle]
            course.tokens += 1
            course.last = now
            if course.first is None:
                course.first = now
                self._ttft.add(now - course.came)
        for end in events.ended:
            reason = end.reason.value
            self.summary.ends[reason] = self.summary.ends.get(reason, 0) + 1
            course = live.pop(end.handle)
            if course.first is not None and course.tokens > 1:
                self._tpot.add((course.last - course.first) // (course.tokens - 1))


def _difference(played: Played, at_s: float) -> Difference:
    return Difference(
        entry=played.number,
        input=played.kind,
        worker_id=played.worker_id,
        at_s=at_s,
        recorded=describe(played.recorded, played.kind),
        decided=describe(played.decided, played.kind),
    )


def describe(decision: digest.Decision, kind: str) -> str:
    """A decision on one line."""
    if decision.error:
        return decision.error
    if not decision.digest:
        return "nothing"
    names = digest.STEP_NUMBERS if kind == "plan" else digest.EVENT_NUMBERS
    numbers = ", ".join(
        f"{number} {name}" for name, number in zip(names, decision.summary, strict=False)
    )
    return f"{numbers or 'an answer'} [{decision.digest:016x}]"
