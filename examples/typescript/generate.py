"""Generates TypeScript stubs of Quire's TextService and of google.rpc's error details.

Any protoc will do; this takes the one of the Python package grpcio-tools, which brings the protos
that ours import as well. Owns the options of ts-proto, whose plugin `npm ci` has installed.
"""

import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "protos"))

from generate import includes  # noqa: E402 -- a script of no package, found by its folder

SOURCES = ("quire/v1/text.proto", "google/rpc/error_details.proto", "google/rpc/status.proto")
OPTIONS = (
    "outputServices=grpc-js",
    "env=node",
    "esModuleInterop=true",
    "importSuffix=.js",
    "forceLong=bigint",  # seeds are 64 bits wide, more than a number holds
    "outputJsonMethods=false",
)


def main() -> int:
    """The exit code of protoc."""
    out = HERE / "src" / "generated"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    plugin = HERE / "node_modules" / ".bin" / "protoc-gen-ts_proto"
    return protoc.main(
        [
            "protoc",
            *(f"-I{path}" for path in includes()),
            f"--plugin={plugin}",
            f"--ts_proto_out={out}",
            f"--ts_proto_opt={','.join(OPTIONS)}",
            *SOURCES,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
