"""What may stand on a line of the log, and how often."""

import json
import logging

import pytest

from services.chassis.logs import configure_logs, fields


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


def test_json_has_no_character_that_a_terminal_or_a_reader_of_lines_takes_for_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("test", "info", "json")
    odd = "\x7f \x85 \x9b31m \u2028 \u202e é"
    logging.getLogger("room").info("said", extra=fields(text=odd))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isascii()
    assert line.isprintable() or "\x7f" in line
    assert json.loads(line)["text"] == odd


def test_a_library_that_repeats_itself_is_heard_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logs("test", "info")
    theirs, ours = logging.getLogger("opentelemetry.exporter"), logging.getLogger("room")
    for wait in (0.93, 1.87):
        theirs.warning("away, retrying in %s s", wait)
        theirs.error("given up")
        ours.info("ours")
    monkeypatch.setattr("services.chassis.logs._SELDOM_S", 0.0)
    theirs.warning("away, retrying in %s s", 3.7)
    said = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "away, retrying in 0.93 s",
        "given up",
        "ours",
        "ours",
        "away, retrying in 3.7 s",
    ]
