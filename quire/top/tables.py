"""The tables of a frame: schedulers, workers, classes and tenants, each as columns."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from quire.top import marks as draw
from quire.top.history import Seen, WorkerRates
from quire.top.marks import Marks
from quire.top.sample import Latencies, PriorityClass, Tenant, Timings, Worker
from quire.top.table import Column, plain

_ANONYMOUS = "(none)"
_NARROWEST_NAME, _WIDEST_NAME = 16, 48
_NARROWEST_MAP, _WIDEST_MAP = 8, 48
_BUDGET_BAR = 6


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and how many rows they have."""

    columns: tuple[Column, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker: of which scheduler, how it is, and how it fares, where that is known."""

    scheduler: str
    worker: Worker
    rates: WorkerRates | None


def schedulers(fleet: Sequence[Seen], marks: Marks) -> Table:
    """A row for each scheduler; "down" where it does not answer."""
    states = [
        "down" if one.problem else ("stalled" if one.sample and one.sample.stall else "up")
        for one in fleet
    ]
    samples = [one.sample for one in fleet]
    latencies = [sample.latencies if sample else None for sample in samples]
    columns = (
        _names("SCHEDULER", [one.target for one in fleet], marks, keep_end=True),
        plain("STATE", states, keep=90),
        plain("RUN", [_count(s.running if s else None, marks) for s in samples], keep=80),
        plain("WAIT", [_count(s.waiting if s else None, marks) for s in samples], keep=79),
        plain("WORKERS", [_count(len(s.workers) if s else None, marks) for s in samples], keep=40),
        plain("PROMPT/s", [_rate(one, "prompt_tokens", marks) for one in fleet], keep=50),
        plain("GEN/s", [_rate(one, "generation_tokens", marks) for one in fleet], keep=60),
        *_latency_columns(latencies, marks, keep=45),
    )
    return Table(columns, len(fleet))


def workers(rows: Sequence[WorkerRow], marks: Marks, *, whole: bool, several: bool) -> Table:
    """A row for each worker.

    Args:
        rows: the workers.
        marks: to draw with.
        whole: also what it is, and how long its steps and its link take at worst.
        several: also whose it is, since there are several schedulers.
    """
    each = [row.worker for row in rows]
    rates = [row.rates or WorkerRates() for row in rows]
    timings = [worker.timings for worker in each]

    def times(field: str) -> list[str]:
        return [_time(one, field, marks) for one in timings]

    def bar(row: int, width: int) -> Text:
        return budget_bar(
            rates[row].tokens_per_step, each[row].max_num_batched_tokens, width, marks
        )

    columns = [
        _names("WORKER", [worker.worker_id for worker in each], marks, keep_end=True),
        *([plain("AT", [row.scheduler for row in rows], keep=55)] if several else []),
        plain("RUN", [f"{one.running}/{one.max_num_seqs}" for one in each], keep=90),
        plain(
            "TOKENS/STEP",
            [
                f"{draw.count(rate.tokens_per_step, marks)}/{one.max_num_batched_tokens}"
                for one, rate in zip(each, rates, strict=True)
            ],
            keep=70,
        ),
        Column(title="BUDGET", draw=bar, least=_BUDGET_BAR, most=_BUDGET_BAR, keep=20),
        plain("STEP", times("execute_us_p50"), keep=65),
        plain("IDLE", times("idle_us_p50"), keep=30),
        plain("LINK", times("link_us_p50"), keep=40),
        plain("BUSY", [draw.percent(rate.busy, marks) for rate in rates], keep=60),
    ]
    if whole:
        columns += [
            plain("STEP p99", times("execute_us_p99"), keep=15),
            plain("LINK p99", times("link_us_p99"), keep=16),
            plain("STEPS/s", [draw.count(rate.steps_per_s, marks) for rate in rates], keep=14),
            plain("UP", [draw.duration(one.attached_us, marks) for one in each], keep=12),
            plain("DEVICE", [_kind(one, marks) for one in each], keep=13),
            plain("VERSION", [one.version or marks.none for one in each], keep=11),
        ]
    used = [_used(worker, marks) for worker in each]
    columns += [
        plain("USED", used, keep=50),
        Column(
            title="BLOCKS",
            draw=lambda row, width: block_map(each[row], width, marks),
            least=_NARROWEST_MAP,
            most=_WIDEST_MAP,
            keep=35,
        ),
    ]
    return Table(tuple(columns), len(rows))


def classes(rows: Sequence[PriorityClass], marks: Marks) -> Table:
    """A row for each priority class."""
    columns = (
        _names("CLASS", [one.name for one in rows], marks),
        plain("RUN", [str(one.running) for one in rows], keep=90),
        plain("WAIT", [str(one.waiting) for one in rows], keep=89),
        plain("SHARE", [draw.percent(one.weight / 1000, marks) for one in rows], keep=30),
        *_latency_columns([one.latencies for one in rows], marks, keep=45),
        plain("TTFT MET", [_met(one.ttft_met, one.ttft_missed, marks) for one in rows], keep=24),
        plain(
            "GOODPUT", [_met(one.targets_met, one.targets_missed, marks) for one in rows], keep=23
        ),
    )
    return Table(columns, len(rows))


def tenants(rows: Sequence[Tenant], marks: Marks) -> Table:
    """A row for each tenant."""
    columns = (
        _names("TENANT", [one.name or _ANONYMOUS for one in rows], marks),
        plain("RUN", [str(one.running) for one in rows], keep=90),
        plain("WAIT", [str(one.waiting) for one in rows], keep=89),
        plain("SERVED", [draw.count(one.served_tokens, marks) for one in rows], keep=30),
    )
    return Table(columns, len(rows))


def block_map(worker: Worker, width: int, marks: Marks) -> Text:
    """What its KV blocks hold, from those that requests hold to free ones."""
    amounts = (
        worker.blocks_held,
        worker.blocks_pinned,
        worker.blocks_evictable,
        worker.blocks_free,
    )
    letters = (marks.held, marks.pinned, marks.cached, marks.free)
    styles = ("green", "magenta", "cyan", "dim")
    cells = draw.parts(amounts, width)
    return Text.assemble(
        *(
            (letter * size, style)
            for letter, size, style in zip(letters, cells, styles, strict=True)
        )
    )


def budget_bar(tokens: float | None, budget: int, width: int, marks: Marks) -> Text:
    """How much of the token budget the steps use."""
    share = min((tokens or 0) / budget, 1.0) if budget else 0.0
    full = round(share * width) or int(share > 0)
    return Text.assemble((marks.full * full, "blue"), (marks.blank * (width - full), "dim"))


def _names(title: str, names: Sequence[str], marks: Marks, *, keep_end: bool = False) -> Column:
    widest = max((Text(name).cell_len for name in (title, *names)), default=0)
    return Column(
        title=title,
        draw=lambda row, width: Text(draw.shortened(names[row], width, marks, keep_end=keep_end)),
        least=min(widest, _NARROWEST_NAME),
        most=min(widest, _WIDEST_NAME),
        keep=100,
    )


def _latency_columns(
    each: Sequence[Latencies | None], marks: Marks, *, keep: int
) -> tuple[Column, ...]:
    def times(field: str, number: str) -> list[str]:
        return [
            draw.duration(getattr(one, field) if one and getattr(one, number) else None, marks)
            for one in each
        ]

    return (
        plain("TTFT p50", times("ttft_us_p50", "requests"), keep=keep),
        plain("p95", times("ttft_us_p95", "requests"), keep=keep - 2),
        plain("TPOT p50", times("tpot_us_p50", "tpot_requests"), keep=keep - 1),
        plain("p95", times("tpot_us_p95", "tpot_requests"), keep=keep - 3),
    )


def _count(value: int | None, marks: Marks) -> str:
    return marks.none if value is None else str(value)


def _rate(one: Seen, counter: str, marks: Marks) -> str:
    return draw.count(None if one.problem else one.per_s.get(counter), marks)


def _time(timings: Timings | None, field: str, marks: Marks) -> str:
    return draw.duration(None if timings is None else getattr(timings, field), marks)


def _kind(worker: Worker, marks: Marks) -> str:
    return f"{worker.device} {worker.dtype}".strip() or marks.none


def _used(worker: Worker, marks: Marks) -> str:
    """Share of the blocks that cannot be given to others."""
    if not worker.blocks_total:
        return marks.none
    return draw.percent((worker.blocks_held + worker.blocks_pinned) / worker.blocks_total, marks)


def _met(met: int, missed: int, marks: Marks) -> str:
    return draw.percent(met / (met + missed) if met + missed else None, marks)
