"""A terminal that a test sits at: a real pseudo-terminal, and an emulator that reads its screen."""

import asyncio
import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable

import pyte

from tests.quire.cli.running_quire import ROOT, environment

_ALTERNATE_SCREEN = 1049 << 5
"""How the emulator files a private mode of the terminal."""

_ON_THE_TERMINAL = """
import ctypes, fcntl, os, signal, sys, termios
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes standard input the terminal that controls the program, as a shell does."""


class Terminal:
    """The screen and the keyboard of one program.

    Args:
        columns: of the screen.
        rows: of the screen.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self.slave = os.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(self.slave)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def shows_own_screen(self) -> bool:
        """Whether the program has the terminal's second screen."""
        return _ALTERNATE_SCREEN in self._screen.mode

    @property
    def shows_cursor(self) -> bool:
        return not self._screen.cursor.hidden

    @property
    def is_as_before(self) -> bool:
        """Whether the program has left everything as it found it."""
        now = termios.tcgetattr(self.slave)
        return now == self.settings and self.shows_cursor and not self.shows_own_screen

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """The kernel tells the program."""
        self._screen.resize(rows, columns)
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    async def until(self, wanted: Callable[[str], object]) -> None:
        """Waits until the screen is so; fails with what it shows if it never is."""
        try:
            async with asyncio.timeout(60):
                while not wanted(self.text):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it did not come to that; the screen:\n{self.text}") from None

    @contextlib.contextmanager
    def _read(self):
        loop = asyncio.get_running_loop()
        loop.add_reader(self._master, lambda: self._stream.feed(os.read(self._master, 65536)))
        try:
            yield
        finally:
            loop.remove_reader(self._master)
            os.close(self._master)
            os.close(self.slave)

    @contextlib.asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """`quire` with these arguments on the terminal; killed at the end if it is still there."""
        command = (sys.executable, "-m", "quire", *arguments)
        surroundings = environment(TERM="xterm-256color", PYTHONUTF8="1")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            surroundings.pop(name, None)
        with self._read():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _ON_THE_TERMINAL, *command),
                cwd=ROOT,
                env=surroundings,
                stdin=self.slave,
                stdout=self.slave,
                stderr=self.slave,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
