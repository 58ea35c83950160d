"""The generator, and the descriptors of our protos with their comments."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    """`protos/generate.py`, which is a script of no package."""
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def image(
    generator: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> descriptor_pb2.FileDescriptorSet:
    """All files and what they import, source info included."""
    out = tmp_path_factory.mktemp("protos") / "image"
    generator.describe(out)
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


@pytest.fixture(scope="session")
def files(
    image: descriptor_pb2.FileDescriptorSet,
) -> list[descriptor_pb2.FileDescriptorProto]:
    """One descriptor per proto file of our own."""
    described = [file for file in image.file if file.name.startswith("quire/")]
    assert len(described) == len(list(PROTOS.glob("quire/v1/*.proto")))
    return described


Named = tuple[str, tuple[int, ...]]


def walk_message(
    message: descriptor_pb2.DescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[Named]:
    """Names and source paths of a message and of what is in it."""
    yield name, path
    for index, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, 2, index)
    for index, enum in enumerate(message.enum_type):
        yield from walk_enum(enum, f"{name}.{enum.name}", (*path, 4, index))
    for index, nested in enumerate(message.nested_type):
        yield from walk_message(nested, f"{name}.{nested.name}", (*path, 3, index))


def walk_enum(
    enum: descriptor_pb2.EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[Named]:
    """Names and source paths of an enum and its values."""
    yield name, path
    for index, value in enumerate(enum.value):
        yield f"{name}.{value.name}", (*path, 2, index)


def walk(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Named]:
    """Names and source paths of everything a file declares."""
    for index, message in enumerate(file.message_type):
        yield from walk_message(message, message.name, (4, index))
    for index, enum in enumerate(file.enum_type):
        yield from walk_enum(enum, enum.name, (5, index))
    for index, service in enumerate(file.service):
        yield service.name, (6, index)
        for rpc_index, rpc in enumerate(service.method):
            yield f"{service.name}.{rpc.name}", (6, index, 2, rpc_index)


@pytest.fixture(scope="session")
def declared(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> dict[str, str]:
    """Everything the protos declare, by name, with its leading comment."""
    found = {}
    for file in files:
        comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }
        found.update({name: comments.get(path, "") for name, path in walk(file)})
    return found
