"""The metrics of a worker: what it is, and what its steps did.

Owns the names and labels. Counted on the event loop, read by the threads that collect. Labels are
bounded: no request, tenant or text is in them.
"""

from collections.abc import Callable

import torch

from services.chassis.metrics import OTHER, STEP_S, Metrics, Point
from services.worker.engine import Footprint
from services.worker.model_thread import ModelThread
from services.worker.plan import FailureKind, StepLimits, StepTimings

_KNOWN_ERRORS = frozenset(
    {"DeviceLost", "LinkProtocolError", "MemoryError", "OutOfMemoryError", "RuntimeError"}
)


def error_type(error: Exception) -> str:
    """The error's type, one of a bounded set."""
    name = type(error).__name__
    return name if name in _KNOWN_ERRORS else OTHER


class WorkerMetrics:
    """The instruments of one worker process, over all its attachments.

    Args:
        metrics: of the process.
        limits: of the worker's steps.
        footprint: of its engine.
        device: where it computes.
        thread: that computes; its time before this moment does not count.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        limits: StepLimits,
        footprint: Footprint,
        device: torch.device,
        thread: ModelThread,
    ) -> None:
        self.is_attached = False
        """Whether a scheduler gives steps."""
        self.rows_in_use = 0
        """Requests held now."""
        self._steps = 0
        self._tokens = {"prefill": 0, "decode": 0}
        # There from the start, so that a rate sees the first one.
        self._failed_rows = {kind.value: 0 for kind in FailureKind}
        self._failed_steps: dict[str, int] = {}
        self._link_ends: dict[str, int] = {}
        self._duration = metrics.histogram(
            "quire.worker.step.duration",
            "Time of a step: waiting on the worker, executed, and none there before it.",
            bounds=STEP_S,
            labels=("phase",),
        )
        self._count(metrics, thread)
        self._show(metrics, limits, footprint)
        if device.type == "cuda":
            _show_device(metrics, device)

    def step(self, timings: StepTimings, *, prefill: int, decode: int) -> None:
        """A step was executed, with so many tokens."""
        self._duration.record(timings.wait_us / 1e6, "wait")
        self._duration.record(timings.execute_us / 1e6, "execute")
        self._duration.record(timings.idle_us / 1e6, "idle")
        self._steps += 1
        self._tokens["prefill"] += prefill
        self._tokens["decode"] += decode

    def row_failed(self, reason: str) -> None:
        """One request could not be computed."""
        _add_one(self._failed_rows, reason)

    def step_failed(self, reason: str) -> None:
        """A step gave nothing."""
        _add_one(self._failed_steps, reason)

    def link_ended(self, reason: str) -> None:
        """An attachment is over."""
        self.is_attached = False
        self.rows_in_use = 0
        _add_one(self._link_ends, reason)

    def _count(self, metrics: Metrics, thread: ModelThread) -> None:
        before = thread.times()
        metrics.counter(
            "quire.worker.busy_time",
            "Time with a step on the model thread, the one under way included.",
            lambda: [((thread.times().busy_ns - before.busy_ns) / 1e9, {})],
            unit="s",
        )
        metrics.counter(
            "quire.worker.idle_time",
            "Time without a step on the model thread.",
            lambda: [((thread.times().idle_ns - before.idle_ns) / 1e9, {})],
            unit="s",
        )
        metrics.counter(
            "quire.worker.steps", "Steps executed.", lambda: [(self._steps, {})], unit="{step}"
        )
        metrics.counter(
            "quire.worker.tokens",
            "Tokens computed: known when the request came, or sampled here.",
            _by("kind", self._tokens),
            unit="{token}",
        )
        metrics.counter(
            "quire.worker.failed_rows",
            "Requests that could not be computed.",
            _by("reason", self._failed_rows),
            unit="{row}",
        )
        metrics.counter(
            "quire.worker.failed_steps",
            "Steps that failed as a whole, and their attachment with them.",
            _by("reason", self._failed_steps),
            unit="{step}",
        )
        metrics.counter(
            "quire.worker.link_ends",
            "Attachments that are over.",
            _by("reason", self._link_ends),
        )

    def _show(self, metrics: Metrics, limits: StepLimits, footprint: Footprint) -> None:
        metrics.gauge(
            "quire.worker.attached",
            "1 while a scheduler gives steps, else 0.",
            lambda: [(int(self.is_attached), {})],
        )
        metrics.gauge(
            "quire.worker.rows",
            "Requests held now.",
            lambda: [(self.rows_in_use, {})],
            unit="{row}",
        )
        for name, description, unit, value in (
            ("quire.worker.kv_blocks", "Blocks of the KV cache.", "{block}", limits.num_blocks),
            ("quire.worker.kv_memory", "Memory of the KV cache.", "By", footprint.kv_cache_bytes),
            (
                "quire.worker.threads",
                "Threads of one operation on the CPU.",
                "{thread}",
                footprint.threads,
            ),
            ("quire.worker.load_time", "Time to load the weights.", "s", footprint.load_s),
            (
                "quire.worker.largest_step_memory",
                "Most memory of one step beside weights and KV cache.",
                "By",
                footprint.largest_step_bytes,
            ),
        ):
            metrics.gauge(name, description, _always(value), unit=unit)


def _show_device(metrics: Metrics, device: torch.device) -> None:
    def read() -> list[Point]:
        return [
            (torch.cuda.memory_allocated(device), {"state": "allocated"}),
            (torch.cuda.memory_reserved(device), {"state": "reserved"}),
            (torch.cuda.get_device_properties(device).total_memory, {"state": "total"}),
        ]

    metrics.gauge(
        "quire.worker.device_memory",
        "Memory of the GPU: in tensors, taken by this process, and all there is.",
        read,
        unit="By",
    )


def _always(value: float) -> Callable[[], list[Point]]:
    return lambda: [(value, {})]


def _by(label: str, counts: dict[str, int]) -> Callable[[], list[Point]]:
    return lambda: [(count, {label: name}) for name, count in list(counts.items())]


def _add_one(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
