"""The flags of a local set: which of them goes to which process, and those of later versions."""

import argparse
from pathlib import Path
from typing import Any

from quire.cli.command import add_later_flags
from quire.local import LocalConfig
from quire.models import DEFAULT_MODEL, locate_model, require_weights
from quire.set_options import LATER, all_flags, flags_by_process, keyword


def add_set_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Adds the flags of a local set; `port` is the default of `--port`."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    for flag, text in (
        ("--workers", "how many workers share this machine"),
        ("--tokenizers", "how many, on ports from --port on"),
    ):
        parser.add_argument(
            flag, type=int, default=1, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=port, help="0 is any free ones (default: %(default)s)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the logs there")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the logs of all processes"
    )
    for flag, metavar, text in all_flags():
        how: dict[str, Any] = {"nargs": "?", "const": "true"} if "|" in metavar else {}
        if "," in metavar:
            how = {"action": "append"}
        parser.add_argument(flag, metavar=metavar, help=text, **how)
    add_later_flags(parser, {flag: later.what for flag, later in LATER.items()})


def local_config(args: argparse.Namespace) -> LocalConfig:
    """What the flags say.

    Raises:
        ModelNotFound: the model is not on this machine, or its folder holds none.
    """
    model = locate_model(args.model)
    require_weights(model)
    return LocalConfig(
        model=model.path,
        served_model_name=model.name,
        workers=args.workers,
        tokenizers=args.tokenizers,
        host=args.host,
        port=args.port,
        flags={process: _given(args, flags) for process, flags in flags_by_process().items()},
        log_dir=args.log_dir,
    )


def _given(args: argparse.Namespace, flags: tuple[tuple[str, str, str], ...]) -> list[str]:
    values = vars(args)
    named = [(flag, values[keyword(flag)]) for flag, *_ in flags]
    return [
        f"{flag}={','.join(value) if isinstance(value, list) else value}"
        for flag, value in named
        if value is not None
    ]
