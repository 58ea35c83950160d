"""`quire admin` before the real servicer, on which a hand-written loop follows."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.v1 import admin_pb2_grpc
from services.chassis.server import GrpcServer
from services.scheduler.admin import AdminServicer
from services.scheduler.audit import AuditLog
from services.scheduler.hashing import SHA256
from services.scheduler.prompt_hasher import PromptHasher
from services.scheduler.session_chains import SessionChains
from tests.fakes.admin_loop import FakeLoop
from tests.fakes.text_service import FakeTextService, serving

Read = pytest.CaptureFixture[str]


class Scheduler:
    """A scheduler's admin service, and a shell beside it."""

    def __init__(self, loop: FakeLoop, target: str, capsys: Read) -> None:
        self.loop = loop
        self.target = target
        self._capsys = capsys

    async def quire(self, *argv: str, code: int = 0) -> str:
        """What `quire admin` prints on standard output, or on standard error where it fails."""
        arguments = ["admin", *argv, "--target", self.target]
        assert await asyncio.to_thread(main, arguments) == code
        captured = self._capsys.readouterr()
        assert (captured.err == "") == (code == 0)
        return captured.err if code else captured.out


@pytest.fixture
async def scheduler(tmp_path: Path, capsys: Read) -> AsyncIterator[Scheduler]:
    loop = FakeLoop(most_pinned=1000)
    server = GrpcServer([], ["quire.v1.AdminService"])
    hasher = PromptHasher(SHA256, SessionChains())
    servicer = AdminServicer(loop, hasher, AuditLog(clock=lambda: 1_700_000_000_000_000))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server.grpc)
    (target,) = await server.start([f"unix://{tmp_path}/a.sock"])
    yield Scheduler(loop, target, capsys)
    await server.stop()


async def test_get_shows_every_setting(scheduler: Scheduler) -> None:
    lines = (await scheduler.quire("get")).splitlines()
    assert lines[0] == "version 1"
    shown = dict(line.split() for line in lines[1:])
    assert (shown["max-num-seqs"], shown["class.batch.share"]) == ("none", "50")
    assert json.loads(await scheduler.quire("get", "--json")) == {"version": 1, "settings": shown}


async def test_set_shows_old_and_new(scheduler: Scheduler) -> None:
    change = ("max-num-seqs=64", "tenant.acme.weight=3", "policy=priority")
    assert await scheduler.quire("set", *change) == (
        "max-num-seqs: none -> 64\n"
        "scheduling-policy: fair -> priority\n"
        "tenant.acme.weight: none -> 3\n"
        "version 2\n"
    )
    assert await scheduler.quire("set", *change) == "version 2; nothing changed\n"
    assert scheduler.loop.config.max_num_seqs == 64
    changed = await scheduler.quire("set", "--json", "max-num-seqs=none")
    assert json.loads(changed) == {
        "version": 3,
        "changes": [{"field": "max-num-seqs", "old": "64", "new": "none"}],
    }


async def test_a_refused_change_is_one_line(scheduler: Scheduler) -> None:
    told = await scheduler.quire("set", "max-num-seq=1", "policy=lifo", code=1)
    assert told == (
        "quire: max-num-seq: is no setting; did you mean max-num-seqs?; "
        "scheduling-policy: must be one of fair, priority, fcfs, got 'lifo'\n"
    )
    told = await scheduler.quire("set", "prefill-chunk-size=0", "class.x.share=1", code=1)
    assert told == (
        "quire: change.prefill_chunk_size: must be from 1 to 4294967295, got 0; "
        "change.classes[x]: is no class of this scheduler; they are interactive, standard, batch\n"
    )
    told = await scheduler.quire("set", "ageing=1", "--expected-version", "7", code=1)
    assert told == "quire: expected_version: 1 is in force, got 7\n"
    assert scheduler.loop.configured == []


