"""Flags and environment to one frozen dataclass, once, with every problem reported together.

Each field of a settings dataclass is a flag (`max_num_seqs` is `--max-num-seqs`) and an environment
variable (`QUIRE_MAX_NUM_SEQS`); a flag beats the variable, the variable beats the default. An empty
variable counts as unset. A switch is turned off by `--flag false` or `--no-flag`. A list is one
text with commas; its flag may be given several times, and the lists are joined.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar


class Settings(Protocol):
    """Any dataclass whose fields were made by `setting`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=Settings)


class SettingsError(Exception):
    """Settings that cannot be used; the message has one line per problem."""


def setting(
    *,
    help: str,
    default: Any = dataclasses.MISSING,
    check: Callable[[Any], bool] | None = None,
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

    Call it inside the coroutine given to `process.run_process`, which reports its errors.

    Args:
        cls: frozen dataclass whose fields were made by `setting`.
        prog: name of the command, for messages.
        argv: arguments without the program's name.
        env: the environment.
        later: flags that exist in a later version, with what they would do; refused by name, as
            flag and as variable.

    Raises:
        SettingsError: unknown, refused, missing or wrong settings, all of them.
        SystemExit: after `--help`.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    given, unknown = _parser(cls, prog, hints).parse_known_args(list(argv))
    problems = [*_unknown(unknown, later or {}), *_later_variables(env, later or {})]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        source, text = _text(name, getattr(given, name), env)
        if text is None:
            if field.default is dataclasses.MISSING:
                problems.append(f"{_flag(name)} is required (or {_variable(name)})")
            continue
        try:
            values[name] = _checked(text, hints[name], field)
        except ValueError as error:
            problems.append(f"{source} {error}")
    if problems:
        raise SettingsError("\n".join(f"{prog}: {problem}" for problem in problems))
    return cls(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}")


class _Joined(argparse.Action):
    """Keeps what a repeated flag was given before."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is None:
            setattr(namespace, self.dest, values)
        else:  # one without a value stays a problem
            setattr(namespace, self.dest, f"{before},{values}" if before and values else "")


def _parser(cls: type[Settings], prog: str, hints: Mapping[str, Any]) -> _Parser:
    parser = _Parser(prog=prog, description=(cls.__doc__ or "").strip(), allow_abbrev=False)
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        # A flag without a value becomes "", so that it is one problem among the others.
        parser.add_argument(
            _flag(name),
            dest=name,
            nargs="?",
            const="true" if _base(hint) is bool else "",
            help=_help(name, field),
            metavar=_metavar(hint),
            action=_Joined if _base(hint) is tuple else "store",
        )
        if _base(hint) is bool:
            off = f"--no-{_flag(name)[2:]}"
            parser.add_argument(
                off, dest=name, action="store_const", const="false", help=argparse.SUPPRESS
            )
    return parser


def _unknown(arguments: Sequence[str], later: Mapping[str, str]) -> Iterator[str]:
    flags = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("-")]
    for flag in flags:
        yield _refusal(flag, later) if flag in later else f"unknown flag {flag}"
    if not flags:  # else a stray word is the value of an unknown flag
        yield from (f"unexpected argument {argument!r}" for argument in arguments)


def _later_variables(env: Mapping[str, str], later: Mapping[str, str]) -> Iterator[str]:
    for flag in later:
        variable = _variable(flag.removeprefix("--").replace("-", "_"))
        if env.get(variable):
            yield f"{variable}: {_refusal(flag, later)}"


def _refusal(flag: str, later: Mapping[str, str]) -> str:
    return f"{flag} ({later[flag]}) is not available in this version"


def _text(name: str, given: str | None, env: Mapping[str, str]) -> tuple[str, str | None]:
    if given is not None:
        return _flag(name), given
    return _variable(name), env.get(_variable(name)) or None


def _checked(text: str, hint: Any, field: dataclasses.Field[Any]) -> Any:
    value = _converted(text, hint)
    check = field.metadata["check"]
    if check is not None and not check(value):
        raise ValueError(f"{field.metadata['rule']}, got {text}")
    return value


def _converted(text: str, hint: Any) -> Any:
    base = _base(hint)
    if not text:
        raise ValueError("needs a value")
    if base is bool:
        return _switch(text)
    if base is int or base is float:
        return _number(text, base)
    if base is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _switch(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"must be true or false, got {text!r}")


def _number(text: str, base: type[int] | type[float]) -> int | float:
    kind = "a whole number" if base is int else "a finite number"
    try:
        value = base(text)
    except ValueError:
        raise ValueError(f"must be {kind}, got {text!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be {kind}, got {text!r}")
    return value


def _base(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return typing.get_origin(hint) or hint


def _metavar(hint: Any) -> str:
    base = _base(hint)
    names = {int: "N", float: "X", bool: "true|false", tuple: "A,B"}
    return names.get(base, "VALUE")


def _help(name: str, field: dataclasses.Field[Any]) -> str:
    text = f"{field.metadata['help']}{_default(field.default)} [{_variable(name)}]"
    return text.replace("%", "%%")


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return " (required)"
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f" (default: {str(value).lower()})"
    return f" (default: {','.join(value) if isinstance(value, tuple) else value})"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "QUIRE_" + name.upper()
