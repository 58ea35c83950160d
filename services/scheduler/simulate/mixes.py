"""`quire simulate mixes`: the four mixes of prompt and output, v0 against ours."""

import argparse
import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.scheduler.core.config import Policy
from services.scheduler.simulate.core_flags import add_core_flags, core_config
from services.scheduler.simulate.flags import (
    add_common_flags,
    levels,
    positive,
    sigma,
    write_json,
)
from services.scheduler.simulate.memory import named_if_too_big
from services.scheduler.simulate.report import console, percent, refusals
from services.scheduler.simulate.scenarios import (
    CONCURRENCIES,
    MIXES,
    OUTPUT_SIGMA,
    Result,
    cells,
    run_cells,
)
from services.scheduler.simulate.step_model import InputError, StepModel, load_model


class Mixes:
    """The command."""

    name = "mixes"
    help = "four prompt/output mixes at several concurrencies, v0 against ours"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        add_common_flags(parser)
        parser.add_argument(
            "--mixes",
            type=_mixes,
            default=MIXES,
            metavar="IN/OUT,…",
            help="tokens of prompt and output (default: 128/128,8192/128,128/2048,8192/2048)",
        )
        parser.add_argument(
            "--concurrency",
            type=levels,
            default=CONCURRENCIES,
            metavar="N,N",
            help="clients, a run each (default: 1,8,32,64,128)",
        )
        parser.add_argument(
            "--rounds",
            type=positive,
            default=4,
            metavar="N",
            help="requests of each client, at least 8 in all (default: %(default)s)",
        )
        parser.add_argument(
            "--output-sigma",
            type=sigma,
            default=OUTPUT_SIGMA,
            metavar="X",
            help="outputs vary log-normally by it around the mix's, up to twice that, which each "
            "request then carries as its bound; 0: all are equal (default: %(default)s)",
        )
        parser.add_argument(
            "--policy",
            choices=[policy.value for policy in Policy],
            default=Policy.FAIR.value,
            help="ours (default: %(default)s)",
        )
        parser.add_argument(
            "--reserve-context",
            action="store_true",
            help="v0 reserves the model's longest context for each request, as early systems did",
        )
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw all figures there")
        parser.add_argument(
            "--processes",
            type=positive,
            default=os.cpu_count() or 1,
            metavar="N",
            help="that run cells (default: %(default)s, the processors)",
        )
        add_core_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Runs all cells, prints the table, draws the plot."""
        model, config = load_model(args.model), core_config(args, "quire simulate mixes")
        _check_lengths(args.mixes, model)
        wanted = cells(
            args.mixes,
            args.concurrency,
            args.policy,
            rounds=args.rounds,
            output_sigma=args.output_sigma,
            reserve_context=args.reserve_context,
            seed=args.seed,
        )
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("simulating", total=len(wanted))
            with named_if_too_big(f"--model {args.model}"):
                results = run_cells(
                    wanted,
                    model,
                    config,
                    processes=args.processes,
                    done=lambda: progress.advance(bar),
                )
        shown = console()
        shown.print(mixes_table(results, _title(args, model)))
        for result in results:
            if refused := refusals(result.report.ends):
                cell = result.cell
                shown.print(
                    f"{cell.prompt_tokens}/{cell.output_tokens}, {cell.concurrency} clients, "
                    f"{cell.policy}: refused {refused}"
                )
        write_json(
            args.json,
            {
                "model": asdict(model),
                "results": [
                    {"cell": asdict(result.cell), "report": result.report.as_dict()}
                    for result in results
                ],
            },
        )
        if args.plot is not None:
            plot = importlib.import_module("services.scheduler.simulate.plot")
            plot.plot_mixes(results, _title(args, model), args.plot)
        return 0


def mixes_table(results: Sequence[Result], title: str) -> Table:
    """A line for each cell, v0 above ours."""
    # As wide as the smallest terminal: 80 columns.
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ["in/out", "clients", "policy", "tok/s", "TTFT s\np50", "\np99"]
    headings += ["TPOT ms\np50", "\np99", "KV\nheld", "\nfilled", "\npreempted"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    before = results[0].cell
    for result in results:
        cell, report = result.cell, result.report
        if (cell.prompt_tokens, cell.output_tokens) != (before.prompt_tokens, before.output_tokens):
            table.add_section()
        before = cell
        ttft, tpot = report.ttft_ms, report.tpot_ms
        table.add_row(
            f"{cell.prompt_tokens}/{cell.output_tokens}",
            str(cell.concurrency),
            cell.policy,
            f"{report.output_tokens_per_s:.0f}",
            *(_number(value, 1000) for value in (ttft.p50, ttft.p99)),
            *(_number(value, 1) for value in (tpot.p50, tpot.p99)),
            percent(report.kv_held),
            percent(report.kv_filled),
            str(report.preemptions),
        )
    return table


def _number(value: float | None, divisor: int) -> str:
    """With three digits."""
    if value is None:
        return "-"
    scaled = value / divisor
    return f"{scaled:.{2 if scaled < 10 else 1}f}"


def _title(args: argparse.Namespace, model: StepModel) -> str:
    outputs = (
        f"outputs vary by sigma {args.output_sigma:g}" if args.output_sigma else "equal outputs"
    )
    return f"{model.name}, closed loop, {outputs}: static batching (v0) and Quire ({args.policy})"


def _mixes(text: str) -> tuple[tuple[int, int], ...]:
    found = [re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part.strip()) for part in text.split(",")]
    mixes = tuple((int(match[1]), int(match[2])) for match in found if match)
    if len(mixes) != len(found) or not all(all(mix) for mix in mixes):
        raise argparse.ArgumentTypeError(f"must be like 128/128,8192/128, got {text!r}")
    return mixes


def _check_lengths(mixes: Sequence[tuple[int, int]], model: StepModel) -> None:
    for prompt, output in mixes:
        if prompt + output > model.max_model_len:
            raise InputError(
                f"--mixes {prompt}/{output}: longer than the {model.max_model_len} tokens of "
                f"context of {model.name}"
            )


COMMAND = Mixes()
