"""The plot of the mixes. Imported only where a plot is wanted: matplotlib takes its time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from services.scheduler.simulate.policies import V0
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.scenarios import Result
from services.scheduler.simulate.step_model import InputError

_COLOURS = {V0: "#b0413e"}
_OURS = "#1f5fa8"

_Figure = Callable[[Report], float | None]

_ROWS: tuple[tuple[str, str, tuple[tuple[str, str, _Figure], ...]], ...] = (
    ("output tokens / s", "log", (("", "-", lambda r: r.output_tokens_per_s),)),
    (
        "TTFT, s",
        "log",
        (
            ("p50", "-", lambda r: _seconds(r.ttft_ms.p50)),
            ("p99", ":", lambda r: _seconds(r.ttft_ms.p99)),
        ),
    ),
    (
        "TPOT, ms",
        "log",
        (
            ("p50", "-", lambda r: r.tpot_ms.p50),
            ("p99", ":", lambda r: r.tpot_ms.p99),
        ),
    ),
    (
        "KV cache, % of pool",
        "linear",
        (
            ("held", "-", lambda r: 100 * r.kv_held),
            ("filled", ":", lambda r: 100 * r.kv_filled),
        ),
    ),
)


def plot_mixes(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes a PNG: a column for each mix, a row for each figure, lines over concurrency.

    Raises:
        InputError: the file cannot be written.
    """
    mixes = list(dict.fromkeys((r.cell.prompt_tokens, r.cell.output_tokens) for r in results))
    figure = Figure(figsize=(4 * len(mixes), 11), layout="constrained")
    axes = figure.subplots(len(_ROWS), len(mixes), sharex=True, sharey="row", squeeze=False)
    for column, mix in enumerate(mixes):
        of_mix = [r for r in results if (r.cell.prompt_tokens, r.cell.output_tokens) == mix]
        for row, (label, scale, lines) in enumerate(_ROWS):
            ax: Axes = axes[row][column]
            _draw(ax, of_mix, lines)
            ax.set_yscale(scale)
            ax.grid(visible=True, alpha=0.3)
            if not column:
                ax.set_ylabel(label)
        axes[0][column].set_title(f"{mix[0]} in / {mix[1]} out")
        axes[-1][column].set_xlabel("concurrency")
    for row in range(len(_ROWS)):
        axes[row][0].legend(fontsize="small")
    figure.suptitle(title)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"--plot {path}: {error.strerror}") from error


def _draw(ax: Axes, results: Sequence[Result], lines: Sequence[tuple[str, str, _Figure]]) -> None:
    for policy in dict.fromkeys(result.cell.policy for result in results):
        own = [result for result in results if result.cell.policy == policy]
        levels = [result.cell.concurrency for result in own]
        for name, style, figure in lines:
            ax.plot(
                levels,
                [figure(result.report) or float("nan") for result in own],
                style,
                marker="o",
                markersize=3,
                color=_COLOURS.get(policy, _OURS),
                label=f"{policy} {name}".strip(),
            )
    ax.set_xscale("log", base=2)
    ax.set_xticks(levels, [str(level) for level in levels])


def _seconds(millis: float | None) -> float | None:
    return None if millis is None else millis / 1000
