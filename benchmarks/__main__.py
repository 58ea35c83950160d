"""`python -m benchmarks` is `quire bench`, also where the package is not installed."""

import sys

from benchmarks.command import COMMAND
from quire.cli.main import guarded

if __name__ == "__main__":
    sys.exit(guarded(lambda: COMMAND.run("python -m benchmarks", sys.argv[1:])))
