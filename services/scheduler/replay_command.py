"""`quire replay`: a journal executed again; same decisions, or which differs; and what-if."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.cli.command import EXIT_FAILED, CommandError
from services.scheduler import journal_codec as codec
from services.scheduler.core.config import Config, Eviction, Policy
from services.scheduler.core.plan import WORKER_LIMITS
from services.scheduler.journal_file import JournalFile
from services.scheduler.replay import Replay
from services.scheduler.replay_summary import Gatherer, Summary
from services.scheduler.simulate.memory import named_if_too_big
from services.scheduler.simulate.metrics import Spread
from services.scheduler.simulate.report import Report, millis
from services.scheduler.what_if import RecordedLoad, recorded_load, what_if

_MOST = 2**32 - 1


class ReplayCommand:
    """See the module."""

    name = "replay"
    help = "execute a recorded run of a scheduler again, as it was or with other settings"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument("file", type=Path, metavar="FILE", help="written by --record")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
        changes = parser.add_argument_group(
            "what if",
            "the same load under other settings, with workers simulated from the recorded steps",
        )
        for flag, help_text in (
            ("--max-num-batched-tokens", "token budget of one step"),
            ("--max-num-seqs", "most requests in one step"),
            ("--prefill-chunk-size", "most tokens of one request in one step"),
            ("--tpot-target", "wanted time between tokens, milliseconds"),
        ):
            changes.add_argument(flag, type=_count(flag), metavar="N", help=help_text)
        changes.add_argument(
            "--num-blocks",
            type=_count("--num-blocks", WORKER_LIMITS["num_blocks"]),
            metavar="N",
            help="KV blocks of each worker",
        )
        changes.add_argument(
            "--scheduling-policy",
            choices=[policy.value for policy in Policy],
            help="order of the queue",
        )
        changes.add_argument(
            "--eviction-policy",
            choices=[eviction.value for eviction in Eviction],
            help="which cached blocks are given up first",
        )
        changes.add_argument(
            "--enable-prefix-caching",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="reuse the KV blocks of equal prefixes",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Prints the summary, and returns 0 if every decision is the recorded one."""
        console = Console(markup=False, emoji=False)
        try:
            with named_if_too_big(str(args.file)):
                summary, remark, config = replayed(args.file)
            report: dict[str, Any] = {"replay": summary.as_dict(), "remark": remark}
            print_summary(console, args.file, summary, remark)
            if summary.difference is None and (changed := changed_config(config, args)) is not None:
                load = recorded_load(args.file)
                with named_if_too_big(str(args.file)):
                    before = what_if(args.file, load, config, blocks=None)
                flag = args.file if args.num_blocks is None else f"--num-blocks {args.num_blocks}"
                with named_if_too_big(str(flag)):
                    after = what_if(args.file, load, changed, blocks=args.num_blocks)
                print_what_if(console, summary, load, before, after)
                for note in notes(summary, load, changed):
                    console.print(f"note: {note}")
                report |= {"simulated": before.as_dict(), "what_if": after.as_dict()}
        except codec.JournalError as error:
            raise CommandError(f"{args.file}: {error}") from error
        except OSError as error:
            raise CommandError(f"{error.filename or args.file}: {error.strerror}") from error
        if args.json is not None:
            _write(args.json, report)
        return EXIT_FAILED if summary.difference else 0


def replayed(path: Path) -> tuple[Summary, str, Config]:
    """Executes a journal up to the first difference.

    Returns:
        The figures, what there is to say of the file's end, and the configuration it began with.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal, or damaged.
    """
    gatherer = Gatherer()
    with JournalFile(path) as file:
        replay = Replay(file)
        remark = None
        for played in replay.entries():
            gatherer.take(played)
            if not played.is_same:
                remark = "not read beyond the difference"
                break
        summary = gatherer.finish(replay.core.loads().counters)
        return summary, file.remark if remark is None else remark, codec.config_of(file.header)


def notes(summary: Summary, load: RecordedLoad, changed: Config) -> list[str]:
    """What of the simulations is not as one might think."""
    found: list[str] = []
    if summary.configurations:
        found.append(
            f"the {summary.configurations} changes of the configuration during the recording are "
            "left out of both simulations; they begin with the first one"
        )
    bounds = ("max_num_seqs", "max_num_batched_tokens")
    for name in bounds:
        asked = getattr(changed, name)
        most = max((getattr(worker, name) for worker in load.workers), default=0)
        if asked is not None and load.workers and asked > most:
            flag = "--" + name.replace("_", "-")
            found.append(f"{flag} {asked} counts as {most}, which the worker announced")
    return found


