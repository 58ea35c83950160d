"""A chat template that cannot run for ever or fill the memory.

A template is a program that came with a model. The sandbox of `transformers` keeps it away from
everything outside; this bounds what it may use: seconds, characters of output, and the size of what
one operation makes. Loops are ended from outside, by an exception raised in their thread, so that
ordinary templates pay nothing for it.
"""

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

MAX_RENDERED = 32 * 1024 * 1024
"""Most characters a conversation may become, and most parts of anything made on the way."""

MAX_SECONDS = 10.0
"""Far more than the longest conversation takes on a busy machine."""

_MOST_BITS = 4096
_WIDEST = 100_000
_WIDE = re.compile(r"\d{6,}|\*")
_PADDING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "batch", "slice")
)
"""Methods and filters that make as much as a number tells them to."""
_FORMATTING = frozenset(("format", "format_map", "strftime_now"))


class TemplateTooSlow(Exception):
    """It ran longer than it may."""


class TemplateTooLarge(TemplateError):
    """It makes more than it may."""


class BoundedTemplate:
    """A compiled template.

    Args:
        source: the template.
        seconds: how long one rendering may take.

    Raises:
        TemplateSyntaxError: it is none.
    """

    def __init__(self, source: str, *, seconds: float = MAX_SECONDS) -> None:
        # Compiled by us: the compiler itself computes what is constant, and fixes the operators.
        environment = _compile_jinja_template("").environment.overlay()
        _bound(environment)
        self._template = environment.from_string(source)
        self._seconds = seconds

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text it makes.

        Raises:
            TemplateTooSlow: not within its time.
            TemplateTooLarge: it, or something on the way, has too many characters.
            TemplateError: the template refuses.
        """
        pieces: list[str] = []
        size = 0
        with _time_limit(self._seconds):
            for piece in self._template.generate(variables):
                # Empty pieces count too: their list grows.
                size += len(piece) + 1
                if size > 2 * MAX_RENDERED:
                    raise _too_large()
                pieces.append(piece)
        return "".join(pieces)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TemplateTooSlow in this thread after `seconds`, wherever in the context it is."""
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    is_over = False

    def end() -> None:
        with lock:
            if not is_over:
                raise_in_thread(thread, ctypes.py_object(TemplateTooSlow))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True
            raise_in_thread(thread, None)  # takes back what was not delivered yet


def _bound(environment: Environment) -> None:
    bounded: Any = environment
    bounded.intercepted_binops = frozenset(("*", "**", "+", "%"))
    bounded.binop_table = {
        **bounded.binop_table,
        "*": _checked(bounded.binop_table["*"], _check_product),
        "**": _checked(bounded.binop_table["**"], _check_power),
        "+": _checked(bounded.binop_table["+"], _check_sum),
        "%": _checked(bounded.binop_table["%"], _check_format),
    }
    bounded.call = functools.partial(_call, bounded.call)
    environment.filters = {
        name: _filter(name, function) for name, function in environment.filters.items()
    }
    # It makes as long a text as it is asked for.
    bounded.globals = {name: one for name, one in bounded.globals.items() if name != "lipsum"}


def _checked(
    operator: Callable[[Any, Any], Any], check: Callable[[Any, Any], None]
) -> Callable[[Any, Any], Any]:
    def apply(left: Any, right: Any) -> Any:
        check(left, right)
        return operator(left, right)

    return apply


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MOST_BITS:
            raise _too_large()
        return
    times, parts = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(times, int) and _length(parts) * times > MAX_RENDERED:
        raise _too_large()


def _check_power(left: Any, right: Any) -> None:
    both = isinstance(left, int) and isinstance(right, int)
    if both and left.bit_length() * abs(right) > _MOST_BITS:
        raise _too_large()


def _check_sum(left: Any, right: Any) -> None:
    if _length(left) + _length(right) > MAX_RENDERED:
        raise _too_large()


def _check_format(left: Any, _right: Any) -> None:
    if isinstance(left, str) and _WIDE.search(left):
        raise _too_large()


def _call(call: Callable[..., Any], context: Any, function: Any, *args: Any, **named: Any) -> Any:
    name = getattr(function, "__name__", "")
    _check_arguments(name, getattr(function, "__self__", None), args, named)
    return call(context, function, *args, **named)


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the marks that say what the filter wants to be given
    def bounded(*args: Any, **named: Any) -> Any:
        value = next((one for one in args if isinstance(one, str)), None)
        _check_arguments(name, value, args, named)
        return function(*args, **named)

    return bounded


def _check_arguments(
    name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    given = (*args, *named.values())
    numbers = [abs(one) for one in given if isinstance(one, int)]
    if name in (_PADDING | _FORMATTING) and max(numbers, default=0) > _WIDEST:
        raise _too_large()
    texts = [one for one in (value, *given) if isinstance(one, str)]
    if name in _FORMATTING and any(map(_WIDE.search, texts[:1])):
        raise _too_large()
    if name == "replace" and len(texts) > 2:
        old, new = texts[-2:]
        if isinstance(value, str) and value.count(old) * len(new) > MAX_RENDERED:
            raise _too_large()


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _too_large() -> TemplateTooLarge:
    return TemplateTooLarge(f"it makes more than {MAX_RENDERED} characters")
