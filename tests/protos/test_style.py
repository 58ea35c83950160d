"""The wire contract keeps the habits that make it readable and safe to extend."""

import re

from google.protobuf import descriptor_pb2

Field = descriptor_pb2.FieldDescriptorProto


def test_everything_has_a_comment(declared: dict[str, str]) -> None:
    assert len(declared) > 100
    assert [name for name, comment in declared.items() if not comment] == []


def test_files_lie_where_their_package_says(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    for file in files:
        assert file.package == "quire.v1"
        assert re.fullmatch(r"quire/v1/[a-z_]+\.proto", file.name)
        assert file.syntax == "proto3"


def test_services_and_their_messages_are_named_alike(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    for service in (service for file in files for service in file.service):
        assert service.name.endswith("Service")
        for rpc in service.method:
            request, response = (
                name.rpartition(".")[2] for name in (rpc.input_type, rpc.output_type)
            )
            # A second Generate in the package carries the service's name too.
            names = (rpc.name, f"{service.name}{rpc.name}")
            assert (request, response) in [(f"{name}Request", f"{name}Response") for name in names]


def test_no_request_or_response_serves_two_rpcs(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    used = [
        name
        for file in files
        for service in file.service
        for rpc in service.method
        for name in (rpc.input_type, rpc.output_type)
    ]
    assert len(used) == len(set(used))


def test_enums_start_with_unspecified_and_carry_their_name(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    assert enums
    for enum in enums:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)
        assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_sampling_scalars_tell_zero_from_absent(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    messages = {message.name: message for file in files for message in file.message_type}
    fields = messages["SamplingParams"].field
    assert fields
    assert all(field.proto3_optional for field in fields)


def test_hot_columns_are_bytes(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """A step and its result carry no sub-message per row: only new requests and failed rows."""
    messages = {message.name: message for file in files for message in file.message_type}
    nested = {
        f"{name}.{field.name}"
        for name in ("Step", "StepResult", "TokenBatch")
        for field in messages[name].field
        if field.type == Field.TYPE_MESSAGE and field.label == Field.LABEL_REPEATED
    }
    assert nested == {"Step.new_requests", "StepResult.errors", "TokenBatch.ends"}
