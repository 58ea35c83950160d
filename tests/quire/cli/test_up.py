"""What `quire up` says of the set it started."""

import argparse
from dataclasses import dataclass

import pytest

from quire.cli.up import _say_where_metrics_are, asks_for_metrics
from quire.local_plan import Member


@dataclass(frozen=True)
class Running:
    """As much of a set as is looked at."""

    members: tuple[Member, ...]


def member(name: str, *flags: str) -> Member:
    return Member(service=name, name=name, flags=flags)


@pytest.mark.parametrize(
    ("flag", "environment", "asked"),
    [
        ("true", {}, True),
        (None, {"QUIRE_ENABLE_METRICS": "1"}, True),
        ("false", {"QUIRE_ENABLE_METRICS": "true"}, False),
        (None, {}, False),
    ],
)
def test_whether_metrics_are_asked_for(
    flag: str | None, environment: dict[str, str], asked: bool
) -> None:
    args = argparse.Namespace(enable_metrics=flag)
    assert asks_for_metrics(args, environment) is asked


def test_where_each_serves_them(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = member("gateway", "--prometheus-port", "8", "--log-level", "warn")
    _say_where_metrics_are(Running((member("scheduler", "--metrics-port=7"), gateway)), "0.0.0.0")
    where = "scheduler 127.0.0.1:7, gateway 127.0.0.1:8"
    assert capsys.readouterr().out == f"Metrics, at /metrics of each: {where}\n"


def test_free_ports_are_told_in_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    _say_where_metrics_are(Running((member("scheduler", "--metrics-port=0"),)), "127.0.0.1")
    assert capsys.readouterr().out == "Metrics: the log of each process names its URL\n"
