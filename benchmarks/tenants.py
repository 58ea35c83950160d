"""`quire bench tenants`: what a tenant that floods the service costs another one.

Starts a set. The small tenant sends one request after another, first alone, then while the flooding
tenant keeps many streams open; under each scheduling policy that is asked for. The promise is that
the small tenant's p95 TTFT beside the flood is at most that of running alone and three steps.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
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
from quire.params import SamplingParams, Scheduling
from quire.v1 import admin_pb2

_POLICIES = {
    "fair": admin_pb2.SCHEDULING_POLICY_FAIR,
    "priority": admin_pb2.SCHEDULING_POLICY_PRIORITY,
    "fcfs": admin_pb2.SCHEDULING_POLICY_FCFS,
}
_STEPS_ALLOWED = 3
_SMALL = Scheduling(tenant="small")
_FLOOD = Scheduling(tenant="flood")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the small tenant waited for its first tokens.

    Attributes:
        case: policy, and whether the other tenant flooded.
        requests: measured.
        p50_ms: median TTFT.
        p95_ms: 95th percentile of TTFT.
        step_ms: median step meanwhile.
        bound_ms: p95 alone and three of these steps; None where it ran alone.
        flood_tokens_per_s: output of the flooding tenant.
        displaced: running requests that gave way meanwhile.
        recomputed_tokens: computed again meanwhile.
    """

    case: str
    requests: int
    p50_ms: float
    p95_ms: float
    step_ms: float
    bound_ms: float | None
    flood_tokens_per_s: float
    displaced: int
    recomputed_tokens: int


class Tenants:
    """Compares the small tenant alone and beside a flood."""

    name = "tenants"
    help = "what a tenant that floods the service costs another one"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--model", default=DEFAULT_MODEL, help="what to serve (default: %(default)s)"
        )
        parser.add_argument(
            "--policies",
            default="fair",
            help="scheduling policies to compare, comma separated (default: %(default)s)",
        )
        for flag, default, what in (
            ("--flood", 100, "streams of the flooding tenant"),
            ("--requests", 40, "of the small tenant in each case"),
            ("--max-num-seqs", 16, "most requests in one step"),
            ("--input-len", 64, "tokens of each prompt"),
            ("--output-len", 64, "tokens of each answer of the flooding tenant"),
            ("--small-output-len", 4, "tokens of each answer of the small tenant"),
            ("--tpot-target", 600, "milliseconds between tokens, which bound each step"),
            ("--settle", 10, "seconds that the flood runs before it is measured"),
        ):
            parser.add_argument(
                flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
            )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")

    def run(self, args: argparse.Namespace) -> int:
        """Runs all cases and prints them."""
        names = ("flood", "requests", "max_num_seqs", "input_len", "output_len")
        for name in (*names, "small_output_len", "tpot_target", "settle"):
            if getattr(args, name) < 1:
                raise CommandError(f"--{name.replace('_', '-')} must be >= 1")
        policies = args.policies.split(",")
        for policy in policies:
            if policy not in _POLICIES:
                raise CommandError(f"--policies: {policy!r} is none of {', '.join(_POLICIES)}")
        waits = asyncio.run(_measured(args, policies))
        _print(waits, Console())
        if args.json is not None:
            value = {"benchmark": "tenants", "cases": [asdict(wait) for wait in waits]}
            args.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return 0


async def _measured(args: argparse.Namespace, policies: Sequence[str]) -> list[Wait]:
    waits: list[Wait] = []

    async def measure(running: LocalSet) -> None:
        async with (
            AsyncClient(running.target, resume_tries=0) as client,
            probed(running.scheduler) as probe,
        ):
            source = await _prompts(client, args)
            await _small(client, source, 4, args.small_output_len)  # warms up
            waits.append(await _case("alone", client, probe, source, args))
            for policy in policies:
                await probe.configure(admin_pb2.SchedulerConfig(policy=_POLICIES[policy]))
                async with _flood(client, source, args) as delivered:
                    await asyncio.sleep(args.settle)
                    case = f"flood, {policy}"
                    wait = await _case(case, client, probe, source, args, delivered)
                    waits.append(wait)

    model = locate_model(args.model)
    flags = {
        "scheduler": (
            *("--max-num-seqs", str(args.max_num_seqs)),
            *("--tpot-target", str(args.tpot_target)),
        )
    }
    config = LocalConfig(model=model.path, served_model_name=model.name, port=0, flags=flags)
    if not await with_local_set(config, measure, verbose=False):
        raise CommandError("interrupted")
    return [_bounded(wait, waits[0]) for wait in waits]


