"""Real services with `--record`: a load with faults in it, then the scheduler's run once more."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import generation_pb2
from services.scheduler.journal_file import JournalFile
from tests.system.raw_requests import text_request
from tests.system.service_set import ROOT, ServiceSet, serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

STREAMS = 12
ANSWER = 60
WORKER = ("--max-num-seqs=8", "--max-num-batched-tokens=64", "--max-model-len=512")
# 64 blocks of 16 tokens: eight rows at their longest do not fit.
SMALL = (*WORKER, "--kv-cache-memory=1MiB")


def prompt(number: int) -> list[int]:
    """Half of them begin with the same two blocks."""
    shared = list(range(100, 132)) if number % 2 else []
    return [*shared, *((number * 7 + place) % 250 for place in range(30 + number % 9))]


async def answer(services: ServiceSet, number: int, *, cancelled: bool = False) -> int:
    """Number of tokens; a cancelled call ends after some."""
    options = generation_pb2.SchedulingOptions(
        priority_class=("interactive", "standard", "batch")[number % 3], tenant=f"t{number % 2}"
    )
    call = services.text.Generate(text_request(prompt(number), ANSWER, scheduling=options))
    tokens = 0
    async for response in call:
        tokens += len(response.token_ids)
        if cancelled and tokens > 5:
            call.cancel()
            return tokens
    return tokens


async def load_with_faults(services: ServiceSet) -> None:
    """Two waves; a worker is killed in the midst of the first, and some callers go away."""

    async def stream(first: int) -> None:
        for number in range(first, first + 3):
            gone = number % 5 == 0
            with contextlib.suppress(asyncio.CancelledError):
                tokens = await answer(services, number, cancelled=gone)
                assert gone or tokens == ANSWER

    async def killer() -> None:
        async def at_work() -> bool:
            workers = (await services.loads()).workers
            return len(workers) == 2 and all(worker.running >= 2 for worker in workers)

        await services.until(at_work)
        await services.programs["worker-0"].kill()
        await services.start("worker-0")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(killer())
        for first in range(STREAMS):
            tasks.create_task(stream(7 * first + 1))


async def replayed(path: Path, *flags: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "replay", str(path), *flags),
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def recorded(model: Path, journal: Path, flags: Sequence[str], ending: signal.Signals) -> int:
    """Runs the load; gives the requests that the scheduler accepted."""
    scheduler = (f"--record={journal}", *flags)
    async with serving(model, {"scheduler": scheduler, "worker": SMALL}, workers=2) as services:
        await load_with_faults(services)
        await services.until(services.at_rest)
        await asyncio.sleep(0.6)  # what a killed process may lose is a quarter of a second
        accepted = (await services.loads()).accepted
        services.programs["scheduler"].send(ending)
        code = await services.programs["scheduler"].exit_code()
        assert code == (0 if ending is signal.SIGTERM else -ending), services.logs
        assert "ERROR" not in services.programs["scheduler"].log
    return int(accepted)


def report_of(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.parametrize("hash_only", [False, True])
async def test_a_run_with_a_killed_worker_is_replayed(
    random_model: Path, tmp_path: Path, hash_only: bool
) -> None:
    journal, report = tmp_path / "j", tmp_path / "report"
    flags = ("--record-hash-only",) if hash_only else ()
    accepted = await recorded(random_model, journal, flags, signal.SIGTERM)
    code, out = await replayed(journal, f"--json={report}", "--max-num-seqs=2")
    assert code == 0, out
    assert "identical: all" in out
    told = report_of(report)
    assert told["remark"] == ""
    summary = told["replay"]
    assert summary["requests"] - summary["refused"] == accepted == 3 * STREAMS
    assert summary["ends"]["length"] + summary["ends"]["abort"] == accepted
    assert summary["ends"]["abort"] > 3
    assert summary["requeues"] > 0
    assert sorted(summary["workers"]) == ["worker-0", "worker-1"]
    assert summary["cached_tokens"] > 0
    assert told["what_if"]["ends"]["length"] >= summary["ends"]["length"]
    assert told["what_if"]["most_running"] <= 4
    data = journal.read_bytes()
    packed = b"".join(token.to_bytes(4, "little") for token in prompt(1)[:8])
    assert (packed in data) == (not hash_only)


async def test_a_killed_scheduler_leaves_what_it_did(random_model: Path, tmp_path: Path) -> None:
    journal, report = tmp_path / "j", tmp_path / "report"
    accepted = await recorded(random_model, journal, (), signal.SIGKILL)
    code, out = await replayed(journal, f"--json={report}")
    assert code == 0, out
    assert "file: cut" in out
    assert "identical: all" in out
    assert report_of(report)["replay"]["requests"] == accepted
    with JournalFile(journal) as file:
        assert sum(1 for _ in file.entries()) > 100
        assert not file.ended_well


async def test_a_file_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.scheduler", f"--listen=unix://{tmp_path}/s"),
        f"--record={tmp_path}/none/j",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 2
    assert out.decode().splitlines()[-1].endswith("none/j: No such file or directory")
