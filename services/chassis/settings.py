"""Flags and environment to one frozen dataclass, once, with every problem reported together.

Each field of a settings dataclass is a flag (`max_num_seqs` is `--max-num-seqs`) and an environment
variable (`QUIRE_MAX_NUM_SEQS`); a flag beats the variable, the variable beats the default.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class SettingsError(Exception):
    """Settings that cannot be used; the message has one line per problem."""


def setting(
    *, help: str, default: Any = dataclasses.MISSING, check: Callable[[Any], bool] | None = None,
    rule: str = "",
) -> Any:
    """A dataclass field that is a setting.

    Args:
        help: one line for `--help`, with the unit.
        default: value without flag and variable; without one the setting is required.
        check: True for a value in range. None values are not checked.
        rule: what `check` asks for, e.g. "must be >= 1".
    """
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "rule": rule})


def parse(
    cls: type[T],
    *,
    prog: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    later: Mapping[str, str] | None = None,
) -> T:
    """Reads `cls` from `argv` and `env`.

    Args:
        cls: frozen dataclass whose fields were made by `setting`.
        prog: name of the command, for messages.
        argv: arguments without the program's name.
        env: the environment.
        later: flags that exist in a later version, with what they would do; refused by name.

    Raises:
        SettingsError: unknown, refused, missing or wrong settings, all of them.
        SystemExit: after `--help`.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    parser = _Parser(prog=prog, description=(cls.__doc__ or "").strip(), allow_abbrev=False)
    for name, field in fields.items():
        parser.add_argument(
            _flag(name), dest=name, default=None, help=_help(name, field), metavar=_metavar(hints[name]),
            **({"nargs": "?", "const": "true"} if _base(hints[name]) is bool else {}),
        )
    given, unknown = parser.parse_known_args(list(argv))
    problems = [_unknown(arg, later or {}) for arg in unknown if arg.startswith("-")]
    problems += [] if problems else [f"unexpected argument {arg!r}" for arg in unknown]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        source, text = _text(name, getattr(given, name), env)
        if text is None:
            if field.default is dataclasses.MISSING:
                problems.append(f"{_flag(name)} is required (or {_variable(name)})")
            continue
        try:
            values[name] = _converted(text, hints[name])
        except ValueError as error:
            problems.append(f"{source}: {error}")
            continue
        check = field.metadata["check"]
        if check is not None and values[name] is not None and not check(values[name]):
            problems.append(f"{source} {field.metadata['rule']}, got {text}")
    if problems:
        raise SettingsError("\n".join(f"{prog}: {problem}" for problem in problems))
    return cls(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}")


def _unknown(arg: str, later: Mapping[str, str]) -> str:
    flag = arg.split("=", 1)[0]
    if flag in later:
        return f"{flag} ({later[flag]}) is not available in this version"
    return f"unknown flag {flag}"


def _text(name: str, given: str | None, env: Mapping[str, str]) -> tuple[str, str | None]:
    if given is not None:
        return _flag(name), given
    return _variable(name), env.get(_variable(name))


def _converted(text: str, hint: Any) -> Any:
    base = _base(hint)
    if base is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ValueError(f"must be true or false, got {text!r}")
    if base is int or base is float:
        try:
            return base(text)
        except ValueError:
            kind = "a whole number" if base is int else "a number"
            raise ValueError(f"must be {kind}, got {text!r}") from None
    if base is tuple:
        return tuple(part for part in text.split(",") if part)
    return text


def _base(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint


def _metavar(hint: Any) -> str:
    base = _base(hint)
    names = {int: "N", float: "X", bool: "true|false", tuple: "A,B"}
    return names.get(base, "VALUE")


def _help(name: str, field: Any) -> str:
    if field.default is dataclasses.MISSING:
        tail = " (required)"
    elif field.default is None:
        tail = ""
    else:
        tail = f" (default: {field.default})"
    return str(field.metadata["help"] + tail + f" [{_variable(name)}]").replace("%", "%%")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "QUIRE_" + name.upper()
