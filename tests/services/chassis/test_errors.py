"""Each error has its own status, and its details arrive at a client."""

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.chassis import errors

TABLE = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}


def leaves(cls: type[errors.ServiceError]) -> set[type[errors.ServiceError]]:
    below = cls.__subclasses__()
    return {cls} if not below else set().union(*map(leaves, below))


def unpack(status: status_pb2.Status) -> dict[str, object]:
    kinds = (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
    )
    found = {}
    for detail in status.details:
        (kind,) = (kind for kind in kinds if detail.Is(kind.DESCRIPTOR))
        found[kind.__name__] = kind.FromString(detail.value)
    return found


def test_the_table_covers_every_error() -> None:
    assert leaves(errors.ServiceError) == {*TABLE, errors.RemoteError}
    assert {cls: cls.code for cls in TABLE} == TABLE


def test_the_table_in_the_module_docstring_is_the_table() -> None:
    for cls, code in TABLE.items():
        assert any(
            line.split()[1:2] == [cls.__name__] and code.name in line.split()
            for line in (errors.__doc__ or "").splitlines()
        ), cls


def test_a_wrong_field_is_named() -> None:
    error = errors.InvalidArgument(
        "sampling.top_p", "must be in (0, 1], got 7", reason="RANGE", metadata={"limit": "1"}
    )
    status = errors.to_status(error)
    details = unpack(status)
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.message == "sampling.top_p: must be in (0, 1], got 7"
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == (
        "sampling.top_p",
        "must be in (0, 1], got 7",
    )
    assert details["ErrorInfo"] == error_details_pb2.ErrorInfo(
        reason="RANGE", domain="quire", metadata={"limit": "1"}
    )


def test_several_wrong_fields_are_all_named() -> None:
    wrong = errors.Violations()
    wrong.raise_any()
    wrong.add("a", "is wrong")
    with wrong.collected():
        raise errors.InvalidArgument("b", "is 7", reason="RANGE", metadata={"limit": "1"})
    with pytest.raises(errors.InvalidArgument) as caught:
        wrong.raise_any()
    assert caught.value.field == "a"
    status = errors.to_status(caught.value)
    assert status.message == str(caught.value) == "a: is wrong; b: is 7"
    details = unpack(status)
    violations = [(v.field, v.description) for v in details["BadRequest"].field_violations]
    assert violations == [("a", "is wrong"), ("b", "is 7")]
    assert details["ErrorInfo"].reason == "RANGE"
    assert details["ErrorInfo"].metadata == {"limit": "1"}


def test_very_many_wrong_fields_stay_within_what_a_status_can_carry() -> None:
    wrong = errors.Violations()
    for index in range(4096):
        wrong.add(f"messages[{index}].role", "must have 1 to 64 characters, got 0")
    with pytest.raises(errors.InvalidArgument) as caught:
        wrong.raise_any()
    status = errors.to_status(caught.value)
    listed = unpack(status)["BadRequest"].field_violations
    assert 20 < len(listed) < 60
    assert listed[-1].description.endswith(f" ({4096 - len(listed)} more fields are wrong)")
    assert len(status.SerializeToString()) < 4500


def test_a_refusal_says_when_to_try_again() -> None:
    details = unpack(errors.to_status(errors.Overloaded("queue is full", retry_after_s=2.25)))
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2250
    assert "ErrorInfo" not in details


def test_an_error_without_a_reason_has_no_details() -> None:
    assert list(errors.to_status(errors.NotFound("no such model")).details) == []


def test_a_foreign_status_is_passed_on_unchanged() -> None:
    foreign = errors.to_status(errors.Overloaded("full", retry_after_s=3, reason="QUEUE"))
    error = errors.RemoteError(foreign)
    assert errors.status_of(error) == foreign
    assert error.reason == "QUEUE"
    assert errors.RemoteError(errors.to_status(errors.NotFound("no"))).reason == ""


@pytest.mark.parametrize("letter", ["x", "é", "字", "😀", "\ud800"])
def test_long_texts_are_cut_at_a_whole_character(letter: str) -> None:
    error = errors.InvalidArgument("model", f"no such model: {letter * 10_000}", reason="R")
    status = errors.to_status(error)
    assert status.message.startswith("model: no such model: ")
    assert status.message.endswith(" …")
    assert len(status.message.encode()) <= 1024 + len(" …".encode())


def test_a_short_text_is_not_touched() -> None:
    assert errors.NotFound("é" * 512).message == "é" * 512
