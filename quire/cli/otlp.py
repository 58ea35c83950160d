"""Sends the spans of a command to an OTLP receiver over gRPC.

Imported only when asked for: it needs OpenTelemetry's SDK, which the extra `tracing` brings.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from quire.version import VERSION

_LAST_WORDS_S = 2.0


class _Exporter(OTLPSpanExporter):
    """Knows whether all spans were taken."""

    has_failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.has_failed = self.has_failed or result is not SpanExportResult.SUCCESS
        return result


def begin(url: str) -> Callable[[], bool]:
    """Makes this process trace.

    Args:
        url: of the receiver.

    Returns:
        What to call at the end: sends what is left, for two seconds at most, and says whether all
        was taken.
    """
    # The library tells of each try; a command has one line for it.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    logging.getLogger("opentelemetry").propagate = False
    exporter = _Exporter(endpoint=url, timeout=_LAST_WORDS_S)
    processor = BatchSpanProcessor(exporter)
    name = os.environ.get("OTEL_SERVICE_NAME") or "quire-cli"
    resource = Resource.create({"service.name": name, "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)

    def end() -> bool:
        # A daemon, so that a receiver that says nothing does not keep the command.
        last = threading.Thread(target=processor.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_WORDS_S)
        return not (last.is_alive() or exporter.has_failed)

    return end
