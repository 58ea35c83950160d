"""Runs a set of fake services under the control of signals, as `quire up` does.

set_script.py [--workers K] [--tokenizers N] [--restart-at-once] [--drain-timeout S] [-v]
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from quire.cli.main import guarded
from quire.cli.running import with_local_set
from quire.local import LocalConfig, LocalSet, RestartPolicy

FAKE = Path(__file__).with_name("fake_process.py")
PROGRAMS = {
    service: (sys.executable, str(FAKE), service)
    for service in ("scheduler", "worker", "tokenizer", "gateway")
}

AT_ONCE = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01)


async def serve(running: LocalSet) -> None:
    """Says that it is up, with names and pids, and waits."""
    sys.stdout.write(f"up {json.dumps(dict(running.processes()))}\n")
    sys.stdout.flush()
    await running.failure()


def run() -> int:
    """Returns 0 if a signal ended it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokenizers", type=int, default=1)
    parser.add_argument("--restart-at-once", action="store_true")
    parser.add_argument("--drain-timeout", type=float, default=40.0)
    parser.add_argument("-v", action="store_true")
    flags = parser.parse_args()
    config = LocalConfig(
        model=Path("/model"),
        served_model_name="fake",
        workers=flags.workers,
        tokenizers=flags.tokenizers,
        port=0,
        programs=PROGRAMS,
        checks={},
        drain_timeout_s=flags.drain_timeout,
        restarts=AT_ONCE if flags.restart_at_once else RestartPolicy(),
    )
    return int(asyncio.run(with_local_set(config, serve, verbose=flags.v)))


if __name__ == "__main__":
    sys.exit(guarded(run))
