"""`quire bench telemetry`: what metrics and traces cost.

Starts two sets, one with metrics, their push and traces, the other without, and puts the same load
on one after the other, many times in alternating order, so that a machine that changes its speed
does so for both. Reported: the ratio of the throughputs of each pair, and the processor time of
tokenizer and scheduler per output token, which is where telemetry costs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, prompts, quantile, run_load
from quire.cli.command import CommandError
from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, locate_model

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_WATCHED = ("scheduler", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load on one of the sets.

    Attributes:
        telemetry: on or off.
        tokens_per_s: output.
        itl_p50_ms: median time between messages.
        front_us: processor time of tokenizer and scheduler per output token, microseconds.
    """

    telemetry: bool
    tokens_per_s: float
    itl_p50_ms: float
    front_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of the pairs of runs.

    Attributes:
        pairs: how many.
        throughput: on / off, median, and first and third quartile.
        itl: the same of the median times between messages.
        front_us: processor time per output token of tokenizer and scheduler, off and on, medians.
        spans: received in all.
        pushes: of metrics received in all.
    """

    pairs: int
    throughput: tuple[float, float, float]
    itl: tuple[float, float, float]
    front_us: tuple[float, float]
    spans: int
    pushes: int


class TelemetryCost:
    """Compares a set with telemetry and one without."""

    name = "telemetry"
    help = "what metrics and traces cost"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--model", default=DEFAULT_MODEL, help="what to serve (default: %(default)s)"
        )
        parser.add_argument(
            "--sample-ratio", type=float, default=0.1, metavar="X", help="(default: %(default)s)"
        )
        for flag, default, what in (
            ("--pairs", 10, "runs on each set"),
            ("--concurrency", 8, "streams at a time"),
            ("--requests", 24, "of each run"),
            ("--input-len", 32, "tokens of each prompt"),
            ("--output-len", 32, "tokens of each answer"),
        ):
            parser.add_argument(
                flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
            )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    def run(self, args: argparse.Namespace) -> int:
        """Measures and prints."""
        runs, received = asyncio.run(_measure(args))
        found = compare(runs, *received)
        _print(found, args.sample_ratio, Console())
        if args.json is not None:
            report = {
                "benchmark": "telemetry",
                "comparison": asdict(found),
                "runs": [asdict(run) for run in runs],
            }
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return 0


def compare(runs: Sequence[Run], spans: int, pushes: int) -> Comparison:
    """The figures of runs that come in pairs, in any order within a pair."""
    pairs = [
        sorted(runs[at : at + 2], key=lambda run: run.telemetry) for at in range(0, len(runs), 2)
    ]
    throughput = [on.tokens_per_s / off.tokens_per_s for off, on in pairs]
    itl = [on.itl_p50_ms / off.itl_p50_ms for off, on in pairs]
    off_us = statistics.median(off.front_us for off, _ in pairs)
    on_us = statistics.median(on.front_us for _, on in pairs)
    return Comparison(
        pairs=len(pairs),
        throughput=_quartiles(throughput),
        itl=_quartiles(itl),
        front_us=(off_us, on_us),
        spans=spans,
        pushes=pushes,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    return quantile(values, 50), quantile(values, 25), quantile(values, 75)


def _print(found: Comparison, ratio: float, console: Console) -> None:
    table = Table("", "off", "on", "on / off (quartiles)", title=f"{ratio:.0%} of the traces kept")
    table.add_row("output tok/s", "", "", _ratio(found.throughput))
    table.add_row("ITL p50", "", "", _ratio(found.itl))
    off, on = found.front_us
    table.add_row(
        "tokenizer + scheduler, µs of processor a token",
        f"{off:.0f}",
        f"{on:.0f}",
        f"{on / off:.3f}",
    )
    console.print(table)
    console.print(f"{found.pairs} pairs; {found.spans} spans, {found.pushes} pushes of metrics")


def _ratio(values: tuple[float, float, float]) -> str:
    median, low, high = values
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


async def _measure(args: argparse.Namespace) -> tuple[list[Run], tuple[int, int]]:
    load = Load(
        concurrency=args.concurrency,
        requests=args.requests,
        warmup=args.concurrency,
        input_len=args.input_len,
        output_len=args.output_len,
        ignore_eos=True,
        temperature=0.0,
        seed=0,
    )
    runs: list[Run] = []
    async with _sink() as sink:
        flags = (
            "--enable-metrics",
            "--metrics-port=0",
            f"--otlp-metrics-endpoint={sink.url}",
            f"--otlp-traces-endpoint={sink.url}",
            f"--trace-sample-ratio={args.sample_ratio}",
        )
        async with _set(args.model, ()) as off, _set(args.model, flags) as on:
            for number in range(args.pairs):
                order = ((off, False), (on, True)) if number % 2 else ((on, True), (off, False))
                for running, telemetry in order:
                    runs.append(await _run(running, load, number, telemetry=telemetry))
                print(f"pair {number + 1} of {args.pairs}", file=sys.stderr, flush=True)
        return runs, await sink.received()


@contextlib.asynccontextmanager
async def _set(model: str, flags: Sequence[str]) -> AsyncIterator[LocalSet]:
    located = locate_model(model)
    config = LocalConfig(
        model=located.path,
        served_model_name=located.name,
        port=0,
        flags=dict.fromkeys(("scheduler", "worker", "tokenizer"), flags),
    )
    async with LocalSet(config) as running:
        yield running


async def _run(running: LocalSet, load: Load, number: int, *, telemetry: bool) -> Run:
    async with AsyncClient(running.target, resume_tries=0) as client:
        info = await client.info()
        source = prompts(load, info.vocab_size, info.eos_token_ids)
        for _ in range(number * (load.requests + load.warmup)):
            next(source)  # other prompts in each pair: nothing is found in the prefix cache
        before = _front_s(running)
        figures = await run_load(client, load, source)
        spent = _front_s(running) - before
    if figures.failed or figures.itl_ms.p50 is None:
        raise CommandError(f"requests failed: {', '.join(figures.errors)}")
    # The warm-up's tokens are in the time as well, in both sets.
    tokens = figures.output_tokens + load.warmup * min(load.output_len, 8)
    return Run(
        telemetry=telemetry,
        tokens_per_s=figures.output_tokens_per_s,
        itl_p50_ms=figures.itl_ms.p50,
        front_us=spent / tokens * 1e6,
    )


def _front_s(running: LocalSet) -> float:
    """Processor time of the set's tokenizers and scheduler so far, seconds."""
    spent = 0.0
    for name, pid in running.processes():
        if name.startswith(_WATCHED):
            fields = (
                Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            )
            spent += (int(fields[11]) + int(fields[12])) * _TICK_S
    return spent


@dataclass(frozen=True, slots=True)
class _Sink:
    process: asyncio.subprocess.Process
    url: str

    async def received(self) -> tuple[int, int]:
        """Spans and pushes; ends it."""
        out, _ = await self.process.communicate(b"\n")
        spans, pushes = out.split()
        return int(spans), int(pushes)


@contextlib.asynccontextmanager
async def _sink() -> AsyncIterator[_Sink]:
    pipe: Any = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.otlp_sink", stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        yield _Sink(process, (await process.stdout.readline()).decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


COMMAND = TelemetryCost()
