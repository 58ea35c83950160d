"""Runs a program that is asked to end (SIGTERM), once, when this process or its parent ends.

    python -I -S die_with_parent.py PARENT_PID SECONDS PROGRAM [ARGUMENT...]

A process of its own that stays in between. The kernel tells a child of its parent's end once for
every thread that the parent had, and a service takes a second SIGTERM for an order to end at once.
Writes the pid of the program to standard output, which the program does not get: both its outputs
go to standard error. Passes on the first SIGTERM and the way the program ended; on SIGUSR1 it kills
the program and ends when that is gone. Once the parent is gone, nobody else would: then it kills a
program that takes longer than SECONDS to end. Linux only; elsewhere the program merely does not
hear of its parent's end.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
_LOOK_S = 0.5
_LONG_S = 86_400.0
_ASK = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SIGNALS = {*_ASK, signal.SIGUSR1, signal.SIGCHLD}


def main() -> None:
    """Runs the program to its end."""
    parent, limit_s, program = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _ask_for_sigterm(parent)
    this = os.getpid()
    child = os.fork()
    if child == 0:
        _ask_for_sigterm(this)
        os.dup2(2, 1)
        _become(program)
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(1, b"%d\n" % child)
    os.close(1)
    _end_like(_status_of(child, parent, limit_s))


def _status_of(child: int, parent: int, limit_s: float) -> int:
    """Waits for the end of `child`; asks it to end once, and kills it when told to, or left."""
    asked_at: float | None = None
    while True:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_S if asked_at is not None else _LONG_S)
        number = None if received is None else received.si_signo
        if number in _ASK and asked_at is None:
            asked_at = time.monotonic()
            os.kill(child, signal.SIGTERM)
        left = asked_at is not None and os.getppid() != parent and _age(asked_at) > limit_s
        if left or number == signal.SIGUSR1:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _age(moment: float) -> float:
    return time.monotonic() - moment


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
