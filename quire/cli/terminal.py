"""Writes answers to the terminal as they come."""

import contextlib
import sys
from collections.abc import AsyncGenerator

from quire.answers import Delta
from quire.cli.command import CommandError
from quire.client import AsyncClient
from quire.errors import QuireError

# A model may write anything; a terminal must not be told to do things by it.
_UNSAFE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))}
_UNSAFE = {code: shown for code, shown in _UNSAFE.items() if chr(code) not in "\n\t"}


async def stream_answer(answer: AsyncGenerator[Delta, None], into: list[str]) -> None:
    """Prints an answer piece by piece and ends the line.

    Args:
        answer: what to print; closed at the end.
        into: receives the pieces, also those of an answer that is cut short.
    """
    terminal = sys.stdout.isatty()
    async with contextlib.aclosing(answer):
        try:
            async for delta in answer:
                into.append(delta.text)
                sys.stdout.write(delta.text.translate(_UNSAFE) if terminal else delta.text)
                sys.stdout.flush()
        finally:
            if into and not into[-1].endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()


async def tell_if_it_waits(client: AsyncClient) -> None:
    """Says on standard error that the server is not ready, so that its silence is understood."""
    try:
        ready = await client.is_ready()
    except QuireError:
        return  # the request will say what is wrong
    if not ready:
        where = f"quire: {client.target} is not ready to serve; the request waits for it"
        print(where, file=sys.stderr, flush=True)


def read_stdin() -> str:
    """All of standard input.

    Raises:
        CommandError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8 at byte {error.start}") from error
