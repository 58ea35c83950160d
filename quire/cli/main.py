"""The `quire` command: finds the subcommand, runs it, makes one line and an exit code of errors."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import quire
from quire.cli.command import (
    EXIT_FAILED,
    EXIT_USAGE,
    Entry,
    Parser,
    UsageError,
    dispatch,
    listing,
)
from quire.errors import AnswerCut, QuireError, Unreachable

_SERVICES = ("numpy", "tokenizers", "torch", "uvloop")

OWN: tuple[Entry, ...] = (
    Entry(
        name="up",
        help="start the whole set on this machine and keep it running",
        target="quire.cli.up:COMMAND",
        extra="all",
        needs=_SERVICES,
    ),
    Entry(
        name="chat",
        help="talk with the model, one question or many turns",
        target="quire.cli.chat:COMMAND",
    ),
    Entry(
        name="generate",
        help="complete a prompt",
        target="quire.cli.generate:COMMAND",
    ),
    Entry(
        name="model",
        help="fetch models and list them",
        target="quire.cli.model:COMMAND",
    ),
    Entry(
        name="health",
        help="ask a service whether it can serve",
        target="quire.cli.health:COMMAND",
    ),
    Entry(
        name="top",
        help="watch schedulers at work: requests, workers, latencies",
        target="quire.cli.top:COMMAND",
    ),
    Entry(
        name="admin",
        help="look at and change a running scheduler",
        target="quire.cli.admin:COMMAND",
    ),
    Entry(
        name="demo",
        help="start the set, ask one question, stop it",
        target="quire.cli.demo:COMMAND",
        extra="all",
        needs=_SERVICES,
    ),
)
"""Commands of this package, in the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `quire` with `argv`, by default the arguments of the process; see `guarded`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(arguments))


def guarded(run: Callable[[], int]) -> int:
    """Runs a command and makes one line on standard error of whatever stops it.

    Returns:
        What `run` returned; 1 where the command could not do its work, 2 where it was called
        wrongly, 130 after Ctrl-C.
    """
    try:
        code = run()
        sys.stdout.flush()
    except UsageError as error:
        return _failed(error.message, EXIT_USAGE)
    except AnswerCut as error:
        return _failed(f"quire: {error.message}", EXIT_FAILED)
    except Unreachable as error:
        return _failed(f"quire: {error.message}; start a server with: quire up", EXIT_FAILED)
    except QuireError as error:
        return _failed(f"quire: {error.message}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _failed("quire: interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        # Nobody reads any more. The interpreter would flush again at exit and complain.
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Most likely standard output, e.g. on a full disk; what it still holds is lost.
        _drop_stdout()
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"quire: {where}{error.strerror or error}", EXIT_FAILED)
    return code


def _run(arguments: list[str]) -> int:
    own = {entry.name for entry in OWN}
    if arguments and arguments[0] in own:
        return dispatch("quire", OWN, arguments)
    # Looking for registered commands takes longer than many of the own ones run.
    foreign = importlib.import_module("quire.cli.foreign").foreign_commands(own)
    entries = (*OWN, *foreign)
    if arguments and not arguments[0].startswith("-"):
        return dispatch("quire", entries, arguments)
    parser = Parser(
        prog="quire",
        usage="quire COMMAND [...]",
        description="Serves large language models as asyncio gRPC services, and talks to them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=listing(entries) + "\n\n`quire COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    if parser.parse_args(arguments).version:
        print(f"quire {quire.__version__}")
        return 0
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _drop_stdout() -> None:
    """Nothing goes to standard output any more, not even what is left to be written."""
    with contextlib.suppress(OSError):  # it is closed, or was replaced by something without one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
