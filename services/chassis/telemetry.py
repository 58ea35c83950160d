"""What a service tells of itself: start and end of its metrics, traces and logs.

Owns no instrument and no span: `metrics` and `tracing` have the means, the services use them.
"""

import asyncio
import logging
import os
import platform
import resource as usage
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.sdk.resources import Resource
from prometheus_client.metrics_core import Metric as Family

from services.chassis.logs import configure_logs
from services.chassis.metrics import LAG_S, Histogram, Metrics, Point, watch_lag
from services.chassis.rpc_telemetry import RpcTelemetry
from services.chassis.telemetry_settings import TelemetrySettings
from services.chassis.tracing import Tracing

log = logging.getLogger(__name__)

_NAMESPACE = "quire"
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Telemetry:
    """Metrics and traces of this process, each None where it is not asked for.

    Args:
        settings: of the process.
        service: its name, e.g. "scheduler".
        version: of the software.
        env: the environment; OpenTelemetry's own variables count where a setting is left out.
    """

    def __init__(
        self, settings: TelemetrySettings, *, service: str, version: str, env: Mapping[str, str]
    ) -> None:
        configure_logs(service, settings.log_level, settings.log_format)
        self._settings = settings
        self.instance_id = uuid.uuid4().hex
        """Of this process; a fresh one at each start."""
        disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        anywhere = env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        push_to = (
            settings.otlp_metrics_endpoint
            or env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
            or anywhere
        )
        traces_to = (
            settings.otlp_traces_endpoint
            or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
            or anywhere
        )
        self.metrics: Metrics | None = None
        self.tracing: Tracing | None = None
        self._lag: Histogram | None = None
        resource = Resource.create(
            {
                "service.name": env.get("OTEL_SERVICE_NAME") or f"{_NAMESPACE}-{service}",
                "service.namespace": _NAMESPACE,
                "service.version": version,
                "service.instance.id": self.instance_id,
                "host.name": platform.node(),
            }
        )
        if settings.enable_metrics or (push_to and not disabled):
            self.metrics = Metrics(
                resource,
                prometheus=settings.enable_metrics,
                push_to=None if disabled else push_to,
            )
            self._watch_process(self.metrics)
        if traces_to and not disabled:
            self.tracing = Tracing(resource, url=traces_to, ratio=settings.trace_sample_ratio)
            if self.metrics is not None:
                self.metrics.counter(
                    "quire.trace.spans",
                    "Spans by what became of them: sent, failed, dropped.",
                    self.tracing.counts,
                    unit="{span}",
                )
            log.info("traces go to %s", traces_to)

    def observers(self) -> list[RpcTelemetry]:
        """Interceptors for the servers of the process."""
        if self.metrics is None and self.tracing is None:
            return []
        tracer = self.tracing.tracer if self.tracing else None
        return [RpcTelemetry(tracer, self.metrics)]

    def serve(self, also: Callable[[Mapping[str, Family]], Iterable[Family]] | None = None) -> None:
        """Starts the Prometheus endpoint, if there is to be one; call it when all instruments are.

        Args:
            also: see `Metrics.serve`.

        Raises:
            StartupError: it cannot be bound.
        """
        if self.metrics is not None and self._settings.enable_metrics:
            host = self._settings.metrics_host
            port = self.metrics.serve(host, self._settings.metrics_port, also)
            log.info("metrics on http://%s:%d/metrics", host, port)

    async def run(self) -> None:
        """Watches the event loop where there are metrics; for ever."""
        if self._lag is None:
            await asyncio.Event().wait()
        else:
            await watch_lag(self._lag)

    async def close(self) -> None:
        """Sends what is left and ends the endpoint, within three seconds."""
        async with asyncio.TaskGroup() as closing:
            for part in (self.tracing, self.metrics):
                if part is not None:
                    closing.create_task(asyncio.to_thread(part.close))

    def _watch_process(self, metrics: Metrics) -> None:
        self._lag = metrics.histogram(
            "quire.loop.lag",
            "How late a timer of 100 ms fires on the event loop.",
            bounds=LAG_S,
        )
        metrics.counter("process.cpu.time", "Processor time of the process.", _cpu_time, unit="s")
        metrics.gauge(
            "process.memory.usage", "Resident memory of the process.", _resident, unit="By"
        )
        metrics.gauge("process.thread.count", "Threads of Python.", _threads, unit="{thread}")
        began = time.monotonic()
        metrics.gauge(
            "process.uptime",
            "Time since the process told first.",
            lambda: [(time.monotonic() - began, {})],
            unit="s",
        )


def _cpu_time() -> list[Point]:
    spent = usage.getrusage(usage.RUSAGE_SELF)
    return [
        (spent.ru_utime, {"cpu.mode": "user"}),
        (spent.ru_stime, {"cpu.mode": "system"}),
    ]


def _resident() -> list[Point]:
    with open("/proc/self/statm", encoding="ascii") as file:
        return [(float(file.read().split()[1]) * _PAGE, {})]


def _threads() -> list[Point]:
    return [(float(threading.active_count()), {})]
