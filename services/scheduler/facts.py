"""What a scheduler shows of itself beside the core's `Loads`. Values to read; decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.latencies import LatencyWindow
from services.scheduler.link_timings import LinkTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """What a worker says of itself for people; nothing is decided by it. Empty: it did not say."""

    device: str = ""
    dtype: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One worker that is attached.

    Args:
        kind: of the worker.
        since: when it was attached, microseconds on the clock of the core.
        timings: of its recent steps; None before the first one.
    """

    kind: WorkerKind
    since: int
    timings: LinkTimings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The scheduler now.

    Args:
        model: name of the model served, "" without workers.
        started: when it was started, microseconds on the clock of the core.
        attachments: by worker id.
        latencies: of the requests that ended.
    """

    model: str
    started: int
    attachments: Mapping[str, Attachment]
    latencies: LatencyWindow
