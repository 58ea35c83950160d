"""What this process may use of its machine: processors, memory, and a name of its own there.

Reads `/proc` and the control groups, both versions. Knows nothing of models.
"""

import errno
import itertools
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A view of one machine.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def processors(self, allowed: int) -> "Processors":
        """How many threads can run at once.

        Args:
            allowed: processors the process may be scheduled on (its affinity).
        """
        quotas = [quota for group in self._groups("cpu") if (quota := _cpu_quota(group))]
        quota = min(quotas, default=None)
        if quota is None or math.ceil(quota) >= allowed:
            return Processors(max(1, allowed), "affinity")
        return Processors(max(1, math.ceil(quota)), f"cgroup quota {quota:g} of {allowed}")

    def available_memory(self) -> int:
        """Bytes that can be allocated without swapping or meeting a limit."""
        left = [self._meminfo("MemAvailable")]
        for group in self._groups("memory"):
            limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
            if limit is not None and used is not None:
                left.append(limit - used + _inactive_file(group))
        return max(0, min(left))

    def resident(self) -> int:
        """Bytes of this process in memory."""
        return self._status("VmRSS")

    def peak_resident(self) -> int:
        """Most bytes of this process in memory since `reset_peak`, or since its start."""
        return self._status("VmHWM")

    def reset_peak(self) -> None:
        """Starts `peak_resident` anew where the system allows it; else the peak is only higher."""
        try:
            (self.proc / "self/clear_refs").write_text("5")
        except OSError:
            return

    def age_s(self) -> float:
        """Seconds since this process was started, imports included."""
        fields = (self.proc / "self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return float((self.proc / "uptime").read_text().split()[0]) - started

    def _groups(self, controller: str) -> Iterator[Path]:
        """Folders of the control groups that bind this process, innermost first."""
        for line in _lines(self.proc / "self/cgroup"):
            _, names, inside = line.split(":", 2)
            if names == "":
                mount = self.cgroup
            elif controller in names.split(","):
                mount = self.cgroup / controller
            else:
                continue
            group = mount / inside.strip("/")
            while group != mount:
                yield group
                group = group.parent
            yield mount

    def _meminfo(self, name: str) -> int:
        return _kilobytes(self.proc / "meminfo", name)

    def _status(self, name: str) -> int:
        return _kilobytes(self.proc / "self/status", name)


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors a process may use."""

    count: int
    """At least 1."""
    bound_by: str
    """What sets the number, for a line of the log."""


@dataclass(frozen=True, slots=True)
class ClaimedName:
    """A name no other process of this machine has while this value lives."""

    name: str
    claim: socket.socket
    """Bound while the process lives; the system gives the name back, even after a crash."""


def claim_name(prefix: str) -> ClaimedName:
    """`prefix-0`, or the first number that is free: a restarted process gets its name again.

    Two workers of one machine under the same name would replace each other for ever.
    """
    for number in itertools.count():
        name = f"{prefix}-{number}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0quire/{name}")  # an abstract address: no file is left behind
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return ClaimedName(name, claim)
    raise AssertionError("count() does not end")


def _cpu_quota(group: Path) -> float | None:
    """Processors' worth of time the group may use."""
    parts = " ".join(_lines(group / "cpu.max")).split()
    if len(parts) == 2 and parts[0] != "max":
        return int(parts[0]) / int(parts[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _inactive_file(group: Path) -> int:
    """Page cache of the group that would be given up first; limits count it as used."""
    stat = dict(line.split() for line in _lines(group / "memory.stat"))
    # Version 1 counts the groups below only under the name with "total".
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _kilobytes(path: Path, name: str) -> int:
    for line in _lines(path):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
