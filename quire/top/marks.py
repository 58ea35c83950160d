"""How numbers, curves and shares are drawn with letters, in Unicode or in ASCII alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The letters of one alphabet.

    Args:
        steps: of a curve, the lowest first.
        none: where there is no value.
        cut: where text was left out.
        full: of a bar.
        blank: of a bar.
        held: blocks that requests hold.
        cached: blocks with a cached prefix that nobody holds.
        pinned: blocks that pins keep.
        free: blocks that hold nothing.
    """

    steps: str
    none: str
    cut: str
    full: str
    blank: str
    held: str
    cached: str
    pinned: str
    free: str


UNICODE = Marks(
    steps="▁▂▃▄▅▆▇█",
    none="–",  # noqa: RUF001 - a dash, not a minus
    cut="…",
    full="█",
    blank="·",
    held="█",
    cached="▒",
    pinned="▞",
    free="·",
)

ASCII = Marks(
    steps="_.-:=+*#",
    none="-",
    cut="~",
    full="#",
    blank=".",
    held="#",
    cached="+",
    pinned="P",
    free=".",
)


def count(value: float | None, marks: Marks) -> str:
    """A number in at most four letters: 0.3, 12, 340, 1.2k, 56k, 7.8M."""
    if value is None:
        return marks.none
    if 0 < value < 0.05:
        return "<0.1"
    if value < 10 and round(value, 1) != int(round(value, 1)):
        return f"{value:.1f}"
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 9.95 and unit:
            return f"{value:.1f}{unit}"
        if round(value) < 1000:
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}E"


def duration(us: float | None, marks: Marks) -> str:
    """Microseconds in at most five letters: 640us, 1.5ms, 120ms, 3.2s, 45s, 12m05, 3h04, 2d03h.

    Only decades take more.
    """
    if us is None:
        return marks.none
    for limit, unit_us, unit in ((999.5, 1, "us"), (999_500, 1e3, "ms"), (59.5e6, 1e6, "s")):
        if us < limit:
            value = us / unit_us
            return f"{value:.1f}{unit}" if value < 9.95 and unit != "us" else f"{value:.0f}{unit}"
    minutes, seconds = divmod(round(us / 1e6), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h" if days < 10 else f"{days}d"
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}m{seconds:02d}"


def percent(share: float | None, marks: Marks) -> str:
    """A share of 0 to 1."""
    return marks.none if share is None else f"{share * 100:.0f}%"


def curve(values: Sequence[float | None], width: int, marks: Marks) -> str:
    """The latest values, one letter each, from zero to their highest; blanks before them."""
    shown = list(values)[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0)
    letters = [_letter(value, top, marks) for value in shown]
    return "".join(letters).rjust(max(width, 0))


def _letter(value: float | None, top: float, marks: Marks) -> str:
    if value is None:
        return " "
    if top <= 0:
        return marks.steps[0]
    return marks.steps[min(int(value / top * len(marks.steps)), len(marks.steps) - 1)]


def parts(amounts: Sequence[int], width: int) -> list[int]:
    """Cells of a bar for each amount, `width` in all; what is not zero has one at least.

    Where there are more amounts than cells, the first ones have theirs.
    """
    total = sum(amounts)
    if total <= 0 or width <= 0:
        return [0 for _ in amounts]
    exact = [amount / total * width for amount in amounts]
    cells = [max(math.floor(size), int(size > 0)) for size in exact]
    while sum(cells) > width:
        most = max(range(len(cells)), key=lambda i: (cells[i] > 1, cells[i] - exact[i], i))
        cells[most] -= 1
    while sum(cells) < width:
        least = max(range(len(cells)), key=lambda i: (amounts[i] > 0, exact[i] - cells[i]))
        cells[least] += 1
    return cells


def shortened(text: str, width: int, marks: Marks, *, keep_end: bool = False) -> str:
    """Text in at most `width` cells, with a mark where some was left out."""
    if cell_len(text) <= width:
        return text
    if width <= cell_len(marks.cut):
        return marks.cut[: max(width, 0)]
    room = width - cell_len(marks.cut)
    if not keep_end:
        return set_cell_size(text, room).rstrip() + marks.cut
    end = text
    while cell_len(end) > room:
        end = end[1:]
    return marks.cut + end
