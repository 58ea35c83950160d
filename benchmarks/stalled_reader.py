"""`quire bench stalled-reader`: what a caller that stops reading costs the others.

Starts a set, then runs the same streams in turn with all of them read and with one that reads its
first message and no more, and compares the gaps between messages of the others.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, prompts, quantile
from quire import codec
from quire.cli.command import CommandError
from quire.cli.running import with_local_set
from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, locate_model
from quire.params import SamplingParams
from quire.v1 import text_pb2_grpc

_READ, _STALLED = "all read", "one stalled"

# The transport reads 1 KiB ahead, so the server's writer stands still after a few messages.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between messages of the streams that were read, over all rounds.

    Attributes:
        case: whether one stream was stalled.
        messages: number of gaps.
        p50_ms: median.
        p99_ms: 99th percentile.
        rss_mib: resident memory of each process after the last round of this case.
    """

    case: str
    messages: int
    p50_ms: float
    p99_ms: float
    rss_mib: Mapping[str, float]


class StalledReader:
    """Compares streams without and with one that is not read."""

    name = "stalled-reader"
    help = "what a caller that stops reading costs the others"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--model", default=DEFAULT_MODEL, help="what to serve (default: %(default)s)"
        )
        for flag, default, what in (
            ("--streams", 64, "at a time, the stalled one included"),
            ("--rounds", 2, "of each case, in turn"),
            ("--input-len", 32, "tokens of each prompt"),
            ("--output-len", 160, "tokens of each answer"),
        ):
            parser.add_argument(
                flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
            )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    def run(self, args: argparse.Namespace) -> int:
        """Runs the rounds and prints both cases side by side."""
        for name, least in (("streams", 2), ("rounds", 1), ("input_len", 1), ("output_len", 2)):
            if getattr(args, name) < least:
                raise CommandError(f"--{name.replace('_', '-')} must be >= {least}")
        cases = asyncio.run(_measured(args))
        print_table(cases, Console())
        if args.json is not None:
            _write_json(args.json, cases, args)
        return 0


def ratios(cases: Sequence[Gaps]) -> dict[str, float]:
    """The stalled case by the other."""
    read, stalled = cases
    return {"p50": stalled.p50_ms / read.p50_ms, "p99": stalled.p99_ms / read.p99_ms}


def print_table(cases: Sequence[Gaps], console: Console) -> None:
    """Gaps and memory of both cases, and how they compare."""
    table = Table()
    names = sorted(cases[0].rss_mib)
    for heading in ("case", "gaps", "p50 ms", "p99 ms", *(f"{name} MiB" for name in names)):
        table.add_column(heading, justify="right")
    for case in cases:
        memory = [f"{case.rss_mib[name]:.0f}" for name in names]
        gaps = (str(case.messages), f"{case.p50_ms:.1f}", f"{case.p99_ms:.1f}")
        table.add_row(case.case, *gaps, *memory)
    console.print(table)
    shares = ratios(cases)
    console.print(f"with / without: p50 {shares['p50']:.2f}, p99 {shares['p99']:.2f}")


async def _measured(args: argparse.Namespace) -> tuple[Gaps, Gaps]:
    gaps: dict[str, list[float]] = {_READ: [], _STALLED: []}
    memory: dict[str, dict[str, float]] = {}

    async def rounds(running: LocalSet) -> None:
        async with AsyncClient(running.target, resume_tries=0) as client:
            source = await _prompts(client, args)
            await _round(client, source, min(8, args.output_len))  # warms up
            for _ in range(args.rounds):
                for case in (_READ, _STALLED):
                    first = _read_one(client, source[0], args.output_len)
                    if case is _STALLED:
                        first = _stalled(running.targets[0], source[0], args.output_len)
                    async with first:
                        gaps[case] += await _round(client, source[1:], args.output_len)
                        memory[case] = _rss_mib(running)

    model = locate_model(args.model)
    seats = ("--max-num-seqs", str(args.streams))
    config = LocalConfig(
        model=model.path, served_model_name=model.name, port=0, flags={"worker": seats}
    )
    if not await with_local_set(config, rounds, verbose=False):
        raise CommandError("interrupted")
    read, stalled = (_figures(case, gaps[case], memory[case]) for case in (_READ, _STALLED))
    return read, stalled


def _figures(case: str, gaps: Sequence[float], memory: Mapping[str, float]) -> Gaps:
    p50, p99 = (quantile(gaps, percent) * 1000 for percent in (50, 99))
    return Gaps(case=case, messages=len(gaps), p50_ms=p50, p99_ms=p99, rss_mib=memory)


async def _prompts(client: AsyncClient, args: argparse.Namespace) -> Prompts:
    info = await client.info()
    longest = info.max_model_len
    if longest is not None and args.input_len + args.output_len > longest:
        raise CommandError(f"--input-len and --output-len together must be <= {longest}")
    load = Load(
        concurrency=args.streams,
        requests=args.streams,
        warmup=0,
        input_len=args.input_len,
        output_len=args.output_len,
        ignore_eos=True,
        temperature=0.0,
        seed=0,
    )
    source = prompts(load, info.vocab_size, info.eos_token_ids)
    return [next(source) for _ in range(args.streams)]


async def _round(client: AsyncClient, source: Prompts, output_len: int) -> list[float]:
    """All streams at once; seconds between the messages of each."""
    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(_gaps(client, prompt, output_len)) for prompt in source]
    return [gap for stream in streams for gap in stream.result()]


async def _gaps(client: AsyncClient, prompt: Sequence[int], output_len: int) -> list[float]:
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    arrivals = [
        time.perf_counter() async for delta in client.generate(prompt, params) if delta.token_ids
    ]
    return [after - before for before, after in itertools.pairwise(arrivals)]


@contextlib.asynccontextmanager
async def _read_one(
    client: AsyncClient, prompt: Sequence[int], output_len: int
) -> AsyncIterator[None]:
    """The stream that is stalled in the other case, read to its end."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_gaps(client, prompt, output_len))
        yield


@contextlib.asynccontextmanager
async def _stalled(target: str, prompt: Sequence[int], output_len: int) -> AsyncIterator[None]:
    """A stream of which the first message is read; it is cut at the end."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    request = codec.generate_request(prompt, params, request_id="", seed=0)
    async with grpc.aio.insecure_channel(target, options=_SMALL_WINDOW) as channel:
        stub: Any = text_pb2_grpc.TextServiceStub(channel)
        call = stub.Generate(request)
        await call.read()
        yield
        call.cancel()


def _rss_mib(running: LocalSet) -> dict[str, float]:
    """Resident memory by process."""
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
        for name, pid in running.processes()
    }


def _write_json(path: Path, cases: Sequence[Gaps], args: argparse.Namespace) -> None:
    value = {
        "benchmark": "stalled-reader",
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "cases": [asdict(case) for case in cases],
        "ratios": ratios(cases),
    }
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


COMMAND = StalledReader()
