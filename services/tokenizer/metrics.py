"""The tokenizer's metrics: requests as their callers see them, the pool that encodes, the sessions.

Histograms and counters are of the event loop; what else it owns is read there when somebody
collects. Labels are of bounded sets: operations, statuses, reasons of ours, schedulers of the
settings, the one served name; never a caller's text.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.chassis.metrics import (
    DURATION_S,
    GAP_S,
    LATENCY_S,
    OTHER,
    STEP_S,
    LoopValue,
    Metrics,
    Point,
)
from services.tokenizer.session import LinkState

_MOST_REASONS = 64
_GEN_AI = ("gen_ai.operation.name", "gen_ai.request.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request went, as its caller saw it.

    Attributes:
        operation: "chat" or "text_completion".
        status: of the call, "OK" …
        reason: for programs, of the error that ended it; "" for none.
        duration_s: from its arrival to its end.
        first_token_s: from its arrival to its first token; None without any.
        prompt_tokens: of the prompt that a scheduler was given.
        output_tokens: made for this call.
        cached_tokens: of the prompt, found in a prefix cache.
    """

    operation: str
    status: str
    reason: str
    duration_s: float
    first_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is read from the event loop at once.

    Attributes:
        calls: that have not ended.
        encoding: texts that wait to be encoded or are.
        links: one for each scheduler.
    """

    calls: int = 0
    encoding: int = 0
    links: Sequence[LinkState] = ()


class TokenizerMetrics:
    """See the module.

    Args:
        metrics: of the process.
        model: the name that is served.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._cached_tokens = 0
        self._failures: dict[str, int] = {}
        self._duration = metrics.histogram(
            "gen_ai.server.request.duration",
            "Time from the arrival of a request to the end of its answer.",
            bounds=DURATION_S,
            labels=(*_GEN_AI, "error.type"),
        )
        self._first_token = metrics.histogram(
            "gen_ai.server.time_to_first_token",
            "Time from the arrival of a request to its first token.",
            bounds=LATENCY_S,
            labels=_GEN_AI,
        )
        self._per_token = metrics.histogram(
            "gen_ai.server.time_per_output_token",
            "Time between the tokens of an answer, after the first one.",
            bounds=GAP_S,
            labels=_GEN_AI,
        )
        self._encoding_time = metrics.histogram(
            "quire.tokenizer.encoding_time",
            "Time the pool worked for one call.",
            bounds=STEP_S,
            labels=("quire.call",),
        )
        self._encoding_wait = metrics.histogram(
            "quire.tokenizer.encoding_wait",
            "Time a call waited for a thread of the pool.",
            bounds=STEP_S,
        )
        tokens = "{token}"
        metrics.counter(
            "quire.tokenizer.prompt_tokens",
            "Tokens of the prompts given to schedulers.",
            lambda: [(self._prompt_tokens, {})],
            unit=tokens,
        )
        metrics.counter(
            "quire.tokenizer.output_tokens",
            "Tokens of answers.",
            lambda: [(self._output_tokens, {})],
            unit=tokens,
        )
        metrics.counter(
            "quire.tokenizer.cached_tokens",
            "Tokens of prompts that were found in a prefix cache.",
            lambda: [(self._cached_tokens, {})],
            unit=tokens,
        )
        metrics.counter(
            "quire.tokenizer.failures",
            "Requests that ended with an error, by its reason.",
            lambda: [(n, {"quire.reason": name}) for name, n in list(self._failures.items())],
            unit="{request}",
        )

    def watch(self, read: Callable[[], State]) -> None:
        """Adds what is read on the running event loop when somebody collects."""
        value = LoopValue(asyncio.get_running_loop(), read, at_first=State())
        gauge, counter = self._metrics.gauge, self._metrics.counter
        gauge(
            "quire.tokenizer.calls",
            "Calls that have not ended.",
            lambda: [(value.get().calls, {})],
            unit="{call}",
        )
        gauge(
            "quire.tokenizer.encoding_queue",
            "Texts that wait to be encoded, or are.",
            lambda: [(value.get().encoding, {})],
            unit="{call}",
        )
        gauge(
            "quire.tokenizer.requests",
            "Requests held, by scheduler: not submitted yet, and on the session.",
            lambda: _requests(value.get().links),
            unit="{request}",
        )
        gauge(
            "quire.tokenizer.session",
            "1 for the state that the session with each scheduler is in.",
            lambda: _states(value.get().links),
        )
        counter(
            "quire.tokenizer.session_restarts",
            "Sessions that were opened after the first one.",
            lambda: [(max(0, link.sessions - 1), _at(link)) for link in value.get().links],
            unit="{session}",
        )

    def ended(self, outcome: Outcome) -> None:
        """Counts a request."""
        labels = (outcome.operation, self._model)
        failed = outcome.status != "OK"
        self._duration.record(outcome.duration_s, *labels, outcome.status if failed else "")
        if outcome.first_token_s is not None:
            self._first_token.record(outcome.first_token_s, *labels)
            if outcome.output_tokens > 1 and not failed:
                rest_s = outcome.duration_s - outcome.first_token_s
                self._per_token.record(rest_s / (outcome.output_tokens - 1), *labels)
        self._prompt_tokens += outcome.prompt_tokens
        self._output_tokens += outcome.output_tokens
        self._cached_tokens += outcome.cached_tokens
        if failed:
            late = outcome.status == "DEADLINE_EXCEEDED"  # whoever saw it pass first
            self._fail("DEADLINE" if late else outcome.reason or outcome.status)

    def encoded(self, call: str, waited_s: float, took_s: float) -> None:
        """Counts a call of the pool."""
        self._encoding_wait.record(waited_s)
        self._encoding_time.record(took_s, call)

    def _fail(self, reason: str) -> None:
        # Reasons may be those of a scheduler of another version; their number is bounded here.
        if reason not in self._failures and len(self._failures) >= _MOST_REASONS:
            reason = OTHER
        self._failures[reason] = self._failures.get(reason, 0) + 1


def _requests(links: Sequence[LinkState]) -> Iterator[Point]:
    for link in links:
        yield link.counts.unsent, {**_at(link), "quire.state": "unsent"}
        yield link.counts.on_session, {**_at(link), "quire.state": "submitted"}


def _states(links: Sequence[LinkState]) -> Iterator[Point]:
    for link in links:
        now = "serving" if link.serves else "open" if link.has_session else "none"
        for state in ("none", "open", "serving"):
            yield float(state == now), {**_at(link), "quire.state": state}


def _at(link: LinkState) -> dict[str, str]:
    return {"quire.scheduler": link.target}
