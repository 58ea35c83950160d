"""Generates the Python stubs of `protos/quire/v1` into the package `quire.v1`.

Owns the call of protoc: which files, and where what they import is found.
`tests/protos/test_fresh.py` runs it into a scratch folder and compares.
"""

import sys
import sysconfig
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes `quire/v1/*_pb2.py`, `.pyi` and gRPC stubs below `out`.

    Raises:
        RuntimeError: protoc refused a file; it has said why on standard error.
    """
    _protoc(
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        f"--plugin=protoc-gen-mypy_grpc={scripts() / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{out}",
    )


def describe(out: Path) -> None:
    """Writes the descriptors of all files, of imported ones too, with their comments, to `out`.

    Raises:
        RuntimeError: protoc refused a file; it has said why on standard error.
    """
    _protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={out}")


def scripts() -> Path:
    """The folder of this interpreter's commands, which need not be on PATH."""
    return Path(sysconfig.get_path("scripts"))


def includes() -> list[Path]:
    """Where protos are found: our own, protobuf's, and `google/rpc` (googleapis-common-protos)."""
    with (
        resources.as_file(resources.files("grpc_tools") / "_proto") as well_known,
        resources.as_file(resources.files("google.rpc") / "status.proto") as status,
    ):
        return [PROTOS, well_known, status.parents[2]]


def _protoc(*arguments: str) -> None:
    sources = sorted(PROTOS.glob("quire/v1/*.proto"))
    code = protoc.main(
        [
            "protoc",
            *(f"-I{path}" for path in includes()),
            *arguments,
            *(str(path.relative_to(PROTOS)) for path in sources),
        ]
    )
    if code:
        raise RuntimeError(f"protoc ended with exit code {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
