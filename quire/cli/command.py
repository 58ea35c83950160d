"""What a subcommand is, and how one is found without loading the others.

Start-up time is part of the interface: the table of commands holds names and one-line helps, and a
command's module is imported when that command is called. Imports the standard library only.
"""

import argparse
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from quire.errors import QuireError

EXIT_FAILED = 1
"""The command could not do its work; the reason is on standard error."""

EXIT_USAGE = 2
"""The command was called wrongly."""


class CommandError(QuireError):
    """The command cannot do its work; the message is for the user, one line."""


class UsageError(QuireError):
    """The command was called wrongly."""


class Command(Protocol):
    """One subcommand.

    Attributes:
        name: what is typed after `quire`, e.g. "chat".
        help: one line, no capital, no full stop.
    """

    name: str
    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit code.

        Raises:
            QuireError: the reason, on one line; `quire` prints it and exits with 1.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line in a table of commands.

    Attributes:
        name: of the command.
        help: of the command.
        target: where its object is, `module:attribute`.
        extra: the extra of the distribution that it needs, or "".
        needs: top-level modules of that extra; one that is missing hides the command.
    """

    name: str
    help: str
    target: str
    extra: str = ""
    needs: tuple[str, ...] = ()

    def available(self) -> bool:
        """Whether the modules it needs are installed; imports none of them."""
        return all(importlib.util.find_spec(module) is not None for module in self.needs)

    def load(self, typed: str = "") -> "Command | Group":
        """Imports the command; `typed` is what the user typed for it, for the message.

        Raises:
            CommandError: its extra is not installed; names it.
        """
        if not self.available():
            raise CommandError(
                f"{typed or self.name} needs the extra [{self.extra}]; install it with: "
                f"pip install 'quire-llm[{self.extra}]'"
            )
        module, _, attribute = self.target.partition(":")
        command: Command | Group = getattr(importlib.import_module(module), attribute)
        return command


_FLAG = re.compile(r"--?[^\s\d.-]\S*")


def did_you_mean(typed: str, known: Iterable[str], before: str = "") -> str:
    """The end of a message that names the likeliest of `known`, or "".

    Args:
        typed: what the user wrote.
        known: what could have been meant.
        before: stands before the likeliest one.
    """
    words = list(known)
    begun = [word for word in words if word.startswith(typed) and len(typed.lstrip("-")) > 1]
    # The dashes of flags are no likeness.
    bare = {word.lstrip("-"): word for word in words}
    likely = difflib.get_close_matches(typed.lstrip("-"), bare, n=1, cutoff=0.6)
    close = begun or [bare[word] for word in likely]
    return f"; did you mean {before}{close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, and which guesses no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the usual hint."""
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")

    def parse_known_args(  # type: ignore[override]  # one signature instead of the overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuses unknown flags first: a misspelt one often makes another problem, e.g. a gap."""
        arguments = list(sys.argv[1:] if args is None else args)
        if unknown := self._unknown(arguments):
            self.error("; ".join(unknown))
        return super().parse_known_args(arguments, namespace)

    def _unknown(self, arguments: Sequence[str]) -> list[str]:
        flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
        if "-h" in flags or "--help" in flags:
            return []
        known = self._option_string_actions
        shown = [flag for flag in known if known[flag].help != argparse.SUPPRESS]
        problems = []
        for flag in dict.fromkeys(argument.partition("=")[0] for argument in flags):
            # What argparse takes for a value: words, -, negative numbers, and text with spaces.
            if not _FLAG.fullmatch(flag) or flag in known:
                continue
            if not flag.startswith("--") and flag[:2] in known:
                continue  # short flags, or one with its value
            problems.append(f"there is no flag {flag}{did_you_mean(flag, shown)}")
        return problems


def add_later_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Has flags of later versions refused by name; `flags` says what each would bring."""
    for flag, what in flags.items():
        parser.add_argument(flag, nargs="?", action=_Later, metavar=what, help=argparse.SUPPRESS)


class _Later(argparse.Action):
    """Refuses a flag of a later version by its name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise UsageError(
            f"{parser.prog}: {option_string} ({self.metavar}) is not available in this version"
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A table of commands under one name, e.g. `quire model pull`.

    Attributes:
        name: what is typed before theirs.
        help: one line, no capital, no full stop.
        entries: its commands, in the order of the help text.
    """

    name: str
    help: str
    entries: tuple[Entry, ...]

    def run(self, prog: str, arguments: Sequence[str]) -> int:
        """Runs the command that the first of `arguments` names; `prog` was typed before it."""
        if arguments and arguments[0] in ("-h", "--help"):
            print(
                f"usage: {prog} COMMAND [...]\n\n{_sentence(self.help)}\n\n{listing(self.entries)}"
            )
            return 0
        return dispatch(prog, self.entries, arguments)


def listing(entries: Sequence[Entry]) -> str:
    """The available commands, one a line."""
    shown = [entry for entry in entries if entry.available()]
    width = max((len(entry.name) for entry in shown), default=0)
    return "\n".join(["commands:", *(f"  {e.name:<{width}}  {e.help}" for e in shown)])


def dispatch(prog: str, entries: Sequence[Entry], arguments: Sequence[str]) -> int:
    """Runs the command named by the first argument with the others.

    Args:
        prog: what was typed so far, for messages.
        entries: the commands to choose from.
        arguments: what was typed after it.

    Raises:
        UsageError: there is no such command.
        CommandError: its extra is not installed.
    """
    if not arguments:
        raise UsageError(f"{prog}: which command? (see {prog} --help)")
    entry = next((entry for entry in entries if entry.name == arguments[0]), None)
    if entry is None:
        names = [entry.name for entry in entries if entry.available()]
        hint = did_you_mean(arguments[0], names, f"{prog} ")
        raise UsageError(f"{prog}: there is no command {arguments[0]!r}{hint} (see {prog} --help)")
    prog = f"{prog} {entry.name}"
    command = entry.load(prog)
    if isinstance(command, Group):
        return command.run(prog, arguments[1:])
    parser = Parser(prog=prog, description=_sentence(entry.help))
    command.configure(parser)
    return command.run(parser.parse_args(arguments[1:]))


def _sentence(help_line: str) -> str:
    return f"{help_line[:1].upper()}{help_line[1:]}."
