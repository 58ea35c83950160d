"""Metrics of one process: instruments, the Prometheus endpoint, the push to a collector.

Counters and gauges are OpenTelemetry's, read when somebody collects. Histograms are our own, joined
to what OpenTelemetry's readers give: one record costs a bisection (0.5 µs; the SDK's takes about
7 µs), and equal values are recorded at once, so that a step of many rows can be counted.

Recording happens on the event loop, collecting on a thread of its reader. Knows nothing of tokens.
"""

import asyncio
import bisect
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from services.chassis.metrics_endpoint import MetricsEndpoint
from services.chassis.process import StartupError
from services.chassis.tracing import EXPORT_CHANNEL

log = logging.getLogger(__name__)

T = TypeVar("T")

SCOPE = "quire"
"""Name of the instrumentation scope of all of ours."""

LATENCY_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bounds of times to a first token, seconds; those of vLLM."""

GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bounds of times between tokens, seconds; those of vLLM and three finer ones."""

DURATION_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Bounds of whole requests and their parts, seconds; those of vLLM and three finer ones."""

STEP_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Bounds of steps and their parts, seconds."""

LAG_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Bounds of the lateness of an event loop, seconds."""

_MOST_SERIES = 256
"""Label sets of one histogram; what comes after them counts as `OTHER`."""

OTHER = "other"

_UNKNOWN: Any = None
"""For values that are optional on the wire and that the SDK's class does not allow to leave out."""

_LOOP_TIMEOUT_S = 1.0
_FRESH_S = 0.2
_LAG_PERIOD_S = 0.1
_PUSH_PERIOD_MS = 10_000
_PUSH_TIMEOUT_S = 5
_LAST_WORDS_MS = 2_000


class Histogram:
    """Counts of values in buckets, for each set of labels.

    Args:
        name: in OpenTelemetry's form, `quire.request.queue_time`.
        unit: "s", "{token}" or "".
        description: one sentence.
        bounds: upper bounds of the buckets, ascending; the last bucket is unbounded.
        labels: names of the labels.
    """

    def __init__(
        self,
        name: str,
        *,
        unit: str,
        description: str,
        bounds: Sequence[float],
        labels: Sequence[str],
    ) -> None:
        self._name = name
        self._unit = unit
        self._description = description
        self._bounds = tuple(map(float, bounds))
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], _Series] = {}
        self._began_ns = time.time_ns()
        if not self._labels:
            self._begin(())

    def record(self, value: float, *labels: str, times: int = 1) -> None:
        """Counts a value, so many times, under these labels, one for each name.

        No times: the series is there from now on.
        """
        series = self._series.get(labels) or self._begin(labels)
        series.counts[bisect.bisect_left(self._bounds, value)] += times
        series.sum += value * times

    def metric(self) -> Metric:
        """Everything counted so far, as OpenTelemetry exports it."""
        now = time.time_ns()
        points = []
        for labels, series in list(self._series.items()):
            counts = list(series.counts)
            points.append(
                HistogramDataPoint(
                    attributes=dict(zip(self._labels, labels, strict=True)),
                    start_time_unix_nano=self._began_ns,
                    time_unix_nano=now,
                    count=sum(counts),
                    sum=series.sum,
                    bucket_counts=counts,
                    explicit_bounds=self._bounds,
                    min=_UNKNOWN,
                    max=_UNKNOWN,
                )
            )
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return Metric(self._name, self._description, self._unit, data)

    def _begin(self, labels: tuple[str, ...]) -> "_Series":
        if len(self._series) >= _MOST_SERIES:
            labels = (OTHER,) * len(self._labels)
        return self._series.setdefault(labels, _Series(len(self._bounds) + 1))


