"""Draws the Grafana dashboard from a Prometheus, without Grafana: for docs, and for a quick look.

    python -m benchmarks.dashboard --prometheus http://127.0.0.1:9090 --out docs/dashboard.png

Reads the same JSON that Grafana is provisioned with, asks the same questions, and draws each panel
where it stands in the grid. How it looks is matplotlib's; what it says is the dashboard's.
"""

import argparse
import io
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator
from PIL import Image

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "quire.json"

_COLUMNS = 24
_CELL_IN = (0.5, 0.23)
"""Width and height of a cell of the grid, inches."""
_GAP = 0.012
_BACKGROUND, _PANEL, _TEXT, _GRID = "#0b0c0f", "#1b1e24", "#ccccdc", "#31363c"
_COLORS = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#e02f44", "#8ab8ff", "#37872d"),
    *("#fade2a", "#a352cc"),
)
_NAMED = {"green": "#73bf69", "orange": "#ff780a", "red": "#f2495c"}
_STEPS = 240
_LONGEST_NAME = 20

Series = tuple[str, list[float], list[float]]
"""Legend, instants in seconds since 1970, values; NaN where there is none."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question of a panel, variables replaced by everything that they may be."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: where it stands in a grid of 24 columns, and what it asks."""

    kind: str
    title: str
    place: tuple[int, int, int, int]
    """x, y, width, height."""
    unit: str
    most: float | None
    thresholds: tuple[tuple[float, str], ...]
    queries: tuple[Query, ...]
    is_stacked: bool


def resolved(expression: str, interval: str) -> str:
    """An expression as Grafana asks it with "All" chosen in every variable.

    Args:
        expression: of a panel.
        interval: the span of rates, e.g. "30s".
    """
    expression = expression.replace("$__rate_interval", interval)
    return expression.replace("$instance", ".*").replace("$model", ".*")


def panels(board: Mapping[str, Any], interval: str) -> Iterator[Panel]:
    """The panels of a dashboard.

    Args:
        board: its JSON.
        interval: the span of rates.
    """
    for raw in board["panels"]:
        grid = raw["gridPos"]
        defaults = raw.get("fieldConfig", {}).get("defaults", {})
        stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
        steps = defaults.get("thresholds", {}).get("steps", ())
        yield Panel(
            kind=raw["type"],
            title=raw["title"],
            place=(grid["x"], grid["y"], grid["w"], grid["h"]),
            unit=defaults.get("unit", "none"),
            most=defaults.get("max"),
            thresholds=tuple(
                (-math.inf if step["value"] is None else step["value"], step["color"])
                for step in steps
            ),
            queries=tuple(
                Query(resolved(one["expr"], interval), one["legendFormat"])
                for one in raw.get("targets", ())
            ),
            is_stacked=stacking == "normal",
        )


class Prometheus:
    """Asks a server's HTTP API.

    Args:
        url: of the server.
        begin: of the time drawn, seconds since 1970.
        end: of the time drawn.
    """

    def __init__(self, url: str, begin: float, end: float) -> None:
        self._url = url.rstrip("/")
        self.begin = begin
        self.end = end

    def series(self, query: Query) -> list[Series]:
        """The course of each series of a query."""
        parameters = urllib.parse.urlencode(
            {
                "query": query.expression,
                "start": self.begin,
                "end": self.end,
                "step": max(1.0, (self.end - self.begin) / _STEPS),
            }
        )
        url = f"{self._url}/api/v1/query_range?{parameters}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)["data"]["result"]
        return [_series(one, query.legend) for one in found]


def _series(found: Mapping[str, Any], legend: str) -> Series:
    name = legend
    for label, value in found["metric"].items():
        name = name.replace("{{" + label + "}}", value[-_LONGEST_NAME:])
    values = [float(text) for _, text in found["values"]]
    return name, [at for at, _ in found["values"]], values


def _numbers(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def shown(value: float, unit: str) -> str:
    """A value with its unit, as short as it can be read."""
    if unit == "s":
        if value and abs(value) < 1:
            return f"{value * 1000:.3g} ms"
        return f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    suffix = {"reqps": " req/s"}.get(unit, "")
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g} k{suffix}"
    return f"{value:.3g}{suffix}"


