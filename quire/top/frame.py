"""One frame: from what is known of the schedulers to lines that fit the screen. A pure function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from rich.console import Group
from rich.text import Text

from quire.top import marks as draw
from quire.top import tables
from quire.top.history import Seen
from quire.top.marks import UNICODE, Marks
from quire.top.sample import PriorityClass, Sample, Tenant
from quire.top.table import lines as table_lines
from quire.top.tables import Table, WorkerRow

_Row = TypeVar("_Row")

_LABEL = 10
_NOW = 20
_SHORTEST_CURVE = 8
_FEWEST_ROWS = 3
"""Lines that a table gets before others get more: its titles and two rows."""


class View(Enum):
    """What fills the screen below the summary; the value is its name."""

    ALL = "all"
    WORKERS = "workers"
    REQUESTS = "requests"

    @property
    def next(self) -> "View":
        """The one that the key shows after it."""
        views = list(View)
        return views[(views.index(self) + 1) % len(views)]


class Order(Enum):
    """How workers and tenants are sorted."""

    NAME = "name"
    LOAD = "load"

    @property
    def next(self) -> "Order":
        """The other one."""
        return Order.LOAD if self is Order.NAME else Order.NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How to show it.

    Args:
        view: what to show.
        order: of workers and tenants.
        paused: whether the numbers stand still.
        interval_s: between samples.
        marks: the letters to draw with.
        keys: whether there is a keyboard, and so a line that tells the keys.
    """

    view: View = View.ALL
    order: Order = Order.NAME
    paused: bool = False
    interval_s: float = 1.0
    marks: Marks = UNICODE
    keys: bool = True


def frame(fleet: Sequence[Seen], look: Look, width: int, height: int | None) -> Group:
    """What to show.

    Args:
        fleet: what is known of each scheduler, at least one.
        look: how to show it.
        width: of the screen, in cells.
        height: of the screen, in lines; None: as many as are needed.
    """
    head = [_title(fleet, look, width), *_alarms(fleet, look, width)]
    if any(one.sample for one in fleet):
        head += _summary(fleet, look, width)
    foot = [_keys(look, width)] if look.keys else []
    room = None if height is None else max(height - len(head) - len(foot), 0)
    body = _body(_tables(fleet, look), look, width, room)
    if height is not None:
        shown = [*head, *body][: height - len(foot)]
        body = [Text("")] * (height - len(foot) - len(shown))
        return _group([*shown, *body, *foot], width)
    return _group([*head, *body], width)


def _group(shown: Sequence[Text], width: int) -> Group:
    for line in shown:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width)
    return Group(*shown)


# Head and foot


def _title(fleet: Sequence[Seen], look: Look, width: int) -> Text:
    samples = [one.sample for one in fleet if one.sample]
    if len(fleet) == 1:
        facts = [fleet[0].target]
    else:
        facts = [f"{sum(not one.problem for one in fleet)} of {len(fleet)} schedulers"]
    facts += sorted({sample.model for sample in samples if sample.model})
    facts += sorted({sample.version for sample in samples if sample.version})
    if len(fleet) == 1 and samples:
        facts.append(f"up {draw.duration(samples[0].uptime_us, look.marks)}")
    right = "PAUSED" if look.paused else f"every {look.interval_s:g}s"
    room = max(width - len(right) - 2, 0)
    left = draw.shortened(f"quire top  {'  '.join(facts)}", room, look.marks)
    line = Text(left, "bold")
    line.pad_right(width - line.cell_len - len(right))
    return line.append(right, "bold yellow" if look.paused else "dim")


def _alarms(fleet: Sequence[Seen], look: Look, width: int) -> list[Text]:
    """Who does not answer, and what stalls."""
    found: list[tuple[str, str]] = []
    for one in fleet:
        where = f"{one.target}: " if len(fleet) > 1 else ""
        if one.problem:
            silent = draw.duration(one.silent_s * 1e6, look.marks)
            known = "; below is what it said last" if one.sample else ""
            found.append(
                (f"NO ANSWER for {silent}: {one.problem}; trying again{known}", "bold red")
            )
        elif one.sample is not None and one.sample.stall is not None:
            stall = one.sample.stall
            since = draw.duration(stall.stalled_us, look.marks)
            who = f"request {stall.request_id}: " if stall.request_id else ""
            found.append((f"{where}STALLED for {since}: {who}{stall.reason}", "bold red"))
        elif one.sample is not None and not one.sample.workers:
            found.append((f"{where}no worker is attached; requests wait for one", "yellow"))
    return [line for text, style in found for line in _wrapped(text, style, width, look.marks)]


