"""The settings of logs, metrics and traces, which all services have."""

from dataclasses import dataclass
from typing import Any

from services.chassis.settings import setting


def metrics_port_setting(default: int) -> Any:
    """The setting `metrics_port`."""
    return setting(
        help="port of the metrics, 0 for any free one",
        default=default,
        check=lambda value: 0 <= value <= 65535,
        rule="must be in 0..65535",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Settings that every service has; each gives its own default of `metrics_port`."""

    log_level: str = setting(
        help="least severe log line: debug, info, warning, error",
        default="info",
        check=lambda value: value in ("debug", "info", "warning", "error"),
        rule="must be one of debug, info, warning, error",
    )
    log_format: str = setting(
        help="form of the log lines: text or json",
        default="text",
        check=lambda value: value in ("text", "json"),
        rule="must be text or json",
    )
    enable_metrics: bool = setting(help="serve metrics in Prometheus' format", default=False)
    metrics_host: str = setting(help="where to serve metrics", default="127.0.0.1")
    metrics_port: int = metrics_port_setting(0)
    otlp_metrics_endpoint: str | None = setting(
        help="OTLP receiver (gRPC) to push metrics to, e.g. http://127.0.0.1:4317",
        default=None,
        check=lambda value: value.startswith(("http://", "https://")),
        rule="must begin with http:// or https://",
    )
    otlp_traces_endpoint: str | None = setting(
        help="OTLP receiver (gRPC) to send traces to, e.g. http://127.0.0.1:4317",
        default=None,
        check=lambda value: value.startswith(("http://", "https://")),
        rule="must begin with http:// or https://",
    )
    trace_sample_ratio: float | None = setting(
        help="share of the traces begun here that are kept, 0 to 1; default: all",
        default=None,
        check=lambda value: 0 <= value <= 1,
        rule="must be in [0, 1]",
    )
