"""Whether a request that ended was served as it wanted to be: what goodput counts."""

from services.scheduler.core.plan import EndReason
from services.scheduler.core.request import Request

_SERVED = (EndReason.STOP, EndReason.LENGTH)
_NOT_JUDGED = (EndReason.ABORT, EndReason.REPLACED)


def met_targets(
    request: Request, reason: EndReason, tokens: int, now: int, tpot_target_us: int | None
) -> bool | None:
    """Whether a request met its targets for the first token and for the time between tokens.

    Args:
        request: as it ends.
        reason: why it ends.
        tokens: output tokens it has.
        now: microseconds.
        tpot_target_us: the target between tokens of requests that bring none.

    Returns:
        None where it had no target, or its owner ended it.
    """
    tpot = request.spec.tpot_target_us or tpot_target_us
    ttft = request.ttft_target_us
    if (ttft is None and tpot is None) or reason in _NOT_JUDGED:
        return None
    if reason not in _SERVED:
        return False
    if request.first_token is None:
        return None  # an earlier attempt had its first token
    in_time = ttft is None or request.first_token - request.arrived <= ttft
    own = tokens - int(request.spec.resumed.size)
    fluent = tpot is None or own < 2 or now - request.first_token <= tpot * (own - 1)
    return in_time and fluent
