"""The terminal: a screen of its own, keys, its size, and everything put back at the end."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.control import Control
from rich.screen import Screen

from quire.top.frame import Look, frame
from quire.top.history import Seen
from quire.top.source import Watch

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LOCAL_FLAGS, _CONTROL_CHARACTERS = 3, 6


class Ended(Exception):
    """The user wants no more; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


async def show(watch: Watch, look: Look, console: Console) -> int:
    """Shows what `watch` sees until the user quits.

    Args:
        watch: whom to watch.
        look: how to show it at first.
        console: on a terminal.

    Returns:
        The exit code: 0 after q, 128 and the number of the signal after SIGTERM or SIGHUP.
    """
    news = asyncio.Event()
    display = _Display(watch, look, console, news)
    ended: int | None = None
    with _keys_and_signals(display), _own_screen(console):
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch.run(look.interval_s, news.set))
                tasks.create_task(display.run())
        except* Ended as group:
            ended = _code(group)
    assert ended is not None
    return ended


def _code(group: BaseExceptionGroup[Ended]) -> int:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Ended)
    return error.code


class _Display:
    """What stands on the screen, and what keys do to it."""

    def __init__(self, watch: Watch, look: Look, console: Console, news: asyncio.Event) -> None:
        self._watch = watch
        self._look = look
        self._console = console
        self._news = news
        self._frozen: tuple[Seen, ...] | None = None
        self._exit_code: int | None = None

    async def run(self) -> None:
        """Draws whenever there is news.

        Raises:
            Ended: the user quit.
        """
        while self._exit_code is None:
            self._draw()
            await self._news.wait()
            self._news.clear()
        raise Ended(self._exit_code)

    def press(self, key: bytes) -> None:
        """Does what a key stands for; others do nothing."""
        if key in (b"q", b"Q"):
            self.end(0)
        elif key in (b"p", b"P", b" "):
            self._frozen = self._watch.seen() if self._frozen is None else None
            self._look = replace(self._look, paused=self._frozen is not None)
        elif key == b"\t":
            self._look = replace(self._look, view=self._look.view.next)
        elif key in (b"s", b"S"):
            self._look = replace(self._look, order=self._look.order.next)
        self.redraw()

    def end(self, code: int) -> None:
        """Ends the display."""
        self._exit_code = code
        self.redraw()

    def redraw(self) -> None:
        """Draws soon, in the size that the screen has then."""
        self._news.set()

    def _draw(self) -> None:
        seen = self._frozen if self._frozen is not None else self._watch.seen()
        width, height = self._console.size
        self._console.control(Control.home())
        self._console.print(Screen(frame(seen, self._look, width, height)), end="")


@contextlib.contextmanager
def _keys_and_signals(display: _Display) -> Iterator[None]:
    """Keys as they are pressed, and signals, go to the display."""
    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()

    def read_keys() -> None:
        pressed = os.read(keyboard, 64)
        if not pressed:  # the terminal is gone
            display.end(128 + signal.SIGHUP)
            loop.remove_reader(keyboard)
        if pressed.startswith(b"\x1b"):
            return  # an arrow or the like: several bytes that are no keys of their own
        for place in range(len(pressed)):
            display.press(pressed[place : place + 1])

    with _single_keys(keyboard):
        loop.add_reader(keyboard, read_keys)
        loop.add_signal_handler(signal.SIGWINCH, display.redraw)
        for number in _ENDING:
            loop.add_signal_handler(number, display.end, 128 + number)
        try:
            yield
        finally:
            loop.remove_reader(keyboard)
            for number in (signal.SIGWINCH, *_ENDING):
                loop.remove_signal_handler(number)


@contextlib.contextmanager
def _single_keys(keyboard: int) -> Iterator[None]:
    """Keys come at once and are not echoed; Ctrl-C still interrupts, Ctrl-Z and Ctrl-S do not."""
    before = termios.tcgetattr(keyboard)
    changed = termios.tcgetattr(keyboard)
    changed[0] &= ~termios.IXON
    changed[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
    characters = list(changed[_CONTROL_CHARACTERS])
    characters[termios.VSUSP] = b"\x00"
    changed[_CONTROL_CHARACTERS] = characters
    termios.tcsetattr(keyboard, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _own_screen(console: Console) -> Iterator[None]:
    """The terminal's second screen, without a cursor; what stood on the first one comes back."""
    console.set_alt_screen(True)
    console.show_cursor(False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            console.show_cursor(True)
            console.set_alt_screen(False)
