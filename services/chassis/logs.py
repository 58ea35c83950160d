"""Logs of a service process: one line per event on standard error, no prompt text, ever.

A record may have fields: `log.info("request ended", extra=fields(tokens=3))`. As text they follow
the message as `name=value`, as JSON they are members of the object.
"""

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any

_SELDOM_S = 60.0


def configure_logs(service: str, level: str, form: str = "text") -> None:
    """Sends all logs of the process to standard error.

    Args:
        service: name that stands on each line.
        level: "debug", "info", "warning" or "error".
        form: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if form == "json" else _Text(service))
    handler.addFilter(_Seldom("opentelemetry"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_news)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """What to give as `extra` of a log call; None values are left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def told(text: str, most: int = 200) -> str:
    """What a file or another process said, for one line: printable, at most `most` characters."""
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]} …"


class _Text(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        values: dict[str, object] = getattr(record, "fields", {})
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in values.items())])


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except ValueError:  # a number that JSON does not have
            return json.dumps(_finite(line), default=str)


def _finite(value: Any) -> Any:
    """`value` with text in place of numbers that are infinite or none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


class _Seldom(logging.Filter):
    """Lets through each message of a library, whatever it is filled with, once a minute.

    Args:
        name: of the library's loggers.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._told_at: dict[tuple[str, object], float] = {}  # as many as it has messages

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True  # somebody else's
        key = (record.name, record.msg)
        is_due = record.created - self._told_at.get(key, 0.0) >= _SELDOM_S
        if is_due:
            self._told_at[key] = record.created
        return is_due


def _shown(value: object) -> str:
    """A value as text that is one word."""
    text = told(str(value))
    return text if text and not set(text) & set(' "=') else json.dumps(text)


def _news(record: logging.LogRecord) -> bool:
    """False for the traceback gRPC logs when a client goes away during a write to it."""
    return not record.getMessage().startswith("ExecuteBatchError")
