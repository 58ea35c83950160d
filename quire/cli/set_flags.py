"""The flags of a local set: which of them goes to which process, and those of later versions."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.cli.command import UsageError
from quire.local import LocalConfig
from quire.models import DEFAULT_MODEL, locate_model

_PASSED: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "worker": (
            ("--dtype", "NAME", "auto, float32, bfloat16 or float16"),
            ("--device", "NAME", "auto, cpu or cuda"),
            ("--max-model-len", "N", "longest prompt + output, in tokens"),
            ("--max-num-seqs", "N", "most requests in one step"),
            ("--max-num-batched-tokens", "N", "most tokens in one step"),
            ("--block-size", "N", "tokens per KV block"),
            ("--kv-cache-memory", "BYTES", "memory for the KV cache, e.g. 2GiB"),
            ("--gpu-memory-utilization", "X", "share of the device's memory to use"),
        ),
        "scheduler": (
            ("--prefill-chunk-size", "N", "most tokens of one request in one step"),
            ("--enable-prefix-caching", "true|false", "reuse the KV blocks of equal prefixes"),
        ),
    }
)
"""Flags by the process that understands and checks them."""

_LATER = MappingProxyType(
    {
        "--tensor-parallel-size": "one model over several devices",
        "--pipeline-parallel-size": "one model over several stages",
        "--scheduling-policy": "other orders of the queue",
        "--speculative-model": "speculative decoding",
        "--num-speculative-tokens": "speculative decoding",
        "--quantization": "computing with quantized weights",
        "--trust-remote-code": "model code from the model's folder",
        "--enable-metrics": "a metrics endpoint",
        "--metrics-port": "a metrics endpoint",
    }
)


def add_set_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Adds the flags of a local set; `port` is the default of `--port`."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=port, help="0 is any free one (default: %(default)s)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the logs there")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the logs of all processes"
    )
    for flags in _PASSED.values():
        for flag, metavar, text in flags:
            lone: dict[str, Any] = {"nargs": "?", "const": "true"} if "|" in metavar else {}
            parser.add_argument(flag, metavar=metavar, help=text, **lone)
    for flag in ("--workers", "--tokenizers"):
        parser.add_argument(flag, type=int, action=_OnlyOne, help=argparse.SUPPRESS)
    for flag, what in _LATER.items():
        parser.add_argument(flag, nargs="?", action=_Later, metavar=what, help=argparse.SUPPRESS)


def local_config(args: argparse.Namespace) -> LocalConfig:
    """What the flags say.

    Raises:
        ModelNotFound: the model is not on this machine.
    """
    model = locate_model(args.model)
    return LocalConfig(
        model=model.path,
        served_model_name=model.name,
        host=args.host,
        port=args.port,
        flags={process: _given(args, flags) for process, flags in _PASSED.items()},
        log_dir=args.log_dir,
    )


def _given(args: argparse.Namespace, flags: tuple[tuple[str, str, str], ...]) -> list[str]:
    values = vars(args)
    named = [(flag, values[flag.removeprefix("--").replace("-", "_")]) for flag, *_ in flags]
    return [f"{flag}={value}" for flag, value in named if value is not None]


class _Later(argparse.Action):
    """Refuses a flag of a later version by its name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise UsageError(
            f"{parser.prog}: {option_string} ({self.metavar}) is not available in this version"
        )


class _OnlyOne(argparse.Action):
    """Takes 1 and refuses more by the flag's name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values != 1:
            raise UsageError(
                f"{parser.prog}: {option_string} {values} (more than one) is not available in this "
                "version"
            )