class _Series:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class LoopValue(Generic[T]):
    """A value that only an event loop may read, for the threads that collect.

    Args:
        loop: whose value it is.
        read: gives it; called on the loop.
        at_first: what is given until the loop has answered once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], T], at_first: T) -> None:
        self._loop = loop
        self._read = read
        self._lock = threading.Lock()
        self._value = at_first
        self._read_at = float("-inf")

    def get(self) -> T:
        """The value now, or the last one where the loop does not answer within a second.

        All readings of one collection get the same value, and wait once.
        """
        with self._lock:
            if time.monotonic() - self._read_at < _FRESH_S:
                return self._value
            answer: concurrent.futures.Future[T] = concurrent.futures.Future()

            def ask() -> None:
                try:
                    answer.set_result(self._read())
                except Exception as error:  # noqa: BLE001 - raised where it was asked for
                    answer.set_exception(error)

            try:
                self._loop.call_soon_threadsafe(ask)
                self._value = answer.result(_LOOP_TIMEOUT_S)
            except (RuntimeError, TimeoutError):  # the loop is closed, or busy
                log.debug("the event loop did not answer; the last values are given")
            self._read_at = time.monotonic()
            return self._value


Point = tuple[float, Mapping[str, str]]
"""A value and its labels."""


class Metrics:
    """The instruments of one process.

    Args:
        resource: what the process is.
        prometheus: give them to a Prometheus endpoint (`serve`).
        push_to: URL of an OTLP receiver, or None.
    """

    def __init__(self, resource: Resource, *, prometheus: bool, push_to: str | None) -> None:
        self._histograms: list[Histogram] = []
        self._inner = CollectorRegistry()
        readers: list[_PrometheusReader | _PushReader] = []
        if prometheus:
            readers.append(_PrometheusReader(self._histograms, self._inner))
        if push_to is not None:
            readers.append(_PushReader(self._histograms, push_to))
        self.provider = MeterProvider(readers, resource)
        self._meter = self.provider.get_meter(SCOPE)
        self._http: MetricsEndpoint | None = None

    def histogram(
        self,
        name: str,
        description: str,
        *,
        bounds: Sequence[float],
        unit: str = "s",
        labels: Sequence[str] = (),
    ) -> Histogram:
        """A new histogram; see Histogram."""
        made = Histogram(name, unit=unit, description=description, bounds=bounds, labels=labels)
        self._histograms.append(made)
        return made

    def counter(
        self, name: str, description: str, read: Callable[[], Iterable[Point]], *, unit: str = ""
    ) -> None:
        """Totals that only grow; `read` is called on the thread that collects."""
        self._meter.create_observable_counter(name, [_observed(read)], unit, description)

    def gauge(
        self, name: str, description: str, read: Callable[[], Iterable[Point]], *, unit: str = ""
    ) -> None:
        """Values of now; `read` is called on the thread that collects."""
        self._meter.create_observable_gauge(name, [_observed(read)], unit, description)

    def serve(
        self,
        host: str,
        port: int,
        also: Callable[[Mapping[str, Family]], Iterable[Family]] | None = None,
    ) -> int:
        """Starts the Prometheus endpoint, on a thread of its own.

        Args:
            host: to listen on.
            port: to listen on, 0 for any free one.
            also: makes further families of ours, by name, e.g. under names that others know.

        Returns:
            The port.

        Raises:
            StartupError: it cannot be bound.
        """
        registry = CollectorRegistry()
        registry.register(_Collector(self._inner, also))
        try:
            self._http = MetricsEndpoint(host, port, registry)
        except OSError as error:
            raise StartupError(
                f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        return self._http.port

    def close(self) -> None:
        """Ends the endpoint and pushes what is left, for two seconds at most; blocks."""
        if self._http is not None:
            self._http.close()
            self._http = None
        self.provider.shutdown(_LAST_WORDS_MS)


async def watch_lag(lag: Histogram) -> None:
    """Records how late a timer of 100 ms fires on this event loop, seconds; for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lag.record(max(0.0, loop.time() - due))


@dataclass(frozen=True, slots=True)
class _Collector(Collector):
    """What the readers give, and what is made of it."""

    inner: CollectorRegistry
    also: Callable[[Mapping[str, Family]], Iterable[Family]] | None

    def collect(self) -> Iterator[Family]:
        families = {family.name: family for family in self.inner.collect()}
        yield from families.values()
        if self.also is not None:
            yield from self.also(families)


class _PrometheusReader(PrometheusMetricReader):
    def __init__(self, histograms: Sequence[Histogram], registry: CollectorRegistry) -> None:
        super().__init__(scope_info_enabled=False, registry=registry)
        self._histograms = histograms

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> None:
        super()._receive_metrics(_with(metrics_data, self._histograms), timeout_millis, **kwargs)


class _PushReader(PeriodicExportingMetricReader):
    def __init__(self, histograms: Sequence[Histogram], url: str) -> None:
        self._histograms = histograms  # before the thread starts
        exporter = OTLPMetricExporter(
            endpoint=url, timeout=_PUSH_TIMEOUT_S, channel_options=EXPORT_CHANNEL
        )
        super().__init__(exporter, _PUSH_PERIOD_MS)

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> None:
        super()._receive_metrics(_with(metrics_data, self._histograms), timeout_millis, **kwargs)


def _with(data: MetricsData, histograms: Sequence[Histogram]) -> MetricsData:
    """`data`, our histograms included."""
    made = [metric for metric in (one.metric() for one in histograms) if metric.data.data_points]
    resource = data.resource_metrics[0]
    # One group for each scope: of two of one name the exporter would send the second alone.
    known = [group for group in resource.scope_metrics if group.scope.name == SCOPE]
    others = [group for group in resource.scope_metrics if group.scope.name != SCOPE]
    made += [metric for group in known for metric in group.metrics]
    ours = ScopeMetrics(InstrumentationScope(SCOPE), made, "")
    whole = ResourceMetrics(resource.resource, [*others, ours], resource.schema_url)
    return MetricsData([whole, *data.resource_metrics[1:]])


def _observed(
    read: Callable[[], Iterable[Point]],
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def call(_: CallbackOptions) -> list[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    return call
