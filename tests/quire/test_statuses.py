"""Every gRPC status has its error."""

from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from quire import errors
from quire.statuses import error_of
from tests.fakes.text_service import failure, unavailable

CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]

EXPECTED = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "UNIMPLEMENTED": errors.NotSupported,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.PreconditionFailed,
    "UNAUTHENTICATED": errors.NotAllowed,
    "PERMISSION_DENIED": errors.NotAllowed,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAVAILABLE": errors.Unreachable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
    "ABORTED": errors.Replaced,
    "INTERNAL": errors.ServerFault,
    "UNKNOWN": errors.ServerFault,
    "DATA_LOSS": errors.ServerFault,
}


@dataclass
class Failed(grpc.RpcError):
    """A failed call, as both stacks of grpc present one."""

    status: Any
    text: str = "it failed"
    metadata: tuple[tuple[str, bytes], ...] = field(default=())

    def code(self) -> Any:
        return self.status

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Any:
        return self.metadata


def with_details(status: Any) -> Failed:
    code = next(c for c in CODES if c.value[0] == status.code)
    data = (("grpc-status-details-bin", status.SerializeToString()),)
    return Failed(code, status.message, data)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_code_has_its_error(code: grpc.StatusCode) -> None:
    error = error_of(Failed(code), "host:1")
    assert type(error) is EXPECTED[code.name]
    assert "\n" not in error.message


def test_all_fields_that_are_wrong_are_named() -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[
            {"field": "a", "description": "is wrong"},
            {"field": "b", "description": "too"},
        ]
    )
    info = error_details_pb2.ErrorInfo(reason="CONTEXT_LENGTH")
    error = error_of(with_details(failure("INVALID_ARGUMENT", "a: is wrong", info, bad)), "x")
    assert isinstance(error, errors.InvalidRequest)
    assert (error.field, str(error)) == ("a", "a: is wrong; b: too")
    assert error.violations == (("a", "is wrong"), ("b", "too"))


def test_without_details_the_message_is_what_there_is() -> None:
    error = error_of(Failed(grpc.StatusCode.INVALID_ARGUMENT, "wrong\nall over"), "x")
    assert isinstance(error, errors.InvalidRequest)
    assert (error.field, str(error)) == ("", "wrong all over")


def test_a_server_that_cannot_serve_is_not_a_missing_server() -> None:
    error = error_of(with_details(unavailable(1500)), "x")
    assert type(error) is errors.Unavailable
    assert error.retry_after_s == 1.5


def test_an_oversize_message_is_told_from_overload() -> None:
    text = "Received message larger than max (5000000 vs. 4194304)"
    error = error_of(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, text), "x")
    assert type(error) is errors.TooLarge
    assert error.message == "a message of 5000000 bytes is over the limit of 4194304 bytes"


def test_garbage_in_the_details_is_passed_over() -> None:
    failed = Failed(
        grpc.StatusCode.INTERNAL, "a fault", (("grpc-status-details-bin", b"\xff\xff"),)
    )
    assert str(error_of(failed, "x")) == "a fault"


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = [
        (line.index(name := line.split("─ ")[1].split()[0]), name)
        for line in (errors.__doc__ or "").splitlines()
        if "─ " in line
    ]
    parents: dict[int, str] = {4: "QuireError"}
    for indent, name in drawn:
        parent = parents[max(depth for depth in parents if depth < indent)]
        assert getattr(errors, parent) in getattr(errors, name).__bases__
        parents = {depth: n for depth, n in parents.items() if depth < indent} | {indent: name}
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for _, name in drawn} == classes - {"QuireError"}