def _wrapped(text: str, style: str, width: int, marks: Marks) -> list[Text]:
    """At most two lines, broken between words; of a longer text a mark says that it goes on."""
    rows: list[str] = []
    for word in text.split():
        if rows and Text(f"{rows[-1]} {word}").cell_len <= width:
            rows[-1] = f"{rows[-1]} {word}"
        else:
            rows.append(word)
    rows = [*rows[:1], " ".join(rows[1:])] if len(rows) > 1 else rows
    return [Text(draw.shortened(row, width, marks), style) for row in rows]


def _keys(look: Look, width: int) -> Text:
    keys = (
        ("q", "quit"),
        ("p", "go on" if look.paused else "pause"),
        ("tab", f"show {look.view.next.value}"),
        ("s", f"sort by {look.order.next.value}"),
    )
    line = Text()
    for key, what in keys:
        if line.cell_len + len(key) + len(what) + 3 <= width:
            line.append(f" {key} ", "reverse").append(f" {what}  ", "dim")
    return line


# Summary


def _summary(fleet: Sequence[Seen], look: Look, width: int) -> list[Text]:
    marks = look.marks
    samples = [one.sample for one in fleet if one.sample]
    running = sum(sample.running for sample in samples)
    waiting = sum(sample.waiting for sample in samples)
    queued = sum(sample.waiting_tokens for sample in samples)

    def per_s(*counters: str) -> str:
        live = [one for one in fleet if one.per_s and not one.problem]
        rates = [one.per_s[counter] for one in live for counter in counters]
        return draw.count(sum(rates) if rates else None, marks)

    shares = [one.hit_share for one in fleet if one.hit_share is not None and not one.problem]
    hits = draw.percent(sum(shares) / len(shares) if shares else None, marks)
    return [
        _facts(
            "requests",
            [
                f"{running} running",
                f"{waiting} waiting",
                f"{draw.count(queued, marks)} prompt tokens queued",
                f"{sum(sample.ended for sample in samples)} ended",
            ],
            width,
        ),
        _facts(
            "per second",
            [
                f"{per_s('accepted')} accepted",
                f"{per_s('ended')} ended",
                f"{per_s('refused', 'shed')} refused",
                f"{per_s('preemptions', 'displaced')} preempted",
                f"{per_s('requeues')} requeued",
                f"{per_s('recomputed_tokens')} recomputed",
                f"{per_s('deadline_exceeded')} too late",
            ],
            width,
        ),
        _curve_line(
            "prompt", f"{per_s('prompt_tokens'):>5} tok/s  {hits:>4} cached", fleet, look, width
        ),
        _curve_line("generation", f"{per_s('generation_tokens'):>5} tok/s", fleet, look, width),
        _latency_line("ttft", fleet, look, width),
        _latency_line("tpot", fleet, look, width),
    ]


def _facts(label: str, facts: Sequence[str], width: int) -> Text:
    """As many of them as fit, the first ones first."""
    line = Text.assemble((f"{label:<{_LABEL}}", "dim"))
    for fact in facts:
        if line.cell_len + 2 + len(fact) > width:
            break
        line.append(f"  {fact}")
    return line


def _curve_line(which: str, now: str, fleet: Sequence[Seen], look: Look, width: int) -> Text:
    """A label, the value now, and its course."""
    line = _before_curve(which, now, width)
    values = _summed([one.curves.get(which, ()) for one in fleet])
    return line.append(draw.curve(values, width - line.cell_len, look.marks), "cyan")


def _before_curve(which: str, now: str, width: int) -> Text:
    """The label, and what fits whole of the value now."""
    words = now.split(" ")
    while words and _LABEL + 2 + len(" ".join(words)) > width:
        words.pop()
    return Text.assemble((f"{which:<{_LABEL}}", "dim"), f"  {' '.join(words):<{_NOW}}  ")


