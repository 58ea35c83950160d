"""The flags of a request: how to sample, how urgent it is, whom to ask.

Shared by the commands that generate.
"""

import argparse
import json
from dataclasses import asdict

from quire.answers import Completion
from quire.cli.command import add_later_flags
from quire.cli.tracing import add_tracing_flag
from quire.client import DEFAULT_TARGET
from quire.errors import InvalidRequest
from quire.params import LATER, SamplingParams, Scheduling
from quire.request_options import CallOptions


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `SamplingParams` and `Scheduling`, `--target`, `--deadline`, `--json`, and
    `--otlp-traces-endpoint`.
    """
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy (default: the model's, else 1)"
    )
    parser.add_argument("--top-p", type=float, metavar="X", help="in (0, 1]; 1 keeps all tokens")
    parser.add_argument("--top-k", type=int, metavar="N", help="0 keeps all tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends the answer; repeatable",
    )
    parser.add_argument(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="ends the answer; repeatable",
    )
    parser.add_argument(
        "--include-stop", action="store_true", help="shows what ended the answer in its text"
    )
    parser.add_argument(
        "--show-special-tokens", action="store_true", help="shows special tokens in the text"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="goes on after an end-of-sequence token"
    )
    add_scheduling_flags(parser)
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="gives up after this long"
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="the server, or several joined by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints one JSON object instead of the text"
    )
    add_tracing_flag(parser)
    add_later_flags(parser, {f"--{name.replace('_', '-')}": what for name, what in LATER.items()})


def request_of(args: argparse.Namespace) -> tuple[SamplingParams, CallOptions]:
    """What the flags say: how to sample, and all else.

    Raises:
        InvalidRequest: values are out of range; names all their fields.
    """
    wrong: list[tuple[str, str]] = []
    try:
        params = _sampling_params(args)
    except InvalidRequest as error:
        wrong += error.violations
    try:
        options: CallOptions = {"deadline_s": args.deadline, "scheduling": _scheduling(args)}
    except InvalidRequest as error:
        wrong += error.violations
    if wrong:
        first, *others = wrong
        raise InvalidRequest(*first, *others)
    return params, options


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        include_stop_str_in_output=args.include_stop,
        skip_special_tokens=not args.show_special_tokens,
    )


def add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `Scheduling`, but for the deadline."""
    add_identity_flags(parser)
    parser.add_argument(
        "--ttft-target",
        type=int,
        metavar="MS",
        help="wanted time to the first token, milliseconds (default: the class's)",
    )
    parser.add_argument(
        "--tpot-target",
        type=int,
        metavar="MS",
        help="wanted time between tokens, milliseconds (default: the server's)",
    )
    parser.add_argument(
        "--shed-late",
        action="store_true",
        help="wants no answer rather than one that misses its time to the first token",
    )
    parser.add_argument(
        "--session-id", default="", metavar="NAME", help="the conversation it belongs to"
    )
    parser.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="shares cached prefixes only with requests of this salt (default: of the tenant)",
    )
    parser.add_argument(
        "--no-prefix-cache-read",
        action="store_true",
        help="takes nothing from the prefix cache",
    )


def add_identity_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--priority-class` and `--tenant`."""
    parser.add_argument(
        "--priority-class",
        default="",
        metavar="NAME",
        help="interactive, standard, batch, or as the server names them (default: its own)",
    )
    parser.add_argument("--tenant", default="", metavar="NAME", help="whom it is for")


def _scheduling(args: argparse.Namespace) -> Scheduling:
    return Scheduling(
        priority_class=args.priority_class,
        tenant=args.tenant,
        ttft_target_ms=args.ttft_target,
        tpot_target_ms=args.tpot_target,
        shed_late=args.shed_late,
        session_id=args.session_id,
        cache_salt=args.cache_salt,
        skip_reading_prefix_cache=args.no_prefix_cache_read,
    )


def as_json(completion: Completion) -> str:
    """An answer as one JSON object on one line."""
    return json.dumps(asdict(completion), ensure_ascii=False)
