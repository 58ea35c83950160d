"""Generates the Python stubs of `protos/quire/v1` into the package `quire.v1`.

Owns the one protoc call. `tests/protos/test_fresh.py` runs it into a scratch folder and compares.
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
    sources = sorted(PROTOS.glob("quire/v1/*.proto"))
    includes = [PROTOS, resources.files("grpc_tools") / "_proto", _googleapis()]
    code = protoc.main(
        [
            "protoc",
            *(f"-I{path}" for path in includes),
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--plugin=protoc-gen-mypy_grpc={_scripts() / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=quiet:{out}",
            *(str(path.relative_to(PROTOS)) for path in sources),
        ]
    )
    if code:
        raise RuntimeError(f"protoc ended with exit code {code}")


def _googleapis() -> Path:
    """The folder in which `google/rpc/status.proto` lies (package googleapis-common-protos)."""
    with resources.as_file(resources.files("google.rpc") / "status.proto") as status:
        return status.parents[2]


def _scripts() -> Path:
    """The folder of this interpreter's commands, which need not be on PATH."""
    return Path(sysconfig.get_path("scripts"))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
