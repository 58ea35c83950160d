"""Runs a local set under the control of signals: the first one drains, the second one kills."""

import asyncio
import functools
import signal
import sys
from collections.abc import Awaitable, Callable

from quire.errors import SetFailed
from quire.local import LocalConfig, LocalSet, Phase

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def with_local_set(
    config: LocalConfig, work: Callable[[LocalSet], Awaitable[None]], *, verbose: bool
) -> bool:
    """Starts a set, runs `work` with it, ends it.

    Args:
        config: what to start.
        work: what to do once all processes are ready.
        verbose: copies the logs of all processes to standard error.

    Returns:
        False if a signal cut it short; the processes have ended in order all the same.

    Raises:
        SetFailed: the set could not start, or could not be kept up.
    """
    local = LocalSet(
        config,
        on_phase=functools.partial(_show, width=len("tokenizer-0")),
        on_restart=_say,
        log_to=sys.stderr if verbose else None,
    )
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []
    lost: SetFailed | None = None

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 1:
            local.kill()
            return
        print("ending; once more ends at once", file=sys.stderr, flush=True)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with local:
            try:
                await work(local)
            except SetFailed as error:
                _say(error.message)  # at once: ending the others takes a moment
                lost = SetFailed("all processes have ended, since one was given up")
    except asyncio.CancelledError:
        if not received:
            raise
        task.uncancel()
        if lost is None:
            return False
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    if lost is not None:
        raise lost
    return True


def _show(phase: Phase, *, width: int) -> None:
    print(f"{phase.name:<{width}} ready after {phase.seconds:.1f} s", flush=True)


def _say(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)
