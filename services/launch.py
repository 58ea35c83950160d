"""The installed programs, `quire-worker` and the others: services that end in order from the start.

Importing a service takes seconds, and its own handlers for signals are there only after that. Here
a first one is set before: a service that is asked to end while it is imported ends with exit code
0, as one that drained. Imports nothing of the services by itself, and nothing heavy.
"""

import importlib
import os
import signal
from types import FrameType


def scheduler() -> None:
    """Entry point of `quire-scheduler`."""
    run("services.scheduler.__main__")


def worker() -> None:
    """Entry point of `quire-worker`."""
    run("services.worker.__main__")


def tokenizer() -> None:
    """Entry point of `quire-tokenizer`."""
    run("services.tokenizer.__main__")


def run(module: str) -> None:
    """Imports `module` and calls its `main`; a signal before that ends the process with code 0.

    Args:
        module: full name of a module whose `main` takes over the signals.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    importlib.import_module(module).main()


def _end(number: int, frame: FrameType | None) -> None:
    # Not sys.exit: an exception in the midst of an import would be anybody's to catch.
    os._exit(0)
