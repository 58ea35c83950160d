"""The report of a simulation as a value, and how it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from services.scheduler.core.plan import Counters
from services.scheduler.simulate.metrics import REFUSED, Figures, Spread


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one worker's KV cache held over time."""

    blocks: int
    block_size: int
    held_block_us: int = 0
    filled_token_us: int = 0
    elapsed_us: int = 0
    most_held: int = 0
    most_running: int = 0
    steps: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Requests of one class and tenant."""

    name: str
    completed: int
    output_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one load gave; see `metrics` for the times.

    Args:
        policy: "v0", or the order of the core's queue.
        arrived: requests.
        completed: those that said all or reached their bound.
        ends: how many ended in which way, refusals included.
        duration_s: simulated, until the last event.
        prompt_tokens: of accepted requests.
        output_tokens: of accepted requests.
        cached_tokens: of the prompts, found in the prefix cache at first admission.
        recomputed_tokens: computed again after preemption.
        preemptions: how often a request lost its place.
        requests_per_s: completed ones.
        output_tokens_per_s: output tokens by the duration.
        total_tokens_per_s: prompt and output tokens by the duration.
        ttft_ms: time to first token.
        tpot_ms: time per output token, per request.
        itl_ms: time between two tokens.
        e2e_ms: time from arrival to end.
        kv_held: share of all KV blocks that requests hold, mean over time.
        kv_filled: share of all KV places that hold a live request's keys and values, mean over
            time; a prefix that several requests share counts for each.
        kv_most_held: most of `kv_held` at any look.
        most_running: requests that run, at most, summed over the workers' own maxima.
        most_live: requests that run or wait, at most.
        steps: of all workers.
        rows_per_step: mean.
        busy: share of the workers' time that is computing.
        groups: by class and tenant, where requests have one.
    """

    policy: str
    arrived: int
    completed: int
    ends: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    kv_held: float
    kv_filled: float
    kv_most_held: float
    most_running: int
    most_live: int
    steps: int
    rows_per_step: float
    busy: float
    groups: tuple[GroupReport, ...]

    @property
    def filled_of_held(self) -> float | None:
        """How much of what requests hold is filled; None where nothing was held."""
        return self.kv_filled / self.kv_held if self.kv_held else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def report_of(  # one call, all of it is needed
    policy: str,
    figures: Figures,
    usages: Sequence[Usage],
    counters: Counters,
    now: int,
    busy_us: int,
) -> Report:
    """Puts the figures together; `now` is the simulated time."""
    seconds = max(now, 1) / 1e6
    places = sum(usage.blocks * usage.elapsed_us for usage in usages)
    filled = sum(usage.filled_token_us / usage.block_size for usage in usages)
    steps = sum(usage.steps for usage in usages)
    everything = figures.all
    return Report(
        policy=policy,
        arrived=figures.arrived,
        completed=everything.completed,
        ends=dict(sorted(figures.ends.items())),
        duration_s=seconds,
        prompt_tokens=figures.prompt_tokens,
        output_tokens=figures.output_tokens,
        cached_tokens=figures.cached_tokens,
        recomputed_tokens=max(counters.recomputed_tokens, figures.recomputed_tokens),
        preemptions=max(counters.preemptions, figures.preemptions),
        requests_per_s=everything.completed / seconds,
        output_tokens_per_s=figures.output_tokens / seconds,
        total_tokens_per_s=(figures.prompt_tokens + figures.output_tokens) / seconds,
        ttft_ms=everything.ttft.spread(),
        tpot_ms=everything.tpot.spread(),
        itl_ms=figures.itl.spread(),
        e2e_ms=everything.e2e.spread(),
        kv_held=_share(sum(usage.held_block_us for usage in usages), places),
        kv_filled=_share(filled, places),
        kv_most_held=max((usage.most_held / usage.blocks for usage in usages), default=0.0),
        most_running=sum(usage.most_running for usage in usages),
        most_live=figures.most_live,
        steps=steps,
        rows_per_step=_share(sum(usage.rows for usage in usages), steps),
        busy=_share(busy_us, now * len(usages)),
        groups=tuple(
            GroupReport(
                name=group.name,
                completed=group.completed,
                output_tokens=group.output_tokens,
                ttft_ms=group.ttft.spread(),
                tpot_ms=group.tpot.spread(),
                e2e_ms=group.e2e.spread(),
            )
            for _, group in sorted(figures.groups.items())
        ),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def one_table(title: str, reports: Sequence[Report]) -> Table:
    """The reports as columns, a figure a line."""
    table = Table(title=title)
    table.add_column("")
    for report in reports:
        table.add_column(report.policy, justify="right")
    for name, texts in _lines(reports):
        table.add_row(name, *texts)
    return table


def group_table(report: Report) -> Table:
    """Classes and tenants of one report."""
    table = Table(title=f"{report.policy}: classes and tenants")
    for heading in ("", "completed", "output tokens", "TTFT p50", "p99", "TPOT p50", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    for group in report.groups:
        table.add_row(
            group.name,
            str(group.completed),
            str(group.output_tokens),
            millis(group.ttft_ms.p50),
            millis(group.ttft_ms.p99),
            millis(group.tpot_ms.p50),
            millis(group.tpot_ms.p99),
        )
    return table


def console() -> Console:
    """Standard output; wide enough for the tables where it is a file.

    Names of models, classes and tenants are printed as they are, brackets too.
    """
    shown = Console(markup=False, emoji=False)
    return shown if shown.is_terminal else Console(width=130, markup=False, emoji=False)


def refusals(ends: Mapping[str, int]) -> str:
    """How many requests the core refused for which reason, e.g. "3 QUEUE_REQUESTS"; "": none."""
    return ", ".join(
        f"{count} {end.removeprefix(REFUSED)}"
        for end, count in sorted(ends.items())
        if end.startswith(REFUSED)
    )


def millis(value: float | None) -> str:
    """Milliseconds, or seconds from ten of them on."""
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.1f} ms"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


def _lines(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    def spread(of: str) -> list[str]:
        values: list[Spread] = [getattr(report, of) for report in reports]
        return [" / ".join(millis(getattr(v, p)) for p in ("p50", "p90", "p99")) for v in values]

    return [
        ("requests completed of arrived", [f"{r.completed} / {r.arrived}" for r in reports]),
        ("ends", [", ".join(f"{k} {v}" for k, v in r.ends.items()) for r in reports]),
        ("simulated time", [f"{r.duration_s:.1f} s" for r in reports]),
        ("output tokens / s", [f"{r.output_tokens_per_s:.0f}" for r in reports]),
        ("all tokens / s", [f"{r.total_tokens_per_s:.0f}" for r in reports]),
        ("requests / s", [f"{r.requests_per_s:.2f}" for r in reports]),
        ("TTFT p50 / p90 / p99", spread("ttft_ms")),
        ("TPOT p50 / p90 / p99", spread("tpot_ms")),
        ("ITL p50 / p90 / p99", spread("itl_ms")),
        ("end to end p50 / p90 / p99", spread("e2e_ms")),
        ("KV cache held", [percent(r.kv_held) for r in reports]),
        ("KV cache filled", [percent(r.kv_filled) for r in reports]),
        ("filled of held", [percent(r.filled_of_held) for r in reports]),
        ("requests running / live at most", [f"{r.most_running} / {r.most_live}" for r in reports]),
        ("preemptions", [str(r.preemptions) for r in reports]),
        ("recomputed tokens", [str(r.recomputed_tokens) for r in reports]),
        ("cached prompt tokens", [str(r.cached_tokens) for r in reports]),
        ("steps", [f"{r.steps} of {r.rows_per_step:.1f} rows" for r in reports]),
        ("workers computing", [percent(r.busy) for r in reports]),
    ]
