"""The local set: everything starts at once, ends in order, and nothing is left behind."""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cli.running import with_local_set
from quire.client import AsyncClient
from quire.errors import QuireError, SetFailed
from quire.local import CHECKS, LocalConfig, LocalSet, Phase, RestartPolicy, WrongSettings
from quire.local_plan import free_ports, members_of
from quire.local_process import Deaths
from tests.quire.cli.running_quire import environment, started
from tests.quire.set_script import AT_ONCE, PROGRAMS

Pids = dict[str, int]

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


CONFIG = LocalConfig(
    model=Path("/model"), served_model_name="fake", port=0, programs=PROGRAMS, checks={}
)
SEVERAL = replace(CONFIG, workers=2, tokenizers=2)


async def fail_to_start(config: LocalConfig) -> None:
    async with LocalSet(config):
        pass


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def left_behind(record: Path) -> tuple[list[Path], list[str]]:
    """Temporary files, and processes that are still there."""
    alive = [pid for pid in lines(record / "started") if fields(pid)[:1] not in ([], ["Z"])]
    return list((record / "t").iterdir()), alive


def fields(pid: int | str) -> list[str]:
    """What the system says of a process, from its state on; nothing of one that is gone."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split() if stat.exists() else []


async def test_all_are_up_then_all_are_gone_in_order(record: Path) -> None:
    phases: list[Phase] = []
    async with LocalSet(CONFIG, on_phase=phases.append) as running:
        async with AsyncClient(running.target) as client:
            assert await client.is_ready()
        assert {phase.name for phase in phases} == {"scheduler", "worker-0", "tokenizer-0"}
        assert running.phases == tuple(phases)
        assert len(lines(record / "started")) == 3
    assert lines(record / "ended") == ["tokenizer", "scheduler", "worker"]
    assert left_behind(record) == ([], [])


async def test_facts_are_told_outside_only_where_asked_for(record: Path) -> None:
    async with LocalSet(replace(CONFIG, log_dir=record / "logs")) as running:
        assert running.info == ""
    assert "--info-listen" not in (record / "logs/scheduler.log").read_text()


async def test_facts_have_the_port_that_is_wanted(record: Path) -> None:
    (port,) = free_ports("127.0.0.1", 0, 1)
    async with LocalSet(replace(CONFIG, info_port=port, log_dir=record / "logs")) as running:
        assert running.info == f"127.0.0.1:{port}"
    told = (record / "logs/scheduler.log").read_text()
    assert told == f"scheduler was given --info-listen 127.0.0.1:{port} --metrics-port=9461\n"


async def test_facts_have_another_port_where_somebody_has_theirs(record: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        async with LocalSet(replace(CONFIG, info_port=taken)) as running:
            assert re.fullmatch(r"127\.0\.0\.1:\d+", running.info)
            assert running.info != f"127.0.0.1:{taken}"


async def test_facts_do_not_take_the_port_of_a_tokenizer(record: Path) -> None:
    first = free_row(2)
    config = replace(SEVERAL, port=first, info_port=first + 1)
    async with LocalSet(config) as running:
        assert running.info not in running.targets


def free_row(count: int) -> int:
    """The first of some free ports in a row."""
    while True:
        (port,) = free_ports("127.0.0.1", 0, 1)
        with contextlib.suppress(SetFailed):
            return free_ports("127.0.0.1", port, count)[0]


async def test_each_is_given_its_flags(record: Path) -> None:
    flags = {"worker": ["--dtype=float32"], "scheduler": ["--prefill-chunk-size=9"]}
    logs = record / "logs"
    async with LocalSet(replace(CONFIG, flags=flags, log_dir=logs)):
        pass
    said = {path.stem: path.read_text() for path in logs.iterdir()}
    model = "--model /model --served-model-name fake"
    given = "scheduler was given --prefill-chunk-size=9 --metrics-port=9461\n"
    assert said["scheduler"] == given
    assert f"{model} --dtype=float32 --metrics-port=9462\n" in said["worker-0"]
    assert "--scheduler unix:///" in said["worker-0"]
    assert f"{model} --metrics-port=9463\n" in said["tokenizer-0"]
    assert "--scheduler unix:///" in said["tokenizer-0"]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--metrics-port=7000"], [7000, 7001, 7002, 7003]),
        (["--metrics-port=0"], [0, 0, 0, 0]),
        (["--metrics-port=many"], ["many"] * 4),
    ],
)
def test_each_has_a_port_of_its_own_for_metrics(
    tmp_path: Path, given: list[str], passed: list[object]
) -> None:
    flags = dict.fromkeys(("scheduler", "worker", "tokenizer"), given)
    config = replace(CONFIG, workers=2, flags=flags)
    members = members_of(config, tmp_path, "unix:///s", (50051,))
    assert [member.flags[-1] for member in members] == [f"--metrics-port={one}" for one in passed]
    known = [one if isinstance(one, int) and one else None for one in passed]
    assert [member.metrics_port for member in members] == known


async def test_workers_have_names_of_their_own_and_share_the_machine(record: Path) -> None:
    logs = record / "logs"
    async with LocalSet(replace(CONFIG, workers=3, log_dir=logs)):
        pass
    said = [(logs / f"worker-{number}.log").read_text() for number in range(3)]
    ids = [re.findall(r"--worker-id (\S+)", text)[0] for text in said]
    assert len(set(ids)) == 3
    for number, name in enumerate(ids):
        assert re.fullmatch(rf"{re.escape(socket.gethostname())}-quire-\w+-worker-{number}", name)
    assert all("--local-workers 3" in text for text in said)


async def test_logs_are_copied_as_they_come(record: Path) -> None:
    copied = io.StringIO()
    async with LocalSet(CONFIG, log_to=copied):
        pass
    assert sorted(line.partition(" was given ")[0] for line in copied.getvalue().splitlines()) == [
        "scheduler   | scheduler",
        "tokenizer-0 | tokenizer",
        "worker-0    | worker",
    ]


async def test_an_openai_gateway_is_one_more_process_of_the_set(record: Path) -> None:
    logs = record / "logs"
    config = replace(CONFIG, openai_port=0, host="127.0.0.2", log_dir=logs)
    said: list[str] = []
    async with LocalSet(config, on_restart=said.append) as running:
        assert re.fullmatch(r"http://127\.0\.0\.2:\d+/v1", running.openai_url)
        assert [phase.name for phase in running.phases].count("gateway") == 1
        pids = dict(running.processes())
        os.kill(pids["gateway"], signal.SIGKILL)
        async with asyncio.timeout(20):
            while not any(line.startswith("gateway ready again") for line in said):
                await asyncio.sleep(0.05)
    *doors, last_but_one, last = lines(record / "ended")
    assert (set(doors), last_but_one, last) == ({"gateway", "tokenizer"}, "scheduler", "worker")
    assert left_behind(record) == ([], [])
    assert re.search(r"--worker-urls grpc://127\.0\.0\.1:\d+ ", (logs / "gateway.log").read_text())
    assert "--tokenizer /model" in (logs / "scheduler.log").read_text()


async def test_without_a_gateway_there_is_no_url_and_no_process(record: Path) -> None:
    async with LocalSet(CONFIG) as running:
        assert running.openai_url == ""
        assert "gateway" not in dict(running.processes())


async def test_a_port_that_the_gateway_cannot_have(record: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WrongSettings) as caught:
            await fail_to_start(replace(CONFIG, openai_port=port))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another --openai-port"
    )
    with pytest.raises(WrongSettings, match="--openai-port must be from 0 to 65535, got 70000"):
        await fail_to_start(replace(CONFIG, openai_port=70_000))
    assert left_behind(record) == ([], [])


async def test_what_the_gateway_needs_is_told_before_anything_starts(record: Path) -> None:
    script = (
        "import runpy, sys; sys.modules.update(smg=None, smg_grpc_proto=None);"
        "runpy.run_module('services.check_settings', run_name='__main__', alter_sys=True)"
    )
    check = (sys.executable, "-c", script, "gateway")
    with pytest.raises(WrongSettings) as caught:
        await fail_to_start(replace(CONFIG, openai_port=0, checks={"gateway": check}))
    assert str(caught.value) == (
        "--openai needs smg and smg_grpc_proto; install with: pip install 'quire-llm[openai]'"
    )
    assert not (record / "started").exists()
    async with LocalSet(replace(CONFIG, openai_port=0, checks={"gateway": CHECKS["gateway"]})):
        pass


@pytest.mark.parametrize("name", ["scheduler", "worker-0", "tokenizer-0"])
async def test_one_that_dies_at_start_ends_all_and_says_why(
    record: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"DIE_{name.removesuffix('-0')}", "no model here")
    with pytest.raises(SetFailed) as caught:
        await fail_to_start(CONFIG)
    assert str(caught.value) == f"{name} ended with exit code 1: no model here"
    assert left_behind(record) == ([], [])


async def test_a_program_that_is_not_there(record: Path) -> None:
    programs = {**PROGRAMS, "worker": ("/no/such/program",)}
    with pytest.raises(
        SetFailed, match=r"^worker-0 ended with exit code 127: /no/such/program: No such"
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
        ({"port": 65_536}, "--port must be from 0 to 65535, got 65536"),
        ({"port": -1}, "--port must be from 0 to 65535, got -1"),
        (
            {"host": "203.0.113.1"},
            "cannot listen on 203.0.113.1 (Cannot assign requested address); choose another --host",
        ),
        (
            {"host": "127.0.0.256"},
            "cannot listen on 127.0.0.256 (Name or service not known); choose another --host",
        ),
        (
            {"host": "a..b"},
            "cannot listen on 'a..b' (encoding with 'idna' codec failed (UnicodeError: label "
            "empty or too long)); choose another --host",
        ),
    ],
)
async def test_an_address_that_makes_no_sense(
    record: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongSettings) as caught:
        await fail_to_start(replace(CONFIG, **changes))
    assert str(caught.value) == message
    assert lines(record / "started") == []


async def test_several_tokenizers_have_consecutive_ports(record: Path) -> None:
    port = three_free_ports()
    async with LocalSet(replace(CONFIG, tokenizers=3, port=port)) as running:
        assert running.targets == tuple(f"127.0.0.1:{port + i}" for i in range(3))
        assert running.target == ",".join(running.targets)
        for target in running.targets:
            async with AsyncClient(target) as client:
                assert await client.is_ready()
    assert lines(record / "ended") == ["tokenizer"] * 3 + ["scheduler", "worker"]


async def test_the_port_in_use_is_the_one_that_is_named(record: Path) -> None:
    port = three_free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        with pytest.raises(SetFailed, match=rf"^cannot listen on 127\.0\.0\.1:{port + 2} \(Addr"):
            await fail_to_start(replace(CONFIG, tokenizers=3, port=port))
    assert lines(record / "started") == []


def three_free_ports() -> int:
    """The first of three consecutive ports that nobody has."""
    for port in range(20_000, 30_000, 3):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(port, port + 3):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
    raise AssertionError("no free ports")


async def test_all_are_ready_and_named(record: Path) -> None:
    phases: list[Phase] = []
    async with LocalSet(SEVERAL, on_phase=phases.append) as running:
        names = ["scheduler", "worker-0", "worker-1", "tokenizer-0", "tokenizer-1"]
        assert sorted(phase.name for phase in phases) == sorted(names)
        assert [name for name, _ in running.processes()] == names
        pids = {str(pid) for _, pid in running.processes()}
        assert pids == set(lines(record / "started"))
    assert lines(record / "ended") == ["tokenizer"] * 2 + ["scheduler"] + ["worker"] * 2
    assert left_behind(record) == ([], [])


async def restarted(running: LocalSet, name: str, before: int) -> int:
    """The pid of a process once it has a new one."""
    async with asyncio.timeout(20):
        while (pid := dict(running.processes()).get(name, before)) == before:
            await asyncio.sleep(0.01)
    return pid


@pytest.mark.parametrize("name", ["scheduler", "worker-1", "tokenizer-1"])
async def test_one_that_dies_later_is_started_again(record: Path, name: str) -> None:
    said: list[str] = []
    logs = record / "logs"
    async with LocalSet(replace(SEVERAL, log_dir=logs), on_restart=said.append) as running:
        before = dict(running.processes())
        os.kill(before[name], signal.SIGKILL)
        after = await restarted(running, name, before[name])
        assert dict(running.processes()) == {**before, name: after}
        for target in running.targets:
            async with AsyncClient(target) as client, asyncio.timeout(20):
                while not await ready(client):
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            while len(given := given_to(logs, name)) < 2 or len(said) < 2:
                await asyncio.sleep(0.01)
    hint = " (is there enough memory?)" if name == "worker-1" else ""
    assert said[0] == f"{name} was killed by SIGKILL{hint}; it is started again in 0.2 s"
    assert re.fullmatch(rf"{name} ready again after \d+\.\d s", said[1])
    assert len(said) == 2
    assert given[0] == given[1]
    assert left_behind(record) == ([], [])


async def ready(client: AsyncClient) -> bool:
    """Whether it can be reached and is ready."""
    with contextlib.suppress(QuireError):
        return await client.is_ready()
    return False


def given_to(logs: Path, name: str) -> list[str]:
    """What each start of a process logged."""
    return (logs / f"{name}.log").read_text().splitlines()


async def test_the_process_in_between_takes_its_program_with_it(record: Path) -> None:
    async with LocalSet(CONFIG) as running:
        pid = dict(running.processes())["tokenizer-0"]
        between = int(fields(pid)[1])
        os.kill(between, signal.SIGKILL)
        await restarted(running, "tokenizer-0", pid)
        assert str(pid) not in left_behind(record)[1]
    assert left_behind(record) == ([], [])


async def test_one_that_dies_again_and_again_is_given_up(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        config = replace(SEVERAL, restarts=AT_ONCE)
        running = await stack.enter_async_context(LocalSet(config, on_restart=said.append))
        monkeypatch.setenv("DIE_worker", "no memory")
        os.kill(dict(running.processes())["worker-1"], signal.SIGKILL)
        with pytest.raises(SetFailed) as caught:
            await running.failure()
    assert str(caught.value) == (
        "worker-1 ended with exit code 1: no memory; given up, since it ended 5 times in 60 s"
    )
    assert len(said) == 4
    assert said[3] == "worker-1 ended with exit code 1: no memory; it is started again in 0.01 s"
    assert left_behind(record) == ([], [])


async def test_after_giving_up_nobody_is_waited_for_long(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ("scheduler", "tokenizer"):
        monkeypatch.setenv(f"STUBBORN_{service}", "1")
    config = replace(CONFIG, restarts=AT_ONCE, hurry_timeout_s=0.05, drain_timeout_s=3600)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(LocalSet(config))
        monkeypatch.setenv("DIE_worker", "no memory")
        os.kill(dict(running.processes())["worker-0"], signal.SIGKILL)
        with pytest.raises(SetFailed, match="given up"):
            await running.failure()
    assert left_behind(record) == ([], [])


async def test_the_reason_is_told_before_the_others_end(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUBBORN_tokenizer", "1")
    config = replace(CONFIG, restarts=AT_ONCE, hurry_timeout_s=3600, drain_timeout_s=3600)
    up = asyncio.Event()
    pids: Pids = {}

    async def serve(running: LocalSet) -> None:
        pids.update(running.processes())
        up.set()
        await running.failure()

    async def lose() -> None:
        with pytest.raises(SetFailed, match="all processes have ended, since one was given up"):
            await with_local_set(config, serve, verbose=False)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(lose())
        await up.wait()
        monkeypatch.setenv("DIE_worker", "no memory")
        os.kill(pids["worker-0"], signal.SIGKILL)
        said = ""
        while "given up, since it ended 5 times in 60 s\n" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert str(pids["tokenizer-0"]) in left_behind(record)[1]
        os.kill(os.getpid(), signal.SIGINT)  # hurries the end, and is no orderly one all the same
    assert left_behind(record) == ([], [])


def test_the_wait_doubles_and_starts_anew_after_a_steady_run() -> None:
    deaths = Deaths(RestartPolicy())
    ends = [(100.0 * i, 1.0) for i in range(7)]
    assert [deaths.delay_after(now, ran) for now, ran in ends] == [
        *(0.2, 0.4, 0.8, 1.6, 3.2, 6.4),
        10.0,
    ]
    assert deaths.delay_after(1000.0, 60.0) == 0.2


@pytest.mark.parametrize(("last", "delay"), [(60.0, None), (60.1, 3.2)])
def test_the_fifth_end_within_a_minute_is_the_last(last: float, delay: float | None) -> None:
    deaths = Deaths(RestartPolicy())
    for now in (0.0, 10.0, 20.0, 30.0):
        assert deaths.delay_after(now, 1.0) is not None
    assert deaths.delay_after(last, 1.0) == delay


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "--workers must be from 1 to 64, got 0"),
        ({"workers": "two"}, "--workers must be from 1 to 64, got 'two'"),
        ({"tokenizers": True}, "--tokenizers must be from 1 to 64, got True"),
        ({"tokenizers": 65}, "--tokenizers must be from 1 to 64, got 65"),
        (
            {"workers": -1, "tokenizers": 0},
            "--workers must be from 1 to 64, got -1; --tokenizers must be from 1 to 64, got 0",
        ),
        (
            {"tokenizers": 2, "port": 65_535},
            "--port 65535 leaves no room for 2 tokenizers on ports from there on; the last one is "
            "65535",
        ),
    ],
)
async def test_numbers_that_make_no_sense(
    record: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetFailed) as caught:
        await fail_to_start(replace(CONFIG, **changes))
    assert str(caught.value) == message
    assert lines(record / "started") == []


async def test_wrong_settings_are_all_told_before_anything_starts(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "many")
    flags = {"worker": ["--dtype=int8", "--block-size=x"], "scheduler": ["--prefill-chunk-size=x"]}
    wrong = replace(CONFIG, flags=flags, checks=CHECKS, workers=100, tokenizers=-1, port=70_000)
    with pytest.raises(WrongSettings) as caught:
        await fail_to_start(wrong)
    assert str(caught.value).split("; ") == [
        "--workers must be from 1 to 64, got 100",
        "--tokenizers must be from 1 to 64, got -1",
        "--port must be from 0 to 65535, got 70000",
        "QUIRE_MAX_NUM_SEQS must be a whole number, got 'many'",
        "--prefill-chunk-size must be a whole number, got 'x'",
        "--dtype must be one of auto, float32, bfloat16, float16, got int8",
        "--block-size must be a whole number, got 'x'",
    ]
    assert left_behind(record) == ([], [])
    assert lines(record / "started") == []


async def test_a_check_that_cannot_be_made(record: Path) -> None:
    with pytest.raises(SetFailed, match="cannot start /no/such/check: No such file"):
        await fail_to_start(replace(CONFIG, checks={"worker": ("/no/such/check",)}))
    assert left_behind(record) == ([], [])


async def test_one_that_will_not_end_is_killed(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUBBORN_tokenizer", "1")
    async with LocalSet(replace(CONFIG, drain_timeout_s=0.2)):
        pass
    assert lines(record / "ended") == ["scheduler", "worker"]
    assert left_behind(record) == ([], [])


@contextlib.asynccontextmanager
async def script(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Pids]]:
    """A process that has a set up, and the pids in it by name."""
    command = (sys.executable, str(SCRIPT), *arguments)
    async with started(*command, env=environment()) as process:
        assert process.stdout is not None
        pids: Pids = {}
        async for line in process.stdout:
            if line.startswith(b"up "):
                pids = json.loads(line.removeprefix(b"up "))
                break
        yield process, pids


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
    async with script() as (process, _):
        process.send_signal(number)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"ending; once more ends at once\n")
    assert lines(record / "ended") == ["tokenizer", "scheduler", "worker"]
    assert left_behind(record) == ([], [])


async def test_a_second_signal_kills(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUBBORN_tokenizer", "1")
    async with script() as (process, _):
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        await process.wait()
    assert process.returncode == 0
    assert left_behind(record) == ([], [])


async def test_a_restart_is_one_line(record: Path) -> None:
    async with script("--workers", "2", "-v") as (process, pids):
        assert process.stderr is not None
        os.kill(pids["worker-1"], signal.SIGTERM)
        said = b""
        while said.count(b"worker-1    | worker was given") < 2:
            said += await process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        said += (await process.communicate())[1]
    assert process.returncode == 0
    told = [line for line in said.decode().splitlines() if line.startswith("quire: ")]
    assert told[0] == (
        "quire: worker-1 ended in order, though nobody asked it to; it is started again in 0.2 s"
    )
    # Whether it is ready before the set ends is a matter of time.
    assert all(re.match("quire: worker-1 ready again after", line) for line in told[1:])
    assert left_behind(record) == ([], [])


@pytest.mark.parametrize("service", ["scheduler", "worker"])
async def test_ctrl_c_while_one_waits_for_its_restart(
    record: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    dying = record / "dying"
    monkeypatch.setenv("DIE_LIST", str(dying))
    name = service if service == "scheduler" else f"{service}-0"
    async with script() as (process, pids):
        assert process.stderr is not None
        dying.write_text(service)
        os.kill(pids[name], signal.SIGKILL)
        for delay in ("0.2", "0.4"):
            line = (await process.stderr.readline()).decode()
            assert line.endswith(f"; it is started again in {delay} s\n")
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"ending; once more ends at once\n")
    assert left_behind(record) == ([], [])


async def test_giving_up_is_told_at_once_and_1(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = record / "dying"
    monkeypatch.setenv("DIE_LIST", str(dying))
    async with script("--restart-at-once") as (process, pids):
        dying.write_text("tokenizer")
        os.kill(pids["tokenizer-0"], signal.SIGKILL)
        _, err = await process.communicate()
    *restarts, reason, last = err.decode().splitlines()
    assert (process.returncode, len(restarts)) == (1, 4)
    assert reason == (
        "quire: tokenizer-0 ended with exit code 1: it is on the list; "
        "given up, since it ended 5 times in 60 s"
    )
    assert last == "quire: all processes have ended, since one was given up"
    assert left_behind(record) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_the_start(
    record: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    command = (sys.executable, str(SCRIPT), "--workers", "2")
    async with started(*command, env=environment()) as process, asyncio.timeout(20):
        while not lines(record / "started"):
            await asyncio.sleep(0.005)
        process.send_signal(number)
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"ending; once more ends at once\n")
    assert b"up" not in out
    assert left_behind(record) == ([], [])


async def test_nobody_outlives_a_parent_that_is_killed(record: Path) -> None:
    async with script() as (process, _):
        process.kill()
    async with asyncio.timeout(20):
        while left_behind(record)[1]:
            await asyncio.sleep(0.05)
    assert sorted(lines(record / "ended")) == ["scheduler", "tokenizer", "worker"]
    sockets = list((record / "t").rglob("*.sock"))
    assert sockets == []


async def test_one_that_will_not_end_does_not_outlive_a_parent_that_is_killed(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUBBORN_worker", "1")
    async with script("--drain-timeout", "0.2") as (process, _):
        process.kill()
    async with asyncio.timeout(20):
        while left_behind(record)[1]:
            await asyncio.sleep(0.05)
    assert sorted(lines(record / "ended")) == ["scheduler", "tokenizer"]
