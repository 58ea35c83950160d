"""`quire bench serve`: throughput and latencies of a server at several levels of concurrency."""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import quire
from benchmarks.load import Figures, Load, Spread, prompts, run_load
from quire.answers import ServerInfo
from quire.cli.command import EXIT_FAILED, CommandError
from quire.cli.running import with_local_set
from quire.cli.sampling import add_identity_flags
from quire.client import DEFAULT_TARGET, AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, locate_model
from quire.params import Scheduling


class Serve:
    """Puts a closed-loop load on a server."""

    name = "serve"
    help = "put a closed-loop load on a server and report throughput and latencies"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        where = parser.add_mutually_exclusive_group()
        where.add_argument(
            "--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="(default: %(default)s)"
        )
        where.add_argument(
            "--local", action="store_true", help="start a set for it on a free port, and end it"
        )
        parser.add_argument(
            "--model", default=DEFAULT_MODEL, help="what --local serves (default: %(default)s)"
        )
        parser.add_argument(
            "--concurrency",
            type=_levels,
            default=(1, 8, 32),
            metavar="N,N",
            help="streams at a time, one run each (default: 1,8,32)",
        )
        amount = parser.add_mutually_exclusive_group()
        amount.add_argument(
            "--num-prompts", type=_positive, metavar="N", help="requests of each run"
        )
        amount.add_argument(
            "--requests-per-stream",
            type=_positive,
            default=4,
            metavar="N",
            help="requests of each run, per stream (default: %(default)s)",
        )
        parser.add_argument(
            "--warmup",
            type=_whole,
            metavar="N",
            help="requests before each run (default: N streams)",
        )
        parser.add_argument("--input-len", type=_positive, default=128, metavar="TOKENS")
        parser.add_argument("--output-len", type=_positive, default=128, metavar="TOKENS")
        parser.add_argument(
            "--ignore-eos",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="whether every answer has --output-len tokens (default: yes)",
        )
        parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
        add_identity_flags(parser)
        parser.add_argument("--seed", type=_whole, default=0, metavar="N", help="of the prompts")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    def run(self, args: argparse.Namespace) -> int:
        """Runs the levels one after another; returns 1 if any request failed."""
        levels: list[Figures] = []
        info = asyncio.run(_measure_local(args, levels) if args.local else _measure(args, levels))
        print_table(levels, info, Console())
        if args.json is not None:
            _write_json(args.json, report(levels, info, _settings(args)))
        return EXIT_FAILED if any(level.failed for level in levels) else 0


def report(levels: Sequence[Figures], info: ServerInfo, settings: dict[str, Any]) -> dict[str, Any]:
    """All figures with what they were measured on, for JSON."""
    return {
        "benchmark": "serve",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "quire": quire.__version__,
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "server": asdict(info),
        "settings": settings,
        "levels": [level.as_dict() for level in levels],
    }


def print_table(levels: Sequence[Figures], info: ServerInfo, console: Console) -> None:
    """Throughput per level, latencies per level, and the reasons of failed requests."""
    first = levels[0].load
    title = f"{info.model}, {first.input_len} tokens in, {first.output_len} out"
    throughput = _table("streams", "requests", "failed", "seconds", "output tok/s", "total tok/s")
    latency = _table("streams", "ms", "mean", "p50", "p90", "p99")
    for level in levels:
        streams = str(level.load.concurrency)
        throughput.add_row(
            streams,
            str(level.completed + level.failed),
            str(level.failed),
            f"{level.duration_s:.1f}",
            f"{level.output_tokens_per_s:.1f}",
            f"{level.total_tokens_per_s:.1f}",
        )
        spreads = (("TTFT", level.ttft_ms), ("TPOT", level.tpot_ms), ("ITL", level.itl_ms))
        for name, spread in spreads:
            latency.add_row(streams, name, *_cells(spread))
        latency.add_section()
    console.print(title, throughput, latency, sep="\n")
    for reason in dict.fromkeys(reason for level in levels for reason in level.errors):
        console.print(f"failed: {reason}", markup=False, highlight=False)


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


async def _measure(args: argparse.Namespace, levels: list[Figures]) -> ServerInfo:
    """Fills `levels`; a request that fails is a figure too, so nothing is resumed."""
    async with AsyncClient(args.target, resume_tries=0) as client:
        info = await client.info()
        longest = info.max_model_len
        if longest is not None and args.input_len + args.output_len > longest:
            raise CommandError(
                f"--input-len {args.input_len} and --output-len {args.output_len} are more than "
                f"the {longest} tokens that {info.model} can hold"
            )
        for concurrency in args.concurrency:
            load = _load(args, concurrency)
            print(f"{concurrency} streams, {load.requests} requests …", file=sys.stderr, flush=True)
            source = prompts(load, info.vocab_size, info.eos_token_ids)
            levels.append(await run_load(client, load, source))
        return info


async def _measure_local(args: argparse.Namespace, levels: list[Figures]) -> ServerInfo:
    model = locate_model(args.model)
    infos: list[ServerInfo] = []

    async def measure(running: LocalSet) -> None:
        args.target = running.target
        infos.append(await _measure(args, levels))

    config = LocalConfig(model=model.path, served_model_name=model.name, port=0)
    if not await with_local_set(config, measure, verbose=False):
        raise CommandError("interrupted")
    return infos[0]


def _load(args: argparse.Namespace, concurrency: int) -> Load:
    return Load(
        concurrency=concurrency,
        requests=args.num_prompts or args.requests_per_stream * concurrency,
        warmup=concurrency if args.warmup is None else args.warmup,
        input_len=args.input_len,
        output_len=args.output_len,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
        scheduling=Scheduling(priority_class=args.priority_class, tenant=args.tenant),
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "json"}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return ["-" if value is None else f"{value:.1f}" for value in values]


def _levels(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


COMMAND = Serve()