def draw(board: Mapping[str, Any], server: Prometheus, interval: str, note: str) -> Figure:
    """The whole dashboard.

    Args:
        board: its JSON.
        server: whom to ask.
        interval: the span of rates.
        note: at the top.
    """
    mpl.rcParams.update({"font.size": 7, "text.color": _TEXT, "axes.labelcolor": _TEXT})
    every = list(panels(board, interval))
    rows = max(y + height for _, y, _, height in (panel.place for panel in every)) + 2
    figure = Figure(figsize=(_COLUMNS * _CELL_IN[0], rows * _CELL_IN[1]), facecolor=_BACKGROUND)
    top = 1 - 1 / rows
    figure.text(0.008, top, board["title"], fontsize=13, va="center", weight="bold")
    figure.text(0.07, top, note, fontsize=7, va="center", alpha=0.8)
    for panel in every:
        x, y, width, height = panel.place
        left, bottom = x / _COLUMNS, 1 - (y + 2 + height) / rows
        if panel.kind == "row":
            at = bottom + height / rows / 2
            figure.text(left + 0.008, at, panel.title, fontsize=9, va="center", weight="bold")
            continue
        pad = _GAP / 4
        frame = figure.add_axes(
            (left + pad, bottom + 0.08 / rows, width / _COLUMNS - 2 * pad, (height - 0.16) / rows)
        )
        frame.set(facecolor=_PANEL, xticks=[], yticks=[])
        frame.spines[:].set_visible(False)
        frame.text(0.012, 1 - 0.5 / height, panel.title, fontsize=7.5, va="center", weight="bold")
        found = [one for query in panel.queries for one in server.series(query)]
        # Fixed sizes around the plot: names at the left, times and legend below.
        legend_rows = 0 if panel.kind == "stat" else 1.1
        area = (
            left + 1.05 / _COLUMNS,
            bottom + (0.75 + legend_rows) / rows,
            (width - 1.35) / _COLUMNS,
            (height - 1.75 - legend_rows) / rows,
        )
        if panel.kind == "stat":
            area = (left + pad, bottom + 0.1 / rows, width / _COLUMNS - 2 * pad, 1.3 / rows)
            _draw_stat(frame, figure.add_axes(area), panel, found)
        else:
            _draw_graph(figure.add_axes(area), panel, found)
            figure.axes[-1].set_xlim(server.begin, server.end)
    return figure


def _draw_stat(frame: Axes, small: Axes, panel: Panel, found: Sequence[Series]) -> None:
    """The last value, and its course below."""
    small.axis("off")
    _, instants, values = found[0] if found else ("", [], [])
    text, color = "no data", _TEXT
    if numbers := _numbers(values):
        text = shown(numbers[-1], panel.unit)
        color = next(name for least, name in reversed(panel.thresholds) if numbers[-1] >= least)
        small.fill_between(instants, values, color=_NAMED[color], alpha=0.3, linewidth=0)
        small.set_ylim(bottom=0)
    frame.text(
        *(0.5, 0.55, text),
        fontsize=17,
        ha="center",
        va="center",
        color=_NAMED.get(color, color),
        weight="bold",
    )


def _draw_graph(axes: Axes, panel: Panel, found: Sequence[Series]) -> None:
    axes.set_facecolor(_PANEL)
    axes.spines[:].set_visible(False)
    axes.grid(color=_GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT, length=0, labelsize=5.5, pad=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_time_of_day))
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    axes.locator_params(axis="y", nbins=4)
    drawn = [one for one in found if _numbers(one[2])]
    if not drawn:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
        return
    if panel.is_stacked:
        _stack(axes, [one for one in drawn if any(_numbers(one[2]))] or drawn[:1])
    else:
        for number, (name, instants, values) in enumerate(drawn):
            color = _COLORS[number % len(_COLORS)]
            axes.plot(instants, values, color=color, linewidth=1.1, label=name)
            axes.fill_between(instants, values, color=color, alpha=0.08, linewidth=0)
    nothing = not any(any(_numbers(values)) for _, _, values in drawn)
    most = 1.0 if nothing else panel.most or axes.get_ylim()[1]
    axes.set_ylim(0, most)
    for least, color in panel.thresholds:
        if 0 < least < axes.get_ylim()[1]:
            axes.axhline(least, color=_NAMED[color], linewidth=0.8, linestyle="--", alpha=0.8)
    longest = max(len(name) for name, _, _ in drawn)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.04, -0.13),
        ncols=max(1, min(len(drawn), panel.place[2] * 11 // (longest + 4))),
        frameon=False,
        fontsize=5.5,
        handlelength=1,
        columnspacing=1,
        borderaxespad=0,
    )


def _time_of_day(instant: float, _: object) -> str:
    return time.strftime("%H:%M", time.gmtime(instant))


def _stack(axes: Axes, drawn: Sequence[Series]) -> None:
    """Areas on top of each other; where a series has no value it counts as nothing."""
    instants = sorted({at for _, known, _ in drawn for at in known})
    courses = [
        {at: value for at, value in zip(known, values, strict=True) if math.isfinite(value)}
        for _, known, values in drawn
    ]
    axes.stackplot(
        instants,
        [[course.get(at, 0.0) for at in instants] for course in courses],
        labels=[name for name, _, _ in drawn],
        colors=_COLORS,
        alpha=0.75,
        linewidth=0,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draws it; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, metavar="JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--minutes", type=float, default=5, help="how much of the past")
    parser.add_argument("--rate-interval", default="20s", help="span of rates")
    parser.add_argument("--dpi", type=int, default=110)
    asked = parser.parse_args(argv)
    board = json.loads(asked.dashboard.read_text(encoding="utf-8"))
    end = time.time()
    server = Prometheus(asked.prometheus, end - 60 * asked.minutes, end)
    note = (
        f"the last {asked.minutes:g} minutes in Prometheus, UTC; the panels of "
        "deploy/grafana/dashboards/quire.json, drawn without Grafana"
    )
    figure = draw(board, server, asked.rate_interval, note)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=asked.dpi, facecolor=_BACKGROUND)
    # Few colors are in it; a palette makes a third of the size.
    Image.open(drawn).convert("RGB").quantize(256).save(asked.out, optimize=True)
    print(f"{asked.out}: {asked.out.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
