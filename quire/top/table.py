"""Tables that fit: the least important columns go first, and no number is ever cut in two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

_GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Args:
        title: above it.
        draw: the cell of a row, in at most so many cells of the terminal.
        least: cells it needs.
        most: cells it has use for; equal to `least` where it cannot be shortened.
        keep: the lowest goes first where there is no room.
        right: whether it is set to the right.
    """

    title: str
    draw: Callable[[int, int], Text]
    least: int
    most: int
    keep: int
    right: bool = False


def plain(title: str, cells: Sequence[str], *, keep: int, style: str = "") -> Column:
    """A column of numbers, set to the right, that is shown whole or not at all."""
    width = max(map(len, (title, *cells)))
    return Column(
        title=title,
        draw=lambda row, _: Text(cells[row], style),
        least=width,
        most=width,
        keep=keep,
        right=True,
    )


def lines(columns: Sequence[Column], rows: int, width: int) -> list[Text]:
    """The title line and a line for each row, at most `width` cells each."""
    kept = list(columns)
    while len(kept) > 1 and _least(kept) > width:
        kept.remove(min(kept, key=lambda column: column.keep))
    widths = _widths(kept, width)
    titles = [
        _set(Text(column.title[:size]), size, right=column.right)
        for column, size in zip(kept, widths, strict=True)
    ]
    drawn = [_joined(titles, "dim")]
    for row in range(rows):
        cells = [
            _set(column.draw(row, size), size, right=column.right)
            for column, size in zip(kept, widths, strict=True)
        ]
        drawn.append(_joined(cells))
    return drawn


def _least(columns: Sequence[Column]) -> int:
    return sum(column.least for column in columns) + _GAP * (len(columns) - 1)


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """What each column gets; what is left over goes to the first ones that have use for it."""
    spare = max(width - _least(columns), 0)
    widths = []
    for column in columns:
        more = min(spare, column.most - column.least)
        spare -= more
        widths.append(min(column.least + more, width))
    return widths


def _set(cell: Text, width: int, *, right: bool) -> Text:
    cell.truncate(width)
    missing = width - cell.cell_len
    if right:
        cell.pad_left(missing)
    else:
        cell.pad_right(missing)
    return cell


def _joined(cells: Sequence[Text], style: str = "") -> Text:
    line = Text(" " * _GAP).join(cells)
    line.rstrip()
    if style:
        line.stylize(style)
    return line