def changed_config(config: Config, args: argparse.Namespace) -> Config | None:
    """The configuration with the flags given; None where none was given."""
    given: dict[str, Any] = {
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": args.max_num_seqs,
        "prefill_chunk_size": args.prefill_chunk_size,
        "tpot_target_us": None if args.tpot_target is None else args.tpot_target * 1000,
        "policy": None if args.scheduling_policy is None else Policy(args.scheduling_policy),
        "eviction": None if args.eviction_policy is None else Eviction(args.eviction_policy),
        "enable_prefix_caching": args.enable_prefix_caching,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(config, **changes) if changes or args.num_blocks is not None else None


def print_summary(console: Console, path: Path, summary: Summary, remark: str) -> None:
    """The recorded run, and whether replay agrees with it."""
    table = Table(title=f"{path.name}: the recorded run", show_header=False)
    ends = ", ".join(f"{reason} {count}" for reason, count in sorted(summary.ends.items()))
    for name, text in (
        ("entries", str(summary.entries)),
        ("duration", f"{summary.duration_s:.1f} s"),
        ("workers", ", ".join(summary.workers)),
        ("requests", f"{summary.requests}, of them refused {summary.refused}"),
        ("ends", ends),
        ("tokens", f"{summary.prompt_tokens} prompt, {summary.output_tokens} output"),
        ("cached tokens", str(summary.cached_tokens)),
        ("steps", str(summary.steps)),
        ("preemptions", f"{summary.preemptions}, requeued by lost workers {summary.requeues}"),
        ("recomputed tokens", str(summary.recomputed_tokens)),
        ("configuration", f"changed {summary.configurations} times"),
        ("TTFT p50 / p90 / p99", _spread(summary.ttft_ms)),
        ("in the queue p50 / p90 / p99", _spread(summary.queue_ms)),
        ("TPOT p50 / p90 / p99", _spread(summary.tpot_ms)),
    ):
        table.add_row(name, text)
    console.print(table)
    if remark:
        console.print(f"file: {remark}")
    difference = summary.difference
    if difference is None:
        console.print(f"identical: all {summary.entries} decisions are the recorded ones")
        return
    about = f" of {difference.worker_id}" if difference.worker_id else ""
    console.print(
        f"different: entry {difference.entry} ({difference.input}{about}, at "
        f"{difference.at_s:.6f} s)\n  recorded: {difference.recorded}\n"
        f"  now:      {difference.decided}",
        markup=False,
    )


def print_what_if(
    console: Console, recorded: Summary, load: RecordedLoad, before: Report, after: Report
) -> None:
    """Recorded, simulated with the recorded settings, and with the given ones."""
    table = Table(title="What if")
    for heading in ("", "recorded", "simulated as recorded", "simulated with these flags"):
        table.add_column(heading, justify="right" if heading else "left")
    both: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
        ("duration", f"{recorded.duration_s:.1f} s", lambda r: f"{r.duration_s:.1f} s"),
        (
            "output tokens / s",
            f"{recorded.output_tokens_per_s:.1f}",
            lambda r: f"{r.output_tokens_per_s:.1f}",
        ),
        ("TTFT p50 / p90 / p99", _spread(recorded.ttft_ms), lambda r: _spread(r.ttft_ms)),
        ("TPOT p50 / p90 / p99", _spread(recorded.tpot_ms), lambda r: _spread(r.tpot_ms)),
        ("preemptions", str(recorded.preemptions), lambda r: str(r.preemptions)),
        ("recomputed tokens", str(recorded.recomputed_tokens), lambda r: str(r.recomputed_tokens)),
        ("cached tokens", str(recorded.cached_tokens), lambda r: str(r.cached_tokens)),
        ("steps", str(recorded.steps), lambda r: str(r.steps)),
        ("ends", _ends(recorded.ends), lambda r: _ends(r.ends)),
    )
    for name, text, of in both:
        table.add_row(name, text, of(before), of(after))
    console.print(table)
    console.print(
        f"step times learned from {load.fit.steps} steps, off by {load.fit.median_error:.1%} at "
        "the median; simulated workers are there from the start, never fail, and take no time "
        "between steps"
    )


def _spread(spread: Spread) -> str:
    return " / ".join(millis(value) for value in (spread.p50, spread.p90, spread.p99))


def _ends(ends: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(ends.items()))


def _count(flag: str, most: int = _MOST) -> Callable[[str], int]:
    def count(text: str) -> int:
        short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not (short and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, got {text!r}")
        return int(text)

    count.__name__ = flag
    return count


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {path}: {error.strerror}") from error


COMMAND = ReplayCommand()