def _bounded(wait: Wait, alone: Wait) -> Wait:
    if wait is alone:
        return wait
    values = asdict(wait) | {"bound_ms": alone.p95_ms + _STEPS_ALLOWED * wait.step_ms}
    return Wait(**values)


async def _case(
    case: str,
    client: AsyncClient,
    probe: SchedulerProbe,
    source: Iterator[Sequence[int]],
    args: argparse.Namespace,
    delivered: "list[int] | None" = None,
) -> Wait:
    before = (await probe.loads()).counters
    started, tokens = time.perf_counter(), sum(delivered or ())
    ttfts = await _small(client, source, args.requests, args.small_output_len)
    elapsed = time.perf_counter() - started
    after = (await probe.loads()).counters
    return Wait(
        case=case,
        requests=len(ttfts),
        p50_ms=quantile(ttfts, 50) * 1000,
        p95_ms=quantile(ttfts, 95) * 1000,
        step_ms=await probe.step_ms(),
        bound_ms=None,
        flood_tokens_per_s=(sum(delivered or ()) - tokens) / elapsed,
        displaced=after.displaced - before.displaced,
        recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
    )


async def _small(
    client: AsyncClient, source: Iterator[Sequence[int]], requests: int, output_len: int
) -> list[float]:
    """One request after another with pauses of random length; seconds to each first token."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    pause = random.Random(0)
    ttfts: list[float] = []
    for prompt in itertools.islice(source, requests):
        await asyncio.sleep(pause.uniform(0.05, 0.5))
        sent = time.perf_counter()
        first: float | None = None
        async for delta in client.generate(prompt, params, scheduling=_SMALL):
            if delta.token_ids and first is None:
                first = time.perf_counter() - sent
        assert first is not None, "an answer without a token"
        ttfts.append(first)
    return ttfts


@contextlib.asynccontextmanager
async def _flood(
    client: AsyncClient, source: Iterator[Sequence[int]], args: argparse.Namespace
) -> AsyncIterator[list[int]]:
    """Keeps streams of the flooding tenant open; gives the tokens of each so far."""
    delivered = [0] * args.flood
    params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True)

    async def stream(place: int) -> None:
        while True:
            async for delta in client.generate(next(source), params, scheduling=_FLOOD):
                delivered[place] += len(delta.token_ids)

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(place)) for place in range(args.flood)]
        try:
            yield delivered
        finally:
            for task in streams:
                task.cancel()


async def _prompts(client: AsyncClient, args: argparse.Namespace) -> Iterator[list[int]]:
    info = await client.info()
    load = Load(
        concurrency=args.flood,
        requests=args.requests,
        warmup=0,
        input_len=args.input_len,
        output_len=args.output_len,
        ignore_eos=True,
        temperature=0.0,
        seed=0,
    )
    return prompts(load, info.vocab_size, info.eos_token_ids)


def _print(waits: Sequence[Wait], console: Console) -> None:
    table = Table(title="time to first token of the small tenant")
    for heading in (
        "case",
        "p50 ms",
        "p95 ms",
        "step ms",
        "alone + 3 steps",
        "flood tok/s",
        "displaced",
        "recomputed",
    ):
        table.add_column(heading, justify="right")
    for wait in waits:
        bound = "" if wait.bound_ms is None else f"{wait.bound_ms:.0f}"
        table.add_row(
            wait.case,
            f"{wait.p50_ms:.0f}",
            f"{wait.p95_ms:.0f}",
            f"{wait.step_ms:.0f}",
            bound,
            f"{wait.flood_tokens_per_s:.1f}",
            str(wait.displaced),
            str(wait.recomputed_tokens),
        )
    console.print(table)


COMMAND = Tenants()
