"""Finds protobuf fields this version does not know, so that they are refused and never ignored."""

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.chassis.errors import Unimplemented


def refuse_unknown_fields(message: Message) -> None:
    """Raises Unimplemented with the path and number of the first unknown field in `message`."""
    for path in _unknown(message, ""):
        raise Unimplemented(
            f"{path}: this version does not have that field",
            reason="UNKNOWN_FIELD",
        )


def _unknown(message: Message, prefix: str) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        number = unknown[index].field_number
        yield f"{prefix}field {number} of {message.DESCRIPTOR.full_name}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        name = f"{prefix}{descriptor.name}."
        for part in value if descriptor.is_repeated else (value,):
            yield from _unknown(part, name)
