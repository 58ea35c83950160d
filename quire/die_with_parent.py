"""Runs a program that is asked to end (SIGTERM), once, when this process or its parent ends.

    python -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT...]

A process of its own that stays in between. The kernel tells a child of its parent's end once for
every thread that the parent had, and a service takes a second SIGTERM for an order to end at once.
Passes on the first SIGTERM and the way the program ended; on SIGUSR1 it kills the program and ends
when that is gone. Linux only; elsewhere the program merely does not hear of its parent's end.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
_ASK = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SIGNALS = {*_ASK, signal.SIGUSR1, signal.SIGCHLD}


def main() -> None:
    """Runs the program to its end."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _ask_for_sigterm(parent)
    this = os.getpid()
    child = os.fork()
    if child == 0:
        _ask_for_sigterm(this)
        _become(program)
    _end_like(_status_of(child))


def _status_of(child: int) -> int:
    """Waits for the end of `child`; asks it to end once, and kills it when told to."""
    asked = False
    while True:
        number = signal.sigwait(_SIGNALS)
        if number in _ASK and not asked:
            asked = True
            os.kill(child, signal.SIGTERM)
        elif number == signal.SIGUSR1:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _ask_for_sigterm(parent: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(_NOT_STARTED)  # it ended before it was asked for


def _become(program: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_STARTED)


def _end_like(code: int) -> None:
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
