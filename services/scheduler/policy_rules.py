"""Which values a scheduling policy may have; for flags and for changes at run time alike."""

from collections.abc import Iterator

from services.scheduler.core.config import PriorityClass, TenantPolicy

MOST_SHARE = 1000
MOST_WEIGHT = 1_000_000
MOST_CLASSES = 64
MOST_TENANTS = 1024
MOST_NAME_BYTES = 128
MOST_TIME_WHEEL_SLOTS = 65_536
MOST_SECONDS = 4_000_000
"""Longest time of a setting; above a month, and its milliseconds are a uint32."""

MOST = 2**32 - 1
"""Of anything that is counted."""

Problem = tuple[str, str]
"""Key, and what its value must be."""


def name_problem(name: str) -> str | None:
    """What is wrong with the name of a class, or None."""
    size = len(name.encode("utf-8", "replace"))
    if not name.isprintable() or not 1 <= size <= MOST_NAME_BYTES:
        return f"must be 1 to {MOST_NAME_BYTES} bytes of printable text, got {size} bytes"
    return None


def tenant_name_problem(name: str) -> str | None:
    """What is wrong with the name of a tenant, or None; it may be empty."""
    size = len(name.encode("utf-8", "replace"))
    if not name.isprintable() or size > MOST_NAME_BYTES:
        return f"must be at most {MOST_NAME_BYTES} bytes of printable text, got {size} bytes"
    return None


def class_problems(one: PriorityClass) -> Iterator[Problem]:
    """What is wrong with a class, beside its name."""
    if not 1 <= one.share <= MOST_SHARE:
        yield "share", f"must be from 1 to {MOST_SHARE}, got {one.share}"
    elif not 1 <= one.floor <= one.share:
        yield "floor", f"must be from 1 to the share, which is {one.share}, got {one.floor}"
    yield from _time("ttft_target", one.ttft_target_us)


def tenant_problems(policy: TenantPolicy) -> Iterator[Problem]:
    """What is wrong with the policy of a tenant."""
    if not 1 <= policy.weight <= MOST_WEIGHT:
        limits = f"from 0.001 to {MOST_WEIGHT // 1000} times an ordinary tenant's"
        yield "weight", f"must be {limits}, got {policy.weight / 1000:g}"
    for key in ("max_queued_requests", "max_queued_tokens", "max_live_requests"):
        value = getattr(policy, key)
        if value is not None and not 1 <= value <= MOST:
            yield key, f"must be from 1 to {MOST}, got {value}"


def _time(key: str, value_us: int | None) -> Iterator[Problem]:
    if value_us is not None and not 1000 <= value_us <= MOST_SECONDS * 1_000_000:
        got = f"{value_us / 1000:.15g}"
        yield key, f"must be from 1 to {MOST_SECONDS * 1000} milliseconds, got {got}"
