"""Carries W3C trace context: reads and checks it, makes no spans."""

import re
from collections.abc import Iterable

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def valid_traceparent(value: str) -> str:
    """`value` if it is a W3C traceparent, else "" (the standard asks to restart the trace then)."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or value.startswith("ff") or not int(match[1], 16) or not int(match[2], 16):
        return ""
    return value


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent in a call's metadata, or ""."""
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str):
            return valid_traceparent(value)
    return ""
