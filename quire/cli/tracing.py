"""Whether a command traces its requests, and where to; without the SDK it says what is missing."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from quire.cli.command import CommandError, UsageError

FLAG = "--otlp-traces-endpoint"

_MISSING = "needs the extra [tracing]; install it with: pip install 'quire-llm[tracing]'"


def add_tracing_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--otlp-traces-endpoint`."""
    parser.add_argument(
        FLAG,
        metavar="URL",
        help="OTLP receiver (gRPC) to send the request's trace to"
        " (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )


@contextlib.contextmanager
def traced(args: argparse.Namespace) -> Iterator[None]:
    """Traces the requests of the block, if that is asked for.

    Raises:
        UsageError: the flag names no URL.
        CommandError: the flag is given and the SDK is not installed.
    """
    url = args.otlp_traces_endpoint
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"quire: {FLAG} must begin with http:// or https://, got {url!r}")
    where = url or _from_environment()
    if not where:
        yield
        return
    try:
        begin = importlib.import_module("quire.cli.otlp").begin
    except ModuleNotFoundError as error:
        if url is not None:
            raise CommandError(f"{FLAG} {_MISSING}") from error
        # Others of this machine may trace; it is no reason not to answer.
        _say(f"nothing is traced: OTEL_EXPORTER_OTLP_ENDPOINT {_MISSING}")
        yield
        return
    end = begin(where)
    try:
        yield
    finally:
        if not end():
            _say(f"the trace could not be sent to {where}")


def _from_environment() -> str | None:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _say(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)
