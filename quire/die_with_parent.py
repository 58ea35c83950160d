"""Becomes another program that is asked to end (SIGTERM) when its parent process ends, however.

    python -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT...]

A script of its own: between fork and exec no Python may run in a process with threads. The request
holds over exec. Linux only; elsewhere the program is started without it.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, then executes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before it was asked for
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
