"""Logs of a service process: one line per event on standard error, no prompt text, ever."""

import logging
import sys


def configure_logs(service: str, level: str) -> None:
    """Sends all logs of the process to standard error.

    Args:
        service: name that stands on each line.
        level: "debug", "info", "warning" or "error".
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_news)


def told(text: str, most: int = 200) -> str:
    """What a file or another process said, for one line: printable, at most `most` characters."""
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]} …"


def _news(record: logging.LogRecord) -> bool:
    """False for the traceback gRPC logs when a client goes away during a write to it."""
    return not record.getMessage().startswith("ExecuteBatchError")
