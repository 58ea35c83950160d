"""`quire simulate run`: one load, all knobs, one or several policies side by side."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from quire.cli.command import UsageError
from services.scheduler.journal_codec import JournalError
from services.scheduler.journal_reader import read_arrivals
from services.scheduler.simulate.core_flags import add_core_flags, core_config
from services.scheduler.simulate.flags import (
    above_zero,
    add_common_flags,
    names,
    positive,
    share,
    sigma,
    whole,
    write_json,
)
from services.scheduler.simulate.load import Arrival, ClosedLoop, OpenLoop, Source
from services.scheduler.simulate.memory import named_if_too_big
from services.scheduler.simulate.policies import POLICIES, run_policy
from services.scheduler.simulate.report import console, group_table, one_table
from services.scheduler.simulate.step_model import InputError, load_model
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals
from services.scheduler.simulate.trace import check_trace, trace

_CLIENTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A load that can be drawn once for each policy."""

    trace: Path | None = None
    recorded: tuple[Arrival, ...] = ()
    synthetic: Load | None = None
    concurrency: int | None
    longest: int

    def source(self) -> Source:
        if self.trace is not None:
            coming = trace(self.trace)
        elif self.synthetic is not None:
            coming = arrivals(self.synthetic)
        else:
            coming = iter(self.recorded)
        if self.concurrency is None:
            return OpenLoop(coming)
        return ClosedLoop(coming, self.concurrency)


class Run:
    """The command."""

    name = "run"
    help = "one load under one or several policies"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        add_common_flags(parser)
        parser.add_argument(
            "--policy",
            type=_policies,
            default=("fair",),
            metavar="NAME,NAME",
            help=f"of {', '.join(POLICIES)}; each is a column (default: fair)",
        )
        parser.add_argument("--workers", type=positive, default=1, metavar="N", help="(default: 1)")
        parser.add_argument(
            "--reserve-context",
            action="store_true",
            help="v0 reserves the model's longest context for each request, as early systems did",
        )
        _add_load_flags(parser)
        add_core_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Runs each policy and prints them side by side."""
        model, config = load_model(args.model), core_config(args, "quire simulate run")
        given = _given(args)
        started = time.perf_counter()
        with named_if_too_big(f"--model {args.model}"):
            reports = [
                run_policy(
                    policy,
                    given.source(),
                    model,
                    config=config,
                    longest=given.longest,
                    workers=args.workers,
                    seed=args.seed,
                    reserve_context=args.reserve_context,
                )
                for policy in args.policy
            ]
        shown = console()
        workers = "a worker" if args.workers == 1 else f"{args.workers} workers"
        shown.print(one_table(f"{workers} of {model.name}", reports))
        for report in reports:
            if len(report.groups) > 1:
                shown.print(group_table(report))
        shown.print(f"simulated in {time.perf_counter() - started:.1f} s")
        write_json(args.json, [report.as_dict() for report in reports])
        return 0


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load: a trace, a recorded run, or a synthetic one")
    files = group.add_mutually_exclusive_group()
    files.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines or CSV")
    files.add_argument("--recording", type=Path, metavar="FILE", help="a file of --record")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"clients of a closed loop (default for a synthetic load: {_CLIENTS})",
    )
    pace.add_argument("--rate", type=above_zero, metavar="X", help="Poisson arrivals per second")
    for flag, kind, default, text in (
        ("--requests", positive, 1000, "how many"),
        ("--prompt-tokens", positive, 128, "of each prompt, or their mean"),
        ("--output-tokens", positive, 128, "of each output, or their mean"),
        ("--prompt-sigma", sigma, 0.0, "prompts vary log-normally by it, up to 8 times the mean"),
        ("--output-sigma", sigma, 0.0, "outputs vary log-normally by it, up to 8 times the mean"),
        ("--shared", share, 0.0, "of the requests, how many share a beginning"),
        ("--shared-tokens", whole, 0, "how long that beginning is"),
        ("--prefixes", positive, 1, "how many different beginnings there are"),
        ("--cancelled", share, 0.0, "of the requests, how many go away"),
        ("--cancel-after", above_zero, 1.0, "mean seconds after which they do"),
    ):
        group.add_argument(
            flag, type=kind, default=default, metavar="X", help=f"{text} (default: %(default)s)"
        )
    group.add_argument(
        "--bound-output", action="store_true", help="requests carry the longest output as bound"
    )
    group.add_argument("--classes", type=names, default=(), metavar="A,B", help="drawn evenly")
    group.add_argument("--tenants", type=names, default=(), metavar="A,B", help="drawn evenly")


def _given(args: argparse.Namespace) -> _Given:
    if args.rate is not None and (args.trace or args.recording):
        raise UsageError("quire simulate run: --rate is for synthetic loads; a file has its times")
    if args.trace is not None:
        extent = check_trace(args.trace)
        return _Given(trace=args.trace, concurrency=args.concurrency, longest=extent.longest)
    if args.recording is not None:
        return _recorded(args.recording, args.concurrency)
    load = Load(
        requests=args.requests,
        prompt=Lengths(mean=args.prompt_tokens, sigma=args.prompt_sigma),
        output=Lengths(mean=args.output_tokens, sigma=args.output_sigma),
        bound_output=args.bound_output,
        rate=args.rate,
        shared=args.shared,
        shared_tokens=args.shared_tokens,
        prefixes=args.prefixes,
        classes=args.classes,
        tenants=args.tenants,
        cancelled=args.cancelled,
        cancel_after_us=round(args.cancel_after * 1e6),
        seed=args.seed,
    )
    concurrency = None if args.rate is not None else args.concurrency or _CLIENTS
    return _Given(synthetic=load, concurrency=concurrency, longest=load.longest)


def _recorded(path: Path, concurrency: int | None) -> _Given:
    try:
        recorded = tuple(read_arrivals(path))
    except OSError as error:
        raise InputError(f"--recording {path}: {error.strerror}") from error
    except JournalError as error:
        raise InputError(f"--recording {path}: {error}") from error
    if not recorded:
        raise InputError(f"--recording {path}: holds no request")
    longest = max(one.prompt_tokens + (one.max_tokens or one.output_tokens) for one in recorded)
    return _Given(recorded=recorded, concurrency=concurrency, longest=longest)


def _policies(text: str) -> tuple[str, ...]:
    found = names(text)
    for name in found:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(POLICIES)}, got {name!r}")
    return found


COMMAND = Run()
