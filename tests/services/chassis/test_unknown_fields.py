"""A field of a later version is refused with its path and number, at any depth."""

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from services.chassis.errors import Unimplemented
from services.chassis.unknown_fields import refuse_unknown_fields

# Field 777 of wire type 0 (varint) with the value 1, and of wire type 2 (bytes) with "x".
UNKNOWN_VARINT = b"\xc8\x30\x01"
UNKNOWN_BYTES = b"\xca\x30\x01x"


def refusal(message: FileDescriptorProto) -> Unimplemented:
    with pytest.raises(Unimplemented) as caught:
        refuse_unknown_fields(message)
    return caught.value


def test_a_message_of_known_fields_passes() -> None:
    message = FileDescriptorProto(name="a", message_type=[DescriptorProto(name="B")])
    message.options.java_package = "c"
    refuse_unknown_fields(FileDescriptorProto())
    refuse_unknown_fields(message)


@pytest.mark.parametrize("data", [UNKNOWN_VARINT, UNKNOWN_BYTES])
def test_an_unknown_field_at_the_top_is_refused(data: bytes) -> None:
    error = refusal(FileDescriptorProto.FromString(data))
    assert error.reason == "UNKNOWN_FIELD"
    assert error.message == (
        "field 777 of google.protobuf.FileDescriptorProto: this version does not have that field"
    )


def test_an_unknown_field_in_a_sub_message_is_refused() -> None:
    message = FileDescriptorProto()
    message.options.ParseFromString(UNKNOWN_VARINT)
    assert refusal(message).message.startswith("options.field 777 of google.protobuf.FileOptions:")


def test_an_unknown_field_in_the_last_of_repeated_messages_is_refused() -> None:
    message = FileDescriptorProto(message_type=[DescriptorProto(name="A")] * 2)
    message.message_type[1].field.add().ParseFromString(UNKNOWN_BYTES)
    assert refusal(message).message.startswith(
        "message_type.field.field 777 of google.protobuf.FieldDescriptorProto:"
    )
