"""What can befall a process: killed, frozen, thawed. By process id, never by name."""

import contextlib
import os
import signal
from collections.abc import Iterator


def kill(pid: int) -> None:
    """Ends it without a word; no handler runs. A process that has ended already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """It gets no processor meanwhile; its sockets stay open and nothing answers."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
