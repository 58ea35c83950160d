"""Traces of one process: the way of W3C trace context, and the exporter of spans.

A span is made by hand and ended by hand: no current span is kept across a `yield`, and long-lived
streams (Session, Attach, Watch) are no spans. Knows nothing of tokens; what a span is called and
says is the service's.
"""

import logging
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, TraceFlags, Tracer

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_BATCH_DELAY_MS = 1_000
_QUEUED_SPANS = 8_192
EXPORT_CHANNEL: Any = (("grpc.max_reconnect_backoff_ms", 5_000),)  # the SDK's type knows no numbers
"""Of channels to a receiver: one that is back is found soon."""

_EXPORT_TIMEOUT_S = 5.0
_LAST_WORDS_S = 2.0
"""How long the last spans may take to leave."""


def valid_traceparent(value: str) -> str:
    """`value` if it is a W3C traceparent, else "" (the standard asks to restart the trace then)."""
    return value if context_of(value) is not None else ""


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent in a call's metadata, or ""."""
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str):
            return valid_traceparent(value)
    return ""


def passed_on(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What the handler of a call passes on: the call's own span, or else what its caller sent.

    Never the caller's where there is one of its own: what follows is below that, not beside it.
    """
    own = written(trace.get_current_span().get_span_context())
    return own or traceparent_of(metadata)


def context_of(traceparent: str) -> SpanContext | None:
    """The span that a traceparent names, or None where it is none."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match[1] == "ff":
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(int(match[4], 16)))


def is_sampled(traceparent: str) -> bool:
    """Whether spans are kept of the trace that this names."""
    context = context_of(traceparent)
    return context is not None and context.trace_flags.sampled


def written(context: SpanContext) -> str:
    """The traceparent that names a span, "" for an invalid one."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id() -> str | None:
    """The trace that the call belongs to in whose task this is; None for none."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


def child_of(traceparent: str) -> Context:
    """What to give as `context` for a span below the one that this names; "" begins a trace."""
    parent = context_of(traceparent)
    if parent is None:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def below(span: Span) -> Context:
    """What to give as `context` for a span below this one."""
    return trace.set_span_in_context(span, Context())


class Tracing:
    """Makes spans and sends them to an OTLP receiver over gRPC, on a thread of its own.

    A receiver that is away costs its spans and nothing else: they wait in a bounded queue, and the
    newest are dropped.

    Args:
        resource: what the process is.
        url: of the receiver; None: what the variables of OpenTelemetry name.
        ratio: share of the traces that begin here and are kept; None: what OTEL_TRACES_SAMPLER
            says, else all. Of a trace that began elsewhere the caller has decided.
    """

    def __init__(self, resource: Resource, *, url: str | None, ratio: float | None) -> None:
        self._exporter = _Exporter(
            endpoint=url, timeout=_EXPORT_TIMEOUT_S, channel_options=EXPORT_CHANNEL
        )
        self._processor = _Processor(self._exporter)
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracer: Tracer = provider.get_tracer("quire")
        # For spans that begin a trace and whose maker has decided already that they are kept.
        chosen = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        chosen.add_span_processor(self._processor)
        self.chosen_tracer: Tracer = chosen.get_tracer("quire")

    def counts(self) -> list[tuple[float, dict[str, str]]]:
        """Spans so far by what became of them: sent, failed (not taken), dropped (no room)."""
        exporter = self._exporter
        found = {
            "sent": exporter.sent,
            "failed": exporter.failed,
            "dropped": self._processor.dropped,
        }
        return [(float(count), {"outcome": outcome}) for outcome, count in found.items()]

    def close(self) -> None:
        """Sends what is left, for two seconds at most; blocks."""
        # A daemon, so that an exporter that waits for a dead receiver does not keep the process.
        last = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_WORDS_S)
        if last.is_alive():
            self._exporter.shutdown()  # ends the retries
            last.join(0.5)
            log.warning("the last spans could not be sent in time")


class _Exporter(OTLPSpanExporter):
    """Counts what it sends; only one thread sends at a time."""

    sent = 0
    failed = 0

    @property
    def taken(self) -> int:
        """Spans that have left the queue."""
        return self.sent + self.failed + self._under_way

    _under_way = 0
    _is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._under_way = len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        except ValueError:
            if not self._shutdown:
                raise  # else it was shut down between two batches: `close` says so
        finally:
            self._under_way = 0
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
                if self._is_away:
                    log.info("the receiver takes spans again")
            else:
                self.failed += len(spans)
            self._is_away = result is not SpanExportResult.SUCCESS
        return result


class _Processor(BatchSpanProcessor):
    """Counts what finds no room in the queue."""

    def __init__(self, exporter: _Exporter) -> None:
        super().__init__(
            exporter, max_queue_size=_QUEUED_SPANS, schedule_delay_millis=_BATCH_DELAY_MS
        )
        self._counts = exporter
        self._ended = 0
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended += 1
            if self._ended - self.dropped - self._counts.taken > _QUEUED_SPANS:
                self.dropped += 1
        super().on_end(span)
