"""Holds the protos against `buf.yaml`: lint, and no break of what has landed.

What has landed is the descriptor image `protos/baseline.binpb`, kept in the repository: a clone
without history or tags has it too. `--accept` makes it what the protos say now, if nothing breaks.
`buf` gets images made by protoc, so that it needs no network and no copy of the files they import.
Must not know how stubs are made.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from generate import PROTOS, describe, scripts

BASELINE = PROTOS / "baseline.binpb"
CONFIG = PROTOS.parent / "buf.yaml"


def check(image: Path) -> bool:
    """True where `image` passes lint and breaks nothing; else `buf` has said what is wrong."""
    passed = [_buf("lint", image), _buf("breaking", image, f"--against={BASELINE}")]
    return all(passed)


def accept(image: Path) -> None:
    """Makes `image`, without its comments, the baseline."""
    subprocess.run(
        [scripts() / "buf", "build", image, "--exclude-source-info", f"--output={BASELINE}"],
        check=True,
    )


def _buf(command: str, image: Path, *further: str) -> bool:
    run = [scripts() / "buf", command, image, f"--config={CONFIG}", *further]
    return subprocess.run(run, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where all is well."""
    parser = argparse.ArgumentParser(description="Checks the protos with buf.")
    parser.add_argument("--accept", action="store_true", help="then make them the baseline")
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "protos.binpb"
        describe(image)
        if not check(image):
            print("the wire contract: see buf.yaml for what is asked and how a break is accepted")
            return 1
        if wanted.accept:
            accept(image)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
