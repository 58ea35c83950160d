"""The span of one request of the client, made by the application's own tracer provider.

One span for all attempts, from the first to the last message; its context travels with each call.
It is never the current one, so that nothing is left behind where the application stops reading.
With OpenTelemetry's API alone and no provider, a trace that the application is in passes through.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.answers import Delta
from quire.errors import QuireError, ServerError
from quire.params import SamplingParams
from quire.request_options import RequestOptions

_OPERATIONS: Mapping[str, str] = MappingProxyType({"Generate": "text_completion", "Chat": "chat"})
_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_INT = 2**63 - 1
"""What the wire format of spans holds."""


def make_tracer() -> Tracer:
    """The tracer of the provider that the application sets, now or later."""
    return trace.get_tracer("quire")


class RequestSpan:
    """One request, from its first attempt on; `end` it in any case.

    Args:
        tracer: makes the span.
        rpc: "Generate" or "Chat".
        ask: the request; its `traceparent` counts before the application's current span.
        params: how it is sampled, and when it stops.
    """

    def __init__(
        self, tracer: Tracer, rpc: str, ask: RequestOptions, params: SamplingParams
    ) -> None:
        given = ask.metadata()
        parent = _PROPAGATOR.extract(dict(given)) if given else None
        self._span = tracer.start_span(_OPERATIONS[rpc], parent, SpanKind.CLIENT)
        self._began = time.perf_counter()
        self._is_told = self._span.is_recording()
        self._has_ended = False
        self._has_chunk = False
        context = self._span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else ""
        """Of the trace it belongs to, hex; "" for none."""
        self.metadata = given
        """Of the calls."""
        if context.is_valid:
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
            self.metadata = tuple(carrier.items())
        if self._is_told:
            self._say(_asked(_OPERATIONS[rpc], ask, params))

    def attempt(self, target: str, number: int, tokens: int, failure: QuireError | None) -> None:
        """The request goes to a server.

        Args:
            target: its address.
            number: of the attempt, from 0.
            tokens: that have come before.
            failure: of the attempt before.
        """
        if not self._is_told:
            return
        place = _place(target)
        if failure is None:
            self._say(place)
            return
        name = "resumed" if tokens else "retried"
        said = {**place, "quire.attempt": number, "quire.tokens": tokens}
        self._span.add_event(name, {**said, "quire.reason": type(failure).__name__})

    def took(self, delta: Delta) -> None:
        """Something came."""
        if not self._is_told:
            return
        if not self._has_chunk:
            self._has_chunk = True
            waited_s = time.perf_counter() - self._began
            self._say({"gen_ai.response.time_to_first_chunk": waited_s})
        if delta.finished is not None:
            self._has_ended = True
            usage = delta.finished.usage
            self._say(
                {
                    "gen_ai.response.finish_reasons": [delta.finished.reason],
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                }
            )

    def failed(self, error: Exception) -> None:
        """No answer, or no whole one."""
        self._has_ended = True
        if self._is_told:
            reason = error.reason if isinstance(error, ServerError) else ""
            self._say({"error.type": type(error).__name__, "quire.error.reason": reason or None})
            self._span.set_status(StatusCode.ERROR, str(error))

    def end(self) -> None:
        """Nothing more is read."""
        if self._is_told and not self._has_ended:
            self._say({"quire.left_early": True})
        self._span.end()

    def _say(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(
            {name: value for name, value in attributes.items() if value is not None}
        )


def _asked(operation: str, ask: RequestOptions, params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": ask.seed if ask.seed <= _MAX_INT else None,
        "gen_ai.request.id": ask.request_id,
        "gen_ai.response.id": ask.request_id,
    }


def _place(target: str) -> dict[str, str | int]:
    """An address in the names of the conventions."""
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal():
        return {"server.address": target.partition("://")[2] or target}
    return {"server.address": host.strip("[]"), "server.port": int(port)}
