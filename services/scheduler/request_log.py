"""One log line per request at its end, with the account of where its time went; no tokens."""

import logging

from services.chassis.logs import fields
from services.chassis.tracing import context_of
from services.scheduler.core.plan import Ended
from services.scheduler.watching import Watching

log = logging.getLogger(__name__)


class RequestLog(Watching):
    """Writes the lines. See docs/operations.md for what each field means."""

    def ended(self, end: Ended, now: int) -> None:
        """See Watcher."""
        del now
        if not log.isEnabledFor(logging.INFO):
            return
        context = context_of(end.traceparent)
        log.info(
            "request ended",
            extra=fields(
                request_id=end.request_id,
                reason=end.reason.value,
                priority_class=end.class_name,
                tenant=end.tenant or None,
                prompt_tokens=end.prompt_tokens,
                completion_tokens=end.completion_tokens,
                cached_tokens=end.cached_tokens,
                recomputed_tokens=end.recomputed_tokens,
                preemptions=end.preemptions,
                requeues=end.requeues,
                queue_ms=_ms(end.arrived, end.ended if end.admitted is None else end.admitted),
                requeued_ms=end.requeued_us / 1000 if end.requeued_us else None,
                prefill_ms=_ms(end.admitted, end.first_token),
                decode_ms=_ms(end.first_token, end.ended),
                total_ms=_ms(end.arrived, end.ended),
                worker=end.worker_id or None,
                worker_ms=end.worker_us / 1000,
                trace_id=None if context is None else f"{context.trace_id:032x}",
            ),
        )


def _ms(begin: int | None, end: int | None) -> float | None:
    """Milliseconds between two instants, None where one never came."""
    return None if begin is None or end is None else (end - begin) / 1000
