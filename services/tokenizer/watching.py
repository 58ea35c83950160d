"""One request under observation: its span, its children, and what is counted when it ends.

Owns the names of the GenAI conventions at this edge. Made only where the process traces or counts;
a request that nobody watches makes none of it. The span of the call is the chassis's, which begins
and ends it; here it gets its name and what it says. Knows no protobuf.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer

from services.chassis.errors import InvalidArgument, ServiceError
from services.chassis.rpc_telemetry import status_of_call
from services.chassis.tracing import below
from services.tokenizer.detokenizer import IncrementalDetokenizer
from services.tokenizer.domain import ChatMessage, TextEnd, TextMessage, ValidOptions
from services.tokenizer.metrics import Outcome, TokenizerMetrics

CHAT = "chat"
COMPLETION = "text_completion"

MAX_CONTENT = 16 * 1024
"""Most characters of a prompt, and of an answer, in a span."""

_MAX_NAME = 128
_MAX_STOPS = 16
_MAX_STOP = 64
_MAX_INT = 2**63 - 1
"""What the wire format of spans holds; one larger number would cost a whole batch of them."""

# Generic in grpc's stubs, a plain class at run time.
_Context = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """What watches the requests of this process.

    Attributes:
        model: the name that is served.
        tokenizer_digest: of its tokenizer.
        tracer: makes the spans below that of a call, or None.
        metrics: where requests are counted, or None.
        content: whether prompts and answers go into spans.
    """

    model: str
    tokenizer_digest: str
    tracer: Tracer | None
    metrics: TokenizerMetrics | None
    content: bool

    def begin(self, operation: str, context: _Context, model: str, request_id: str) -> "Watch":
        """Watches a request from its arrival to the end of its call.

        Args:
            operation: `CHAT` or `COMPLETION`.
            context: of the call, in whose task this is.
            model: as its caller wrote it.
            request_id: likewise.
        """
        return Watch(self, operation, context, model, request_id)


class Watch:
    """One request. Its block notes the error that it raises; the end of the call ends all.

    A generator that gRPC never comes back to leaves its block late or never, so nothing depends on
    that.
    """

    def __init__(
        self, watchers: Watchers, operation: str, context: _Context, model: str, request_id: str
    ) -> None:
        self._watchers = watchers
        self._operation = operation
        self._began = time.perf_counter()
        self._began_ns = time.time_ns()
        self._span: Span = trace.get_current_span()
        self._traces = watchers.tracer is not None and self._span.is_recording()
        self._shows = self._traces and watchers.content
        self._error: ServiceError | None = None
        self._end: TextEnd | None = None
        self._rendered: tuple[int, int] | None = None
        self._prompt_tokens = 0
        self._detokenizing: TimedDetokenizer | None = None
        self._first_chunk: float | None = None
        self._answer: list[str] = []
        self._answer_room = MAX_CONTENT
        self._submissions = 0
        self._is_over = False
        if self._traces:
            self._span.update_name(f"{operation} {watchers.model}")
            self._say(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "quire",
                    "gen_ai.request.model": _clipped(model or watchers.model, _MAX_NAME),
                    "gen_ai.response.model": watchers.model,
                }
            )
            if request_id:
                self._name(request_id)
        context.add_done_callback(self._over)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, ServiceError):
            self._error = error

    def asked(self, options: ValidOptions) -> None:
        """The request is valid: how it is to be answered."""
        if not self._traces:
            return
        self._name(options.request_id)
        sampling = options.sampling
        said: dict[str, Any] = {
            "gen_ai.request.stream": options.stream,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed if sampling.seed <= _MAX_INT else None,
            "gen_ai.request.max_tokens": options.max_tokens,
            "quire.attempt": options.attempt or None,
            "quire.resumed_tokens": len(options.resumed) or None,
        }
        if options.stop_strings:
            stops = options.stop_strings[:_MAX_STOPS]
            said["gen_ai.request.stop_sequences"] = [_clipped(stop, _MAX_STOP) for stop in stops]
        self._say(said)

    def noting(self, check: Callable[[str], None]) -> Callable[[str], None]:
        """`check`, which is given the text of a conversation before that is encoded; noted."""

        def call(text: str) -> None:
            self._rendered = (time.time_ns(), len(text))
            check(text)

        return call

    def tokenized(self, began_ns: int, prompt: str, tokens: int) -> None:
        """The pool had a prompt since `began_ns`; 0 tokens where it failed."""
        self._show((ChatMessage(role="user", content=prompt),))
        self._child("tokenize", began_ns, {"quire.chars": len(prompt), "quire.tokens": tokens})

    def rendered(self, began_ns: int, messages: Sequence[ChatMessage], tokens: int) -> None:
        """The pool had a conversation since `began_ns`; 0 tokens where it failed."""
        self._show(messages)
        until_ns, chars = self._rendered or (None, 0)
        attributes = {
            "quire.messages": len(messages),
            "quire.chars": chars,
            "quire.tokenizer.digest": self._watchers.tokenizer_digest,
        }
        self._child("render_chat", began_ns, attributes, until_ns)
        if until_ns is not None:
            self._child("tokenize", until_ns, {"quire.chars": chars, "quire.tokens": tokens})

    def decoding(
        self, detokenizer: IncrementalDetokenizer, options: ValidOptions, prompt: Sequence[int]
    ) -> IncrementalDetokenizer:
        """The prompt is ready. Gives the detokenizer to use, which tells when it is used."""
        self._prompt_tokens = len(prompt)
        self._detokenizing = TimedDetokenizer(detokenizer, len(options.resumed))
        return self._detokenizing

    def submitted(self, scheduler: str, attempt: int, tokens: int, why: str) -> None:
        """See SubmissionObserver."""
        self._submissions += 1
        if not self._traces or self._is_over:
            return
        self._say({"quire.scheduler": scheduler})
        if self._submissions > 1:
            self._span.add_event(
                "resubmitted",
                {
                    "quire.scheduler": scheduler,
                    "quire.attempt": attempt,
                    "quire.tokens": tokens,
                    "quire.reason": why,
                },
            )

    def answered(self, message: TextMessage) -> None:
        """A message goes to the caller."""
        if self._first_chunk is None:
            self._first_chunk = time.perf_counter()
        if message.end is not None:
            self._end = message.end
        if self._shows and self._answer_room > 0:
            self._answer.append(message.text)
            self._answer_room -= len(message.text)

    def _over(self, context: _Context) -> None:
        self._is_over = True
        status = status_of_call(context)
        if self._watchers.metrics is not None:
            self._watchers.metrics.ended(self._outcome(status))
        if self._traces:
            self._tell()

    def _outcome(self, status: str) -> Outcome:
        decoding, end = self._detokenizing, self._end
        first = None if decoding is None else decoding.first_token
        made, resumed = (0, 0) if decoding is None else (decoding.tokens, decoding.resumed)
        took_s = time.perf_counter() - self._began
        usage = None if end is None else end.usage
        if first is None and usage is not None and usage.completion_tokens:
            first = self._first_chunk  # its only tokens were those that end it, without text
        return Outcome(
            operation=self._operation,
            status=status,
            reason=self._error.reason if self._error is not None else "",
            duration_s=took_s,
            first_token_s=None if first is None else first - self._began,
            prompt_tokens=self._prompt_tokens if self._submissions else 0,
            output_tokens=made if usage is None else usage.completion_tokens - resumed,
            cached_tokens=0 if usage is None else usage.cached_tokens,
        )

    def _tell(self) -> None:
        end, decoding = self._end, self._detokenizing
        said: dict[str, Any] = {}
        if self._first_chunk is not None:
            said["gen_ai.response.time_to_first_chunk"] = self._first_chunk - self._began
        if end is not None:
            said["gen_ai.response.finish_reasons"] = [end.reason.value]
            said["gen_ai.usage.input_tokens"] = end.usage.prompt_tokens
            said["gen_ai.usage.output_tokens"] = end.usage.completion_tokens
            said["gen_ai.usage.cache_read.input_tokens"] = end.usage.cached_tokens
        elif decoding is not None:
            said["gen_ai.usage.input_tokens"] = self._prompt_tokens
            said["gen_ai.usage.output_tokens"] = decoding.resumed + decoding.tokens
        if self._answer:
            reason = "" if end is None else end.reason.value
            text = "".join(self._answer)
            said["gen_ai.output.messages"] = _as_json(
                (ChatMessage(role="assistant", content=text),), reason
            )
        # Not its message, which may quote what the caller wrote.
        if isinstance(self._error, InvalidArgument):
            said["quire.error.field"] = _clipped(self._error.field, _MAX_NAME)
        self._say(said)
        if decoding is not None and decoding.first is not None:
            self._child(
                "detokenize",
                self._ns(decoding.first),
                {"quire.tokens": decoding.tokens, "quire.busy_time": decoding.busy_s},
                self._ns(decoding.last),
            )

    def _child(
        self,
        name: str,
        began_ns: int,
        attributes: Mapping[str, Any],
        until_ns: int | None = None,
    ) -> None:
        tracer = self._watchers.tracer
        if self._traces and tracer is not None:
            span = tracer.start_span(
                name, below(self._span), attributes=attributes, start_time=began_ns
            )
            span.end(until_ns)

    def _show(self, messages: Sequence[ChatMessage]) -> None:
        if self._shows:
            self._say({"gen_ai.input.messages": _as_json(messages)})

    def _name(self, request_id: str) -> None:
        named = _clipped(request_id, _MAX_NAME)
        self._say({"gen_ai.response.id": named, "gen_ai.request.id": named})

    def _say(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(
            {name: value for name, value in attributes.items() if value is not None}
        )

    def _ns(self, instant: float) -> int:
        return self._began_ns + int((instant - self._began) * 1e9)


class TimedDetokenizer:
    """A detokenizer that notes when it works. Instants are of `time.perf_counter`, seconds.

    Args:
        inner: does the work.
        resumed: tokens that are pushed first and were another call's.
    """

    def __init__(self, inner: IncrementalDetokenizer, resumed: int) -> None:
        self._inner = inner
        self._pushed = 0
        self.resumed = resumed
        self.first: float | None = None
        self.last = 0.0
        self.first_token: float | None = None
        self.busy_s = 0.0

    @property
    def tokens(self) -> int:
        """Those of this call."""
        return max(0, self._pushed - self.resumed)

    def push(self, ids: Sequence[int]) -> str:
        """See IncrementalDetokenizer."""
        if not ids:
            return self._inner.push(ids)
        began = time.perf_counter()
        text = self._inner.push(ids)
        self._worked(began)
        self._pushed += len(ids)
        if self.first_token is None and self._pushed > self.resumed:
            self.first_token = began
        return text

    def flush(self) -> str:
        """See IncrementalDetokenizer."""
        began = time.perf_counter()
        text = self._inner.flush()
        self._worked(began)
        return text

    def _worked(self, began: float) -> None:
        if self.first is None:
            self.first = began
        self.last = time.perf_counter()
        self.busy_s += self.last - began


def _as_json(messages: Sequence[ChatMessage], finish_reason: str = "") -> str:
    """Messages in the form of the GenAI conventions, at most MAX_CONTENT characters of them."""
    room = MAX_CONTENT
    said = []
    for message in messages:
        if room <= 0:
            break
        content = _clipped(message.content, room)
        room -= len(content)
        one: dict[str, Any] = {
            "role": _clipped(message.role, _MAX_NAME),
            "parts": [{"type": "text", "content": content}],
        }
        if finish_reason:
            one["finish_reason"] = finish_reason
        said.append(one)
    return json.dumps(said)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
