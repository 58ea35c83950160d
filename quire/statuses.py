"""The one table from gRPC statuses and google.rpc details to the errors of `quire.errors`."""

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from quire.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotSupported,
    Overloaded,
    PreconditionFailed,
    QuireError,
    Replaced,
    ServerError,
    ServerFault,
    TooLarge,
    Unavailable,
    Unreachable,
)

_NO_SUCH_METHOD = re.compile(r"method not found|unknown (method|service)", re.IGNORECASE)
_SIZES = re.compile(r"(\d+) vs\. (\d+)")

_DETAILS = "grpc-status-details-bin"

_TABLE: MappingProxyType[grpc.StatusCode, type[ServerError]] = MappingProxyType(
    {
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
        grpc.StatusCode.FAILED_PRECONDITION: PreconditionFailed,
        grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
        grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.ABORTED: Replaced,
    }
)
"""Every code that is not here and is no fault of the request is a ServerFault."""


def error_of(failure: grpc.RpcError, target: str, *, service: str = "TextService") -> QuireError:
    """The error behind a failed call.

    Args:
        failure: what a stub raised; of the sync or the asyncio stack.
        target: whom the call was meant for, for the message.
        service: what was asked there, likewise.
    """
    call: Any = failure
    code, text = call.code(), " ".join((call.details() or "").split())
    status = _status(call.trailing_metadata() or ())
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return _invalid(status, text)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        if status is None and _NO_SUCH_METHOD.search(text):
            where = "; texts are answered by a tokenizer, not by a scheduler or a worker"
            return NotSupported(
                f"there is no {service} at {target}{where if service == 'TextService' else ''}"
            )
        return NotSupported(text)
    if code is grpc.StatusCode.UNAVAILABLE and status is None:
        # Our servers send details with it; without any, it is the transport that speaks.
        return Unreachable(
            f"cannot reach {target} ({text.rpartition(': ')[2].rstrip(']') or 'no reason given'})"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and status is None:
        return DeadlineExceeded(f"{target} did not finish within the time given")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        sizes = _SIZES.search(text)
        size, limit = sizes.groups() if sizes else ("?", "?")
        return TooLarge(f"a message of {size} bytes is over the limit of {limit} bytes")
    kind = _TABLE.get(code, ServerFault)
    return kind(
        text or f"{target} answered {code.name}",
        reason=_reason(status),
        retry_after_s=_retry_after_s(status),
    )


def _status(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == _DETAILS and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _invalid(status: status_pb2.Status | None, text: str) -> InvalidRequest:
    bad = error_details_pb2.BadRequest()
    if _unpack(status, bad) and bad.field_violations:
        first, *others = ((wrong.field, wrong.description) for wrong in bad.field_violations)
        return InvalidRequest(*first, *others)
    return InvalidRequest("", text)


def _reason(status: status_pb2.Status | None) -> str:
    info = error_details_pb2.ErrorInfo()
    return str(info.reason) if _unpack(status, info) else ""


def _retry_after_s(status: status_pb2.Status | None) -> float | None:
    retry = error_details_pb2.RetryInfo()
    return retry.retry_delay.ToMilliseconds() / 1000 if _unpack(status, retry) else None


def _unpack(status: status_pb2.Status | None, into: Any) -> bool:
    """Fills `into` from the first detail of its type; False if there is none."""
    return status is not None and any(detail.Unpack(into) for detail in status.details)
