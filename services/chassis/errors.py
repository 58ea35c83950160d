"""The error tree of the services, and the one table between errors and gRPC statuses.

    ServiceError
    ├── InvalidArgument      fields are wrong; names them          INVALID_ARGUMENT
    ├── Unimplemented        a field or rpc of a later version     UNIMPLEMENTED
    ├── NotFound             no such model                         NOT_FOUND
    ├── AlreadyExists        the request id is live                ALREADY_EXISTS
    ├── Overloaded           a bound is reached; try again         RESOURCE_EXHAUSTED + RetryInfo
    ├── Unavailable          nothing can serve it now; try again   UNAVAILABLE + RetryInfo
    ├── FailedPrecondition   the other side must change first      FAILED_PRECONDITION
    ├── DeadlineExceeded     the time it was given is over         DEADLINE_EXCEEDED
    ├── Cancelled            its owner ended it                    CANCELLED
    ├── Aborted              replaced by something newer           ABORTED
    └── Internal             our fault; the cause is in the log    INTERNAL

Messages go to clients: they carry no paths, no prompt text, no stack traces.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

_DOMAIN = "quire"

_MAX_BYTES = 1024
"""Longest text in a status. A status travels in trailers, and peers drop a call whose trailers are
over 8 KB; a message stands in them up to three times, percent-encoded and in base64."""

_MAX_VIOLATION_BYTES = 2 * _MAX_BYTES
"""Longest all violations of one status together; those beyond are counted and not listed."""


class ServiceError(Exception):
    """An error with a place in the table.

    Args:
        message: one line for the client.
        reason: stable upper-case identifier for programs, sent as ErrorInfo.reason.
        metadata: values behind the message (limits, counts), sent as ErrorInfo.metadata.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = _clipped(message)
        self.reason = reason
        self.metadata = {key: _clipped(value) for key, value in (metadata or {}).items()}

    def details(self) -> list[any_pb2.Any]:
        """The google.rpc details of this error."""
        if not self.reason:
            return []
        info = error_details_pb2.ErrorInfo(
            reason=self.reason, domain=_DOMAIN, metadata=self.metadata
        )
        return [_packed(info)]


class InvalidArgument(ServiceError):
    """A field of the request is wrong, or several (`joined`).

    Args:
        field: its path in the message, e.g. `sampling.top_p`.
        description: what is wrong, with the limit and the value received.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self,
        field: str,
        description: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field}: {description}", reason=reason, metadata=metadata)
        self.field = _clipped(field)
        self.description = _clipped(description)
        self.violations: tuple[tuple[str, str], ...] = ((self.field, self.description),)

    @classmethod
    def joined(cls, errors: Sequence["InvalidArgument"]) -> "InvalidArgument":
        """One error for several wrong fields of one request.

        Args:
            errors: at least one. The first is the one to be named where only one can be; the
                reason is that of the first that has one.
        """
        first = errors[0]
        if len(errors) == 1:
            return first
        told = next((error for error in errors if error.reason), first)
        joined = cls(first.field, first.description, reason=told.reason, metadata=told.metadata)
        joined.violations = tuple(pair for error in errors for pair in error.violations)
        joined.message = _clipped("; ".join(f"{name}: {text}" for name, text in joined.violations))
        joined.args = (joined.message,)
        return joined

    def details(self) -> list[any_pb2.Any]:
        """BadRequest with the fields, and ErrorInfo where there is a reason."""
        bad = error_details_pb2.BadRequest()
        room = _MAX_VIOLATION_BYTES
        for name, text in self.violations:
            room -= len(name.encode("utf-8", "replace")) + len(text.encode("utf-8", "replace"))
            if room < 0 and bad.field_violations:
                left = len(self.violations) - len(bad.field_violations)
                bad.field_violations[-1].description += f" ({left} more fields are wrong)"
                break
            bad.field_violations.add(field=name, description=text)
        return [_packed(bad), *super().details()]


class Violations:
    """Collects what is wrong with one request, so that its sender is told all of it at once."""

    def __init__(self) -> None:
        self._errors: list[InvalidArgument] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps an InvalidArgument of the block for `raise_any`; the block ends there."""
        try:
            yield
        except InvalidArgument as error:
            self._errors.append(error)

    def add(self, field: str, description: str) -> None:
        """Notes that a field is wrong."""
        self._errors.append(InvalidArgument(field, description))

    def raise_any(self) -> None:
        """Raises InvalidArgument with all of them, if there are any."""
        if self._errors:
            raise InvalidArgument.joined(self._errors)


class Unimplemented(ServiceError):
    """The request asks for something this version does not have."""

    code = grpc.StatusCode.UNIMPLEMENTED


class NotFound(ServiceError):
    """The named resource does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    """The name is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Retryable(ServiceError):
    """Nothing was done; the same call may succeed later.

    Args:
        retry_after_s: when to try again, seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s

    def details(self) -> list[any_pb2.Any]:
        """RetryInfo with the delay, and ErrorInfo where there is a reason."""
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(self.retry_after_s * 1000))
        return [_packed(error_details_pb2.RetryInfo(retry_delay=delay)), *super().details()]


class Overloaded(Retryable):
    """A bound is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(Retryable):
    """What the call needs is not there now."""

    code = grpc.StatusCode.UNAVAILABLE


class FailedPrecondition(ServiceError):
    """The other side must change before the call can succeed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class DeadlineExceeded(ServiceError):
    """The time the call was given is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The owner of the call ended it."""

    code = grpc.StatusCode.CANCELLED


class Aborted(ServiceError):
    """Something newer took the place of this call."""

    code = grpc.StatusCode.ABORTED


class Internal(ServiceError):
    """A fault of ours; the log has the cause."""

    code = grpc.StatusCode.INTERNAL


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of an error."""
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code.name),
        message=error.message,
        details=error.details(),
    )


class RemoteError(ServiceError):
    """An error another service sent; passed on as it came."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message, reason=_reason_of(status))
        self.status = status

    def details(self) -> list[any_pb2.Any]:
        """Those that came."""
        return list(self.status.details)


def status_of(error: ServiceError) -> status_pb2.Status:
    """The status to send for `error`, a foreign one unchanged."""
    return error.status if isinstance(error, RemoteError) else to_status(error)


def _reason_of(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    found = any(detail.Unpack(info) for detail in status.details)
    return _clipped(info.reason) if found else ""


def _clipped(text: str) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= _MAX_BYTES:
        return text
    return data[:_MAX_BYTES].decode("utf-8", "ignore") + " …"


def _packed(
    message: error_details_pb2.BadRequest
    | error_details_pb2.ErrorInfo
    | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
