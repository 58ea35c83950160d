"""What a service writes to standard error."""

import json
import subprocess
import sys

from services.chassis.logs import told

CODE = """
import logging
from services.chassis.logs import configure_logs
configure_logs("quire-test", "{level}")
logging.getLogger("room").info("went well")
logging.getLogger("room").warning("went badly")
logging.getLogger("grpc").info("chatter")
logging.getLogger("grpc._cython.cygrpc").error("ExecuteBatchError raised in core by %s", "x")
logging.getLogger("grpc._cython.cygrpc").error("something new")
"""


def lines(level: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", CODE.format(level=level)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == ""
    return [line.split(" ", 2)[2] for line in ended.stderr.splitlines()]


def test_each_event_is_one_line_with_level_service_and_room() -> None:
    assert lines("info") == [
        "I quire-test room: went well",
        "W quire-test room: went badly",
        "E quire-test grpc._cython.cygrpc: something new",
    ]


def test_the_level_cuts_off_what_is_below() -> None:
    assert lines("error") == ["E quire-test grpc._cython.cygrpc: something new"]


def test_what_others_say_is_told_on_one_line_and_cut() -> None:
    assert told("plain é 中") == "plain é 中"
    assert told("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
    assert told("x" * 300) == "x" * 200 + " …"
    assert told("\n" * 300, most=5) == "\\n\\n\\ …"


FIELDS = """
import logging
from services.chassis.logs import configure_logs, fields
configure_logs("quire-test", "info", "{form}")
log = logging.getLogger("room")
log.info("ended", extra=fields(tokens=3, share=0.5, text='a "b"', none=None, empty="", raw="a\\nb"))
log.info("odd", extra=fields(rate=float("nan"), most=[float("inf"), 1.0], thing=ValueError("x")))
log.info("plain\\nsecond \\udc80")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def written(form: str) -> list[str]:
    code = FIELDS.format(form=form)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ended.stderr.splitlines()


def test_fields_follow_the_message_as_words() -> None:
    first, second = [line.split(" ", 2)[2] for line in written("text")[:2]]
    assert first == (
        'I quire-test room: ended tokens=3 share=0.5 text="a \\"b\\"" empty="" raw=a\\nb'
    )
    assert second == 'I quire-test room: odd rate=nan most="[inf, 1.0]" thing=x'


def test_as_json_each_line_is_one_object() -> None:
    lines = [json.loads(line, parse_constant=refuse_constant) for line in written("json")]
    ended, odd, plain, failed = lines
    assert ended.pop("time").endswith("+00:00")
    assert ended == {
        "level": "info",
        "service": "quire-test",
        "logger": "room",
        "message": "ended",
        "tokens": 3,
        "share": 0.5,
        "text": 'a "b"',
        "empty": "",
        "raw": "a\nb",
    }
    assert (odd["rate"], odd["most"], odd["thing"]) == ("nan", ["inf", 1.0], "x")
    assert plain["message"] == "plain\nsecond \udc80"
    assert "ZeroDivisionError" in failed["exception"]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
