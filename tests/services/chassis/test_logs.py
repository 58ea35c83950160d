"""What a service writes to standard error."""

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