def _summed(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The sum of curves that end at the same time."""
    longest = max(map(len, curves))
    padded = [(*[None] * (longest - len(curve)), *curve) for curve in curves]
    return [
        None if all(value is None for value in column) else sum(value or 0 for value in column)
        for column in zip(*padded, strict=True)
    ]


def _latency_line(which: str, fleet: Sequence[Seen], look: Look, width: int) -> Text:
    """Of the slowest scheduler: percentiles of several cannot be added up."""
    number = "requests" if which == "ttft" else "tpot_requests"
    known = [
        one
        for one in fleet
        if one.sample and one.sample.latencies and getattr(one.sample.latencies, number)
    ]
    if not known:
        none = look.marks.none
        return _before_curve(which, f"{none:>5} p50  {none:>5} p95", width)
    slowest = max(known, key=lambda one: _percentile(one, f"{which}_us_p95"))
    p50 = draw.duration(_percentile(slowest, f"{which}_us_p50"), look.marks)
    p95 = draw.duration(_percentile(slowest, f"{which}_us_p95"), look.marks)
    line = _before_curve(which, f"{p50:>5} p50  {p95:>5} p95", width)
    where = f"  at {slowest.target}" if len(fleet) > 1 else ""
    if width - line.cell_len - len(where) < _SHORTEST_CURVE:
        where = ""
    room = width - line.cell_len - len(where)
    line.append(draw.curve(slowest.curves[which], room, look.marks), "yellow")
    return line.append(where, "dim")


def _percentile(one: Seen, field: str) -> int:
    assert one.sample is not None
    return int(getattr(one.sample.latencies, field))


# Body


def _tables(fleet: Sequence[Seen], look: Look) -> list[Table]:
    marks, view = look.marks, look.view
    samples = [one.sample for one in fleet if one.sample]
    found = []
    if len(fleet) > 1:
        found.append(tables.schedulers(fleet, marks))
    workers = _workers(fleet, look.order)
    if workers and view is not View.REQUESTS:
        whole = view is View.WORKERS
        found.append(tables.workers(workers, marks, whole=whole, several=len(fleet) > 1))
    if samples and view is not View.WORKERS:
        found.append(tables.classes(_classes(samples), marks))
        tenants = _tenants(samples, look.order)
        if tenants:
            found.append(tables.tenants(tenants, marks))
    return found


def _workers(fleet: Sequence[Seen], order: Order) -> list[WorkerRow]:
    rows = [
        WorkerRow(one.target, worker, None if one.problem else one.workers.get(worker.worker_id))
        for one in fleet
        if one.sample
        for worker in one.sample.workers
    ]
    return _ordered(rows, order, lambda row: row.worker.worker_id, lambda row: row.worker.running)


def _classes(samples: Sequence[Sample]) -> list[PriorityClass]:
    """By name, in the order of the first scheduler; figures of several are those of the fullest."""
    named: dict[str, list[PriorityClass]] = {}
    for sample in samples:
        for one in sample.classes:
            named.setdefault(one.name, []).append(one)
    return [_class_of_several(several) for several in named.values()]


def _class_of_several(several: Sequence[PriorityClass]) -> PriorityClass:
    latencies = [one.latencies for one in several if one.latencies is not None]
    return PriorityClass(
        name=several[0].name,
        running=sum(one.running for one in several),
        waiting=sum(one.waiting for one in several),
        weight=several[0].weight,
        ttft_met=sum(one.ttft_met for one in several),
        ttft_missed=sum(one.ttft_missed for one in several),
        targets_met=sum(one.targets_met for one in several),
        targets_missed=sum(one.targets_missed for one in several),
        latencies=max(latencies, key=lambda one: one.ttft_us_p95, default=None),
    )


def _tenants(samples: Sequence[Sample], order: Order) -> list[Tenant]:
    named: dict[str, list[Tenant]] = {}
    for sample in samples:
        for one in sample.tenants:
            named.setdefault(one.name, []).append(one)
    rows = [
        Tenant(
            name=name,
            running=sum(one.running for one in several),
            waiting=sum(one.waiting for one in several),
            served_tokens=sum(one.served_tokens for one in several),
        )
        for name, several in named.items()
    ]
    return _ordered(rows, order, lambda row: row.name, lambda row: row.running + row.waiting)


def _ordered(
    rows: list[_Row], order: Order, name: Callable[[_Row], str], load: Callable[[_Row], int]
) -> list[_Row]:
    return sorted(rows, key=lambda row: (-load(row) if order is Order.LOAD else 0, name(row)))


def _body(found: Sequence[Table], look: Look, width: int, room: int | None) -> list[Text]:
    """The tables with a blank line before each; of those that do not fit, the first rows."""
    wanted = [table.rows + 1 for table in found]
    sizes = wanted if room is None else _shared(wanted, room - len(found))
    drawn: list[Text] = []
    for table, size in zip(found, sizes, strict=True):
        if size < 2:
            continue  # not even one row
        rows = table_lines(table.columns, table.rows, width)
        if size < len(rows):
            hidden = len(rows) - size + 1
            rows = [*rows[: size - 1], Text(f"and {hidden} more", "dim")]
        drawn += [Text(""), *rows]
    return drawn


def _shared(wanted: Sequence[int], room: int) -> list[int]:
    """Lines for each table: a few for all, then what is left from the first to the last."""
    sizes = []
    for size in wanted:
        few = max(min(size, _FEWEST_ROWS, room), 0)
        sizes.append(few)
        room -= few
    for place, size in enumerate(wanted):
        more = min(size - sizes[place], room)
        sizes[place] += max(more, 0)
        room -= max(more, 0)
    return sizes
