"""`quire bench long-prompts`: what long prompts cost streams that run.

Starts a set. A number of streams decode; the time between their tokens is measured first without
anything else, then while long prompts arrive, with and without a target for the time between
tokens. The promise is that the p99 stays within the target, and that the prompts get through.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, prompts, quantile
from benchmarks.scheduler_probe import SchedulerProbe, probed
from quire.cli.command import CommandError
from quire.cli.running import with_local_set
from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.models import DEFAULT_MODEL, locate_model
from quire.params import SamplingParams
from quire.v1 import admin_pb2

_LONGEST_ANSWER = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How the running streams fared.

    Attributes:
        case: what arrived beside them, and the target.
        target_ms: time between tokens that was asked for; None: none.
        gaps: times between tokens measured.
        p50_ms: their median.
        p99_ms: their 99th percentile.
        max_ms: the longest.
        prompts: long prompts that got their first token meanwhile.
        prompt_ttft_p50_ms: their median time to it; None without prompts.
        output_tokens_per_s: of the streams.
    """

    case: str
    target_ms: int | None
    gaps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    prompts: int
    prompt_ttft_p50_ms: float | None
    output_tokens_per_s: float


class LongPrompts:
    """Compares running streams without and with long prompts beside them."""

    name = "long-prompts"
    help = "what long prompts cost streams that run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--model", default=DEFAULT_MODEL, help="what to serve (default: %(default)s)"
        )
        for flag, default, what in (
            ("--streams", 4, "that decode"),
            ("--prompt-len", 2000, "tokens of each long prompt"),
            ("--tpot-target", 400, "milliseconds between tokens"),
            ("--seconds", 60, "that each case is measured"),
        ):
            parser.add_argument(
                flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
            )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    def run(self, args: argparse.Namespace) -> int:
        """Runs the cases and prints them."""
        for name in ("streams", "prompt_len", "tpot_target", "seconds"):
            if getattr(args, name) < 1:
                raise CommandError(f"--{name.replace('_', '-')} must be >= 1")
        flows = asyncio.run(_measured(args))
        _print(flows, Console())
        if args.json is not None:
            value = {"benchmark": "long-prompts", "cases": [asdict(flow) for flow in flows]}
            args.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return 0


async def _measured(args: argparse.Namespace) -> list[Flow]:
    flows: list[Flow] = []

    async def measure(running: LocalSet) -> None:
        async with (
            AsyncClient(running.target, resume_tries=0) as client,
            probed(running.scheduler) as probe,
        ):
            load = _Streams(
                client=client,
                number=args.streams,
                short=await _prompts(client, args.streams, 32),
                long=await _prompts(client, args.streams, args.prompt_len),
            )
            await load.first_token()  # warms up
            await load.measure("", None, 5, with_prompts=False)
            flows.append(await load.measure("nothing", None, args.seconds, with_prompts=False))
            for target in (None, args.tpot_target):
                await _set_target(probe, target)
                # Some prompts first: the step-time model learns from them.
                await load.measure("", target, args.seconds // 2, with_prompts=True)
                case = "prompts, no target" if target is None else f"prompts, {target} ms"
                flows.append(await load.measure(case, target, args.seconds, with_prompts=True))

    model = locate_model(args.model)
    config = LocalConfig(model=model.path, served_model_name=model.name, port=0)
    if not await with_local_set(config, measure, verbose=False):
        raise CommandError("interrupted")
    return flows


async def _set_target(probe: SchedulerProbe, target: int | None) -> None:
    await probe.configure(admin_pb2.SchedulerConfig(tpot_target_ms=target or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Streams:
    """Streams that decode, and prompts to put beside them."""

    client: AsyncClient
    number: int
    short: Iterator[Sequence[int]]
    long: Iterator[Sequence[int]]

    async def measure(
        self, case: str, target: int | None, seconds: int, *, with_prompts: bool
    ) -> Flow:
        """Runs for some seconds, from when all streams have their first token."""
        arrivals: list[list[float]] = [[] for _ in range(self.number)]
        ttfts: list[float] = []
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._stream(times)) for times in arrivals]
            while not all(arrivals):  # noqa: ASYNC110 - the streams know of no event
                await asyncio.sleep(0.05)
            started = time.perf_counter()
            if with_prompts:
                running.append(tasks.create_task(self._ask(ttfts)))
            await asyncio.sleep(seconds)
            ended = time.perf_counter()
            for task in running:
                task.cancel()
        gaps = [
            after - before
            for times in arrivals
            for before, after in itertools.pairwise(times)
            if started <= before and after <= ended
        ]
        return Flow(
            case=case,
            target_ms=target,
            gaps=len(gaps),
            p50_ms=quantile(gaps, 50) * 1000,
            p99_ms=quantile(gaps, 99) * 1000,
            max_ms=max(gaps) * 1000,
            prompts=len(ttfts),
            prompt_ttft_p50_ms=quantile(ttfts, 50) * 1000 if ttfts else None,
            output_tokens_per_s=len(gaps) / (ended - started),
        )

    async def first_token(self) -> float:
        """Seconds to the first token of a long prompt that wants no other."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sent = time.perf_counter()
        async for _ in self.client.generate(next(self.long), params):
            pass
        return time.perf_counter() - sent

    async def _stream(self, times: list[float]) -> None:
        params = SamplingParams(max_tokens=_LONGEST_ANSWER, temperature=0.0, ignore_eos=True)
        async for delta in self.client.generate(next(self.short), params):
            times += [time.perf_counter()] if delta.token_ids else []

    async def _ask(self, ttfts: list[float]) -> None:
        while True:
            ttfts.append(await self.first_token())


async def _prompts(client: AsyncClient, streams: int, length: int) -> Iterator[list[int]]:
    info = await client.info()
    load = Load(
        concurrency=streams,
        requests=1,
        warmup=0,
        input_len=length,
        output_len=1,
        ignore_eos=True,
        temperature=0.0,
        seed=length,
    )
    return prompts(load, info.vocab_size, info.eos_token_ids)


def _print(flows: Sequence[Flow], console: Console) -> None:
    table = Table(title="time between tokens of running streams")
    for heading in (
        "beside them",
        "gaps",
        "p50 ms",
        "p99 ms",
        "max ms",
        "tok/s",
        "prompts",
        "their TTFT p50 ms",
    ):
        table.add_column(heading, justify="right")
    for flow in flows:
        ttft = "" if flow.prompt_ttft_p50_ms is None else f"{flow.prompt_ttft_p50_ms:.0f}"
        table.add_row(
            flow.case,
            str(flow.gaps),
            f"{flow.p50_ms:.0f}",
            f"{flow.p99_ms:.0f}",
            f"{flow.max_ms:.0f}",
            f"{flow.output_tokens_per_s:.1f}",
            str(flow.prompts),
            ttft,
        )
    console.print(table)


COMMAND = LongPrompts()
