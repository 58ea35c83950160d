"""The local set: everything starts at once, ends in order, and nothing is left behind."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.errors import SetFailed
from quire.local import LocalConfig, LocalSet, Phase
from tests.quire.cli.running_quire import environment, started
from tests.quire.set_script import PROGRAMS

SCRIPT = Path(__file__).with_name("set_script.py")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name, as sockets need: temporary files, and what the fakes write."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="q") as name:
        folder = Path(name)
        (folder / "t").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder / "t"))
        monkeypatch.setenv("TMPDIR", str(folder / "t"))
        monkeypatch.setenv("STARTED", str(folder / "started"))
        monkeypatch.setenv("ENDED", str(folder / "ended"))
        yield folder


CONFIG = LocalConfig(model=Path("/model"), served_model_name="fake", port=0, programs=PROGRAMS)


async def fail_to_start(config: LocalConfig) -> None:
    async with LocalSet(config):
        pass


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def left_behind(record: Path) -> tuple[list[Path], list[str]]:
    """Temporary files, and processes that are still there."""
    alive = [pid for pid in lines(record / "started") if Path(f"/proc/{pid}/stat").exists()]
    return list((record / "t").iterdir()), alive


async def test_all_are_up_then_all_are_gone_in_order(record: Path) -> None:
    phases: list[Phase] = []
    async with LocalSet(CONFIG, on_phase=phases.append) as running:
        async with AsyncClient(running.target) as client:
            assert await client.is_ready()
        assert {phase.name for phase in phases} == {"scheduler", "worker", "tokenizer"}
        assert running.phases == tuple(phases)
        assert len(lines(record / "started")) == 3
    assert lines(record / "ended") == ["tokenizer", "scheduler", "worker"]
    assert left_behind(record) == ([], [])


async def test_each_is_given_its_flags(record: Path) -> None:
    flags = {"worker": ["--dtype=float32"], "scheduler": ["--prefill-chunk-size=9"]}
    logs = record / "logs"
    async with LocalSet(replace(CONFIG, flags=flags, log_dir=logs)):
        pass
    said = {path.stem: path.read_text() for path in logs.iterdir()}
    model = "--model /model --served-model-name fake"
    assert said["scheduler"] == "scheduler was given --prefill-chunk-size=9\n"
    assert f"{model} --dtype=float32\n" in said["worker"]
    assert "--scheduler unix:///" in said["worker"]
    assert f"{model}\n" in said["tokenizer"]
    assert "--scheduler unix:///" in said["tokenizer"]


async def test_logs_are_copied_as_they_come(record: Path) -> None:
    copied = io.StringIO()
    async with LocalSet(CONFIG, log_to=copied):
        pass
    assert sorted(line.split()[0] for line in copied.getvalue().splitlines()) == [
        "scheduler",
        "tokenizer",
        "worker",
    ]


@pytest.mark.parametrize("name", ["scheduler", "worker", "tokenizer"])
async def test_one_that_dies_at_start_ends_all_and_says_why(
    record: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"DIE_{name}", "no model here")
    with pytest.raises(SetFailed) as caught:
        await fail_to_start(CONFIG)
    assert str(caught.value) == f"the {name} ended with exit code 1: no model here"
    assert left_behind(record) == ([], [])


async def test_one_that_dies_later_ends_all_and_says_so(record: Path) -> None:
    async def kill_one(running: LocalSet) -> None:
        os.kill(int(lines(record / "started")[0]), signal.SIGKILL)
        await running.failure()

    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(LocalSet(CONFIG))
        with pytest.raises(SetFailed, match=r"^the \w+ was killed by SIGKILL \(is there"):
            await kill_one(running)
    assert left_behind(record) == ([], [])


async def test_a_program_that_is_not_there(record: Path) -> None:
    programs = {**PROGRAMS, "worker": ("/no/such/program",)}
    with pytest.raises(
        SetFailed, match=r"^the worker ended with exit code 127: /no/such/program: No such"
    ):
        await fail_to_start(replace(CONFIG, programs=programs))
    assert left_behind(record) == ([], [])


async def test_a_port_in_use_is_noticed_before_anything_starts(record: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetFailed) as caught:
            await fail_to_start(replace(CONFIG, port=port))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port"
    )
    assert lines(record / "started") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 65_536}, "the port must be from 0 to 65535, got 65536"),
        ({"port": -1}, "the port must be from 0 to 65535, got -1"),
        ({"host": "203.0.113.1"}, r"cannot listen on 203\.0\.113\.1:0 \(Cannot assign"),
    ],
)
async def test_an_address_that_makes_no_sense(
    record: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetFailed, match=message):
        await fail_to_start(replace(CONFIG, **changes))
    assert lines(record / "started") == []


async def test_one_that_will_not_end_is_killed(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUBBORN_tokenizer", "1")
    async with LocalSet(replace(CONFIG, drain_timeout_s=0.2)):
        pass
    assert lines(record / "ended") == ["scheduler", "worker"]
    assert left_behind(record) == ([], [])


@contextlib.asynccontextmanager
async def script(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has a set up."""
    command = (sys.executable, str(SCRIPT), *arguments)
    async with started(*command, env=environment()) as process:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"up "):
                break
        yield process


async def test_a_long_name_of_the_temporary_folder_does_no_harm(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = record / "t" / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    async with LocalSet(CONFIG):
        assert list(long.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_drains_in_order(record: Path, number: signal.Signals) -> None:
    async with script() as process:
        process.send_signal(number)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"ending; once more ends at once\n")
    assert lines(record / "ended") == ["tokenizer", "scheduler", "worker"]
    assert left_behind(record) == ([], [])


async def test_a_second_signal_kills(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUBBORN_tokenizer", "1")
    async with script() as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        await process.wait()
    assert process.returncode == 0
    assert left_behind(record) == ([], [])


async def test_a_process_that_dies_is_one_line(record: Path) -> None:
    async with script() as process:
        os.kill(int(lines(record / "started")[0]), signal.SIGKILL)
        _, err = await process.communicate()
    assert process.returncode == 1
    assert err.startswith(b"quire: the ")
    assert err.count(b"\n") == 1
    assert left_behind(record) == ([], [])


async def test_nobody_outlives_a_parent_that_is_killed(record: Path) -> None:
    async with script() as process:
        process.kill()
    async with asyncio.timeout(20):
        while left_behind(record)[1]:
            await asyncio.sleep(0.05)
    assert sorted(lines(record / "ended")) == ["scheduler", "tokenizer", "worker"]
    sockets = list((record / "t").rglob("*.sock"))
    assert sockets == []