async def test_changes_say_who_and_why(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setattr("socket.gethostname", lambda: "desk")
    await scheduler.quire("set", "ageing=1.5", "--reason", "too slow")
    await scheduler.quire("set", "ageing=2", "--actor", "night shift")
    first, second = (await scheduler.quire("changes")).splitlines()
    assert first.startswith("2023-11-14 22:13:20Z  ageing: 30 -> 1.5  by ann@desk at unix:")
    assert first.endswith("(too slow)")
    assert "ageing: 1.5 -> 2  by night shift at unix:" in second
    assert (await scheduler.quire("changes", "--limit", "1")).splitlines() == [second]
    (change,) = json.loads(await scheduler.quire("changes", "--json", "--limit=1"))["changes"]
    assert change.pop("peer").startswith("unix:")
    assert change == {
        "time": "2023-11-14T22:13:20Z",
        "actor": "night shift",
        "reason": "",
        "field": "ageing",
        "old": "1.5",
        "new": "2",
        "version": 3,
    }


async def test_a_prefix_is_pinned_by_its_token_ids(scheduler: Scheduler) -> None:
    pinned = await scheduler.quire("pin", "a", "--token-ids", "1,2,3,4,5,6,7,8,9", "--ttl", "60")
    assert pinned == "a: 2 blocks, 1 cached now\n"
    (pin,) = scheduler.loop.pins()
    assert pin.expires == scheduler.loop.now + 60_000_000
    await scheduler.quire("pin", "long name", "--token-ids=1,2,3,4", "--tenant=t", "--json")
    assert await scheduler.quire("pins") == (
        "a          1 of 2 blocks cached  60 s left\n"
        "long name  1 of 1 blocks cached  until unpinned\n"
        "3 blocks are kept by pins alone now\n"
    )
    assert json.loads(await scheduler.quire("pins", "--json")) == {
        "pins": [
            {"name": "a", "blocks": 2, "cached": 1, "expires_in_ms": 60_000},
            {"name": "long name", "blocks": 1, "cached": 1, "expires_in_ms": None},
        ],
        "blocks_pinned": 3,
    }
    assert await scheduler.quire("unpin", "a") == "a: unpinned\n"
    assert await scheduler.quire("unpin", "a", code=1) == "quire: name: there is no pin 'a'\n"


async def test_a_prefix_is_pinned_by_its_text(scheduler: Scheduler, tmp_path: Path) -> None:
    """The fake tokenizer gives one id per character, after a special token."""
    file = tmp_path / "prefix"
    file.write_text("+" * 7)
    async with serving(FakeTextService()) as tokenizer:
        asked = ("--tokenizer", tokenizer)
        assert (await scheduler.quire("pin", "a", "--file", str(file), *asked))[
            :11
        ] == "a: 2 blocks"
        await scheduler.quire("pin", "b", "--text", "+++", *asked)
        await scheduler.quire("pin", "c", "--token-ids", "1,43,43,43")
        await scheduler.quire("pin", "d", "--system", "!", *asked, code=1)  # 'system' is beyond
    by_name = {pin.name: pin.hashes for pin in scheduler.loop.pins()}
    assert by_name["b"] == by_name["c"] == by_name["a"][:32]


async def test_a_text_that_cannot_be_read_is_one_line(scheduler: Scheduler, tmp_path: Path) -> None:
    file = tmp_path / "latin"
    file.write_bytes(b"ab\xff")
    told = await scheduler.quire("pin", "a", "--file", str(file), code=1)
    assert told == f"quire: {file}: is not UTF-8 at byte 2\n"
    told = await scheduler.quire("pin", "a", "--file", str(tmp_path / "no"), code=1)
    assert told == f"quire: {tmp_path / 'no'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["pin", "a"], "one of the arguments --text --file --system --token-ids is required"),
        (["pin", "a", "--token-ids=1,x"], "must be a whole number from 0 to 4294967295, got 'x'"),
        (["pin", "a", "--text=x", "--ttl=-1"], "argument --ttl: must be a whole number from 0"),
        (["set"], "the following arguments are required: NAME=VALUE"),
        (["set", "a=1", "--expected-version=x"], "must be a whole number from 0"),
        (["sett"], "did you mean quire admin set?"),
    ],
)
async def test_a_wrong_call(scheduler: Scheduler, argv: list[str], part: str) -> None:
    assert part in await scheduler.quire(*argv, code=2)


async def test_who_is_no_scheduler_is_named(capsys: Read) -> None:
    async with serving(FakeTextService()) as tokenizer:
        assert await asyncio.to_thread(main, ["admin", "get", "--target", tokenizer]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"quire: there is no admin service at {tokenizer}; ")
    assert told.endswith("quire up takes --admin-listen 127.0.0.1:50052\n")


async def test_where_nobody_is_it_says_where_to_look(tmp_path: Path, capsys: Read) -> None:
    target = f"unix://{tmp_path}/no.sock"
    assert await asyncio.to_thread(main, ["admin", "get", "--target", target]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"quire: cannot reach {target} (")
    assert told.endswith("quire up takes --admin-listen 127.0.0.1:50052\n")
    assert told.count("\n") == 1


async def test_a_user_without_a_name_is_a_number(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("socket.gethostname", lambda: "desk")
    await scheduler.quire("set", "ageing=1")
    (change,) = json.loads(await scheduler.quire("changes", "--json"))["changes"]
    assert change["actor"] == "1234@desk"
