"""The life of a service process: event loop, signals, exit code.

The first SIGTERM or SIGINT asks for an orderly end, the second ends the process at once.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from services.chassis.logs import told
from services.chassis.settings import SettingsError
from services.chassis.tasks import first_leaf

log = logging.getLogger(__name__)

EXIT_USAGE = 2
"""Exit code for settings or files that a restart would not mend."""

_LONGEST_LINE = 2000


class StartupError(Exception):
    """The service cannot start; the message says what is wrong and what to do, on one line."""


def run_process(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs `main(stopping)` on uvloop; `stopping` is set by the first SIGTERM or SIGINT.

    Everything that can fail for the user's reasons belongs inside `main`, `settings.parse` too:
    outside of it nobody turns a StartupError or SettingsError into a message.

    Args:
        main: the service; it returns when `stopping` is set and its work is done.

    Returns:
        The exit code: 0 after an orderly end, 2 after a StartupError or SettingsError (their
        message on standard error, no traceback). Any other exception is a crash: it is raised, and
        the interpreter ends with code 1.
    """
    problem: BaseException | None = None
    try:
        uvloop.run(_with_signals(main))
    except* (SettingsError, StartupError) as group:
        problem = first_leaf(group)
    if problem is None:
        return 0
    text = str(problem)
    # What a file says may stand in it: nothing of that may break the line or the terminal.
    line = told(text, _LONGEST_LINE) if isinstance(problem, StartupError) else text
    sys.stderr.write(f"{line}\n")
    return EXIT_USAGE


def settle_memory() -> None:
    """Moves what start-up made out of the collector's sight, so that collections stay short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            log.warning("second signal, ending now")
            os._exit(128 + number)
        log.info("%s received, draining", signal.Signals(number).name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await main(stopping)
