"""The line of each request at its end."""

import json
import logging

import pytest

from services.chassis.logs import configure_logs
from services.scheduler.core.plan import Ended, EndReason
from services.scheduler.request_log import RequestLog

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

END = Ended(
    handle=1,
    request_id="q-1",
    reason=EndReason.LENGTH,
    prompt_tokens=30,
    completion_tokens=4,
    cached_tokens=16,
    tenant="acme",
    class_name="batch",
    traceparent=f"00-{TRACE}-00f067aa0ba902b7-01",
    arrived=1_000,
    admitted=3_500,
    first_token=13_500,
    ended=33_500,
    recomputed_tokens=2,
    preemptions=1,
    requeues=3,
    worker_id="w",
    worker_us=12_345,
)


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


def line(end: Ended, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    configure_logs("scheduler", "info", form)
    RequestLog().ended(end, end.ended)
    return capsys.readouterr().err


def test_the_whole_account_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(line(END, "json", capsys))
    assert said["message"] == "request ended"
    assert {key: said[key] for key in ("request_id", "reason", "priority_class", "tenant")} == {
        "request_id": "q-1",
        "reason": "length",
        "priority_class": "batch",
        "tenant": "acme",
    }
    tokens = ("prompt", "completion", "cached", "recomputed")
    assert [said[f"{one}_tokens"] for one in tokens] == [30, 4, 16, 2]
    times = ("queue", "prefill", "decode", "total", "worker")
    assert [said[f"{one}_ms"] for one in times] == [2.5, 10.0, 20.0, 32.5, 12.345]
    assert (said["preemptions"], said["requeues"], said["worker"]) == (1, 3, "w")
    assert said["trace_id"] == TRACE


def test_one_that_never_ran(capsys: pytest.CaptureFixture[str]) -> None:
    end = Ended(
        handle=1,
        request_id="two words\n\x1b[31m=",
        reason=EndReason.ABORT,
        prompt_tokens=1,
        completion_tokens=0,
        cached_tokens=0,
        arrived=1_000,
        ended=5_000,
    )
    text = line(end, "text", capsys)
    assert text.count("\n") == 1, "what a caller named does not break the line"
    assert r'request_id="two words\\n\\x1b[31m="' in text
    assert "queue_ms=4.0 total_ms=4.0" in text
    assert "worker=" not in text
    assert "trace_id" not in text
