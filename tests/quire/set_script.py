"""Runs a set of fake services under the control of signals, as `quire up` does."""

import asyncio
import sys
from pathlib import Path

from quire.cli.main import guarded
from quire.cli.running import with_local_set
from quire.local import LocalConfig, LocalSet

FAKE = Path(__file__).with_name("fake_process.py")
PROGRAMS = {
    name: (sys.executable, str(FAKE), name) for name in ("scheduler", "worker", "tokenizer")
}


async def serve(running: LocalSet) -> None:
    """Says that it is up, and waits."""
    sys.stdout.write(f"up {running.target}\n")
    sys.stdout.flush()
    await running.failure()


def run() -> int:
    """Returns 0 if a signal ended it."""
    config = LocalConfig(model=Path("/model"), served_model_name="fake", port=0, programs=PROGRAMS)
    return int(asyncio.run(with_local_set(config, serve, verbose="-v" in sys.argv)))


if __name__ == "__main__":
    sys.exit(guarded(run))
