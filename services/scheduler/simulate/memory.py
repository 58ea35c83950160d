"""How much memory this process has; Linux tells it in /proc."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from quire.cli.command import CommandError

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident now; where /proc is missing, the peak instead."""
    if not _STATM.exists():
        return peak_bytes()
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def peak_bytes() -> int:
    """Most that was ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mebibytes(count: float) -> str:
    """As text."""
    return f"{count / (1 << 20):.0f} MiB"


@contextlib.contextmanager
def named_if_too_big(flag: str) -> Iterator[None]:
    """Makes one line that names the flag where the tables of its workers find no memory.

    Raises:
        CommandError: instead of MemoryError.
    """
    try:
        yield
    except MemoryError as error:
        raise CommandError(
            f"{flag}: no memory for the workers' tables: fewer or smaller workers, or shorter "
            "requests"
        ) from error
