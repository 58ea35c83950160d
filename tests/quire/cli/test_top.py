"""`quire top` without a terminal, before a real scheduler; tests/system has it at a terminal."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.up import info_told
from tests.fakes.scripted_worker import attached
from tests.fakes.text_service import FakeTextService, serving
from tests.quire.cli.running_quire import quire
from tests.services.scheduler.conftest import Running, running_scheduler

Read = pytest.CaptureFixture[str]


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_scheduler(tmp_path) as running, attached(running.target):
        yield running


async def top(capsys: Read, *arguments: str, code: int = 0) -> str:
    """What it prints on standard output, or on standard error where it fails."""
    assert await asyncio.to_thread(main, ["top", *arguments]) == code
    captured = capsys.readouterr()
    assert (captured.err == "") == (code == 0)
    return captured.err if code else captured.out


@pytest.mark.parametrize("flags", [[], ["--once"]])
async def test_without_a_terminal_it_is_one_frame(
    scheduler: Running, capsys: Read, flags: list[str]
) -> None:
    frame = await top(capsys, *flags, "--target", scheduler.target, "--interval", "0.1")
    lines = frame.splitlines()
    assert lines[0].startswith("quire top")
    assert any(line.startswith("scripted ") and "0/4" in line for line in lines)
    assert "per second  0 accepted" in frame, "of two samples"
    assert "\x1b" not in frame


async def test_of_one_sample_there_are_no_rates(scheduler: Running, capsys: Read) -> None:
    frame = await top(capsys, "--once", "--samples", "1", "--ascii", "--target", scheduler.target)
    assert "per second  - accepted" in frame
    frame.encode("ascii")


async def test_where_only_ascii_can_be_written_nothing_else_is(scheduler: Running) -> None:
    flags = ("--once", "--samples", "1", "--target", scheduler.target)
    result = await quire("top", *flags, PYTHONIOENCODING="ascii")
    assert (result.code, result.err) == (0, "")
    result.out.encode("ascii")


async def test_one_sample_as_json(scheduler: Running, capsys: Read, tmp_path: Path) -> None:
    gone = f"unix://{tmp_path}/gone.sock"
    told = json.loads(await top(capsys, "--json", "--target", f"{scheduler.target},{gone}"))
    here, there = told["schedulers"]
    assert (here["target"], here["problem"]) == (scheduler.target, None)
    assert here["sample"]["workers"][0]["worker_id"] == "scripted"
    assert here["sample"]["counters"]["steps"] == 0
    assert (there["target"], there["sample"]) == (gone, None)
    assert there["problem"].startswith(f"cannot reach {gone}")


@pytest.mark.parametrize("flag", ["--once", "--json"])
async def test_where_nobody_answers(tmp_path: Path, capsys: Read, flag: str) -> None:
    target = f"unix://{tmp_path}/gone.sock"
    told = await top(capsys, flag, "--target", target, code=1)
    assert told.startswith(f"quire: cannot reach {target} (")
    assert told.endswith("; start a server with: quire up\n")


async def test_who_is_no_scheduler_is_named(capsys: Read) -> None:
    async with serving(FakeTextService()) as tokenizer:
        told = await top(capsys, "--once", "--target", tokenizer, code=1)
    assert told == f"quire: there is no info service at {tokenizer}; a scheduler has one\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--interval", "0"], "argument --interval: must be from 0.1 to 3600 seconds, got '0'"),
        (["--interval", "nan"], "must be from 0.1 to 3600 seconds, got 'nan'"),
        (["--interval", "x"], "must be from 0.1 to 3600 seconds, got 'x'"),
        (["--samples", "0"], "argument --samples: must be from 1 to 240, got '0'"),
        (["--samples", "241"], "must be from 1 to 240, got '241'"),
        (["--target", "nowhere"], "--target: target: must be HOST:PORT or unix:///PATH"),
        (["--once", "--json"], "not allowed with argument --once"),
    ],
)
async def test_a_wrong_call(capsys: Read, arguments: list[str], part: str) -> None:
    assert part in await top(capsys, *arguments, code=2)


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        ({}, {}, ""),
        ({"info_listen": ["127.0.0.1:1,unix:///x", "127.0.0.1:2"]}, {}, "127.0.0.1:1"),
        ({"admin_listen": ["unix:///a"]}, {}, "unix:///a"),
        ({"info_listen": ["h:1"], "admin_listen": ["h:2"]}, {}, "h:1"),
        ({}, {"QUIRE_ADMIN_LISTEN": "h:3"}, "h:3"),
        ({}, {"QUIRE_INFO_LISTEN": "h:4", "QUIRE_ADMIN_LISTEN": "h:3"}, "h:4"),
    ],
)
def test_quire_up_knows_where_it_was_told_to_tell(
    flags: dict[str, list[str]], environment: dict[str, str], told: str
) -> None:
    args = argparse.Namespace(**{"info_listen": None, "admin_listen": None, **flags})
    assert info_told(args, environment) == told
