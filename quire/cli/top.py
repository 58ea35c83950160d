"""`quire top`: watches schedulers at work, live in a terminal; one frame or sample for scripts."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from quire.cli.admin_call import DEFAULT_TARGET
from quire.cli.command import UsageError
from quire.endpoints import split_target
from quire.errors import InvalidRequest, QuireError
from quire.top.frame import Look, frame
from quire.top.history import MOST_SAMPLES
from quire.top.marks import ASCII, UNICODE
from quire.top.screen import show
from quire.top.source import Watch, sources

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0


class Top:
    """Watches schedulers at work."""

    name = "top"
    help = "watch schedulers at work: requests, workers, latencies"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--target",
            default=DEFAULT_TARGET,
            metavar="TARGET,...",
            help="HOST:PORT or unix:///PATH of a scheduler, or of its --info-listen or "
            "--admin-listen; several are shown as one fleet (default: %(default)s)",
        )
        parser.add_argument(
            "--interval",
            type=_interval,
            default=1.0,
            metavar="SECONDS",
            help="from one sample to the next (default: %(default)s)",
        )
        how = parser.add_mutually_exclusive_group()
        how.add_argument(
            "--once",
            action="store_true",
            help="print one frame as plain text; so it is where there is no terminal",
        )
        how.add_argument("--json", action="store_true", help="print one sample as JSON")
        parser.add_argument(
            "--samples",
            type=_samples,
            default=2,
            metavar="N",
            help="that the frame of --once is of; rates need two, curves more (default: "
            "%(default)s)",
        )
        parser.add_argument("--ascii", action="store_true", help="draw with ASCII letters alone")

    def run(self, args: argparse.Namespace) -> int:
        """Returns 0; 1 where nothing is to be watched continuously and nobody answers."""
        targets = _targets(args.target)
        if args.json:
            return asyncio.run(_print_json(targets))
        marks = ASCII if args.ascii or not _draws_unicode(os.environ) else UNICODE
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if args.once or not on_terminal:
            look = Look(interval_s=args.interval, marks=marks, keys=False)
            return asyncio.run(_print_frame(targets, look, args.samples))
        look = Look(interval_s=args.interval, marks=marks)
        return asyncio.run(_show(targets, look))


def _targets(text: str) -> tuple[str, ...]:
    try:
        return split_target(text)
    except InvalidRequest as error:
        raise UsageError(f"quire top: --target: {error.message}") from error


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"must be from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds, got {text!r}"
        )
    return seconds


def _samples(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_SAMPLES):
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST_SAMPLES}, got {text!r}")
    return int(text)


def _draws_unicode(environment: Mapping[str, str]) -> bool:
    """Whether what is written can show more than ASCII; the Linux console lacks the letters."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return encoding == "utf8" and environment.get("TERM") != "linux"


async def _show(targets: tuple[str, ...], look: Look) -> int:
    async with sources(targets) as fleet:
        return await show(Watch(fleet), look, Console(highlight=False))


async def _print_frame(targets: tuple[str, ...], look: Look, samples: int) -> int:
    async with sources(targets) as fleet:
        watch = Watch(fleet)
        await watch.once()
        _raise_if_all_failed(watch, targets)
        for _ in range(samples - 1):
            await asyncio.sleep(look.interval_s)
            await watch.once()
    console = Console(highlight=False, color_system=None, force_terminal=False)
    console.print(frame(watch.seen(), look, console.width, None))
    return 0


async def _print_json(targets: tuple[str, ...]) -> int:
    async with sources(targets) as fleet:
        watch = Watch(fleet)
        await watch.once()
        _raise_if_all_failed(watch, targets)
    told: list[dict[str, Any]] = [
        {
            "target": one.target,
            "problem": one.problem or None,
            "sample": None if one.sample is None else asdict(one.sample),
        }
        for one in watch.seen()
    ]
    print(json.dumps({"schedulers": told}))
    return 0


def _raise_if_all_failed(watch: Watch, targets: tuple[str, ...]) -> None:
    problems: list[QuireError] = list(watch.problems.values())
    if len(problems) == len(targets):
        raise problems[0]


COMMAND = Top()
