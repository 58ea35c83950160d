"""How much memory this process has; Linux tells it in /proc."""

import os
import resource
from pathlib import Path

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
