"""The flags that say how to sample and whom to ask, shared by the commands that generate."""

import argparse
import json
from dataclasses import asdict

from quire.answers import Completion
from quire.cli.command import add_later_flags
from quire.client import DEFAULT_TARGET
from quire.params import LATER, SamplingParams


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `SamplingParams`, `--target`, `--deadline` and `--json`."""
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
    add_later_flags(parser, {f"--{name.replace('_', '-')}": what for name, what in LATER.items()})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags say.

    Raises:
        InvalidRequest: values are out of range; names their fields.
    """
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


def as_json(completion: Completion) -> str:
    """An answer as one JSON object on one line."""
    return json.dumps(asdict(completion), ensure_ascii=False)
