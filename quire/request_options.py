"""What a caller of the client may say about a request beside its prompt: checked, and filled in."""

import re
import secrets
import uuid
from dataclasses import dataclass
from typing import TypedDict

from quire import codec
from quire.errors import InvalidRequest
from quire.params import SamplingParams, Scheduling

_LONGEST_ID = 128
_NEVER_S = 1e9
"""A deadline that far away is none; gRPC cannot count so far."""

_NO_SCHEDULING = Scheduling()

_TRACEPARENT = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")


class CallOptions(TypedDict, total=False):
    """Keywords of `AsyncClient.generate` that its one-shot variants take too."""

    request_id: str | None
    deadline_s: float | None
    traceparent: str | None
    scheduling: Scheduling | None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request, whatever the number of its calls.

    Attributes:
        request_id: given or minted.
        seed: given or drawn.
        deadline_s: seconds for all its calls; None without limit.
        traceparent: W3C trace context.
        scheduling: how urgent it is.
    """

    request_id: str
    seed: int
    deadline_s: float | None
    traceparent: str | None
    scheduling: Scheduling

    @classmethod
    def of(
        cls,
        params: object,
        request_id: str | None,
        deadline_s: float | None,
        traceparent: str | None,
        scheduling: object,
    ) -> "RequestOptions":
        """Checks what the caller gave and fills in the rest.

        Raises:
            InvalidRequest: one of them is wrong; names it.
        """
        if params is None:
            seed = None
        elif isinstance(params, SamplingParams):
            seed = params.seed
        else:
            kind = type(params).__name__
            raise InvalidRequest("params", f"must be SamplingParams, got {kind}")
        if scheduling is None:
            scheduling = _NO_SCHEDULING
        elif not isinstance(scheduling, Scheduling):
            kind = type(scheduling).__name__
            raise InvalidRequest("scheduling", f"must be Scheduling, got {kind}")
        limits = (_checked_deadline(deadline_s), scheduling.deadline_s)
        return cls(
            _checked_id(request_id) or f"q-{uuid.uuid4().hex}",
            # 53 bits: what JSON readers that know only doubles can hold.
            secrets.randbits(53) if seed is None else seed,
            min((limit for limit in limits if limit is not None), default=None),
            _checked_traceparent(traceparent),
            scheduling,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of its calls."""
        return () if self.traceparent is None else (("traceparent", self.traceparent),)


def _checked_id(request_id: object) -> str:
    if request_id is None:
        return ""
    text = codec.checked_text(request_id, "request_id")
    if (size := len(text.encode())) > _LONGEST_ID:
        raise InvalidRequest("request_id", f"must be at most {_LONGEST_ID} bytes, got {size}")
    return text


def _checked_deadline(deadline_s: object) -> float | None:
    if deadline_s is None:
        return None
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
        raise InvalidRequest("deadline_s", f"must be a number of seconds, got {deadline_s!r}")
    if not deadline_s > 0:
        raise InvalidRequest("deadline_s", f"must be > 0, got {deadline_s}")
    return None if deadline_s >= _NEVER_S else float(deadline_s)


def _checked_traceparent(traceparent: object) -> str | None:
    if traceparent is None:
        return None
    if not isinstance(traceparent, str) or not _TRACEPARENT.fullmatch(traceparent):
        raise InvalidRequest("traceparent", "must be 1 to 512 printable ASCII characters")
    return traceparent
