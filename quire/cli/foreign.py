"""Commands that other packages register as entry points of the group `quire.commands`.

An entry point names an object with `name` and `help`, in a module that is cheap to import: it is
imported to show the list of commands. A `Group` or an `Entry` brings in the rest when it is called.
"""

import importlib.metadata
from collections.abc import Collection

from quire.cli.command import Entry

_GROUP = "quire.commands"


def foreign_commands(known: Collection[str]) -> list[Entry]:
    """The registered commands, by name, without those in `known`."""
    points = importlib.metadata.entry_points(group=_GROUP)
    return [_entry(point) for point in sorted(points) if point.name not in known]


def _entry(point: importlib.metadata.EntryPoint) -> Entry:
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return Entry(name=point.name, help="", target=point.value, extra="all", needs=(missing,))
    if isinstance(command, Entry):
        return command
    return Entry(name=point.name, help=command.help, target=point.value)
