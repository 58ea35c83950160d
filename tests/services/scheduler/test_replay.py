"""Recorded runs with faults in them, executed again."""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.proto import serialize_length_prefixed

from quire.cli.command import CommandError, Parser, UsageError
from quire.cli.main import main as quire_main
from services.scheduler import journal_codec as codec
from services.scheduler.core.plan import AddRequest, Sampling, StepResult
from services.scheduler.hashing import SHA256
from services.scheduler.journal_file import JournalFile
from services.scheduler.journal_reader import (
    read_arrivals,
    read_requests,
    read_workers,
    step_samples,
)
from services.scheduler.recording import RecordingScheduler
from services.scheduler.replay import Played, Replay
from services.scheduler.replay_command import COMMAND
from tests.fakes.recorded_run import CONFIG, START, RecordedRun, open_journal, worker_spec

ROOT = Path(__file__).parents[3]


def record(path: Path, seed: int, *, hash_only: bool = False, inputs: int = 1500) -> RecordedRun:
    run = RecordedRun(path, seed, hash_only=hash_only)
    run.run(inputs)
    run.close()
    return run


def replay(path: Path) -> list[Played]:
    with JournalFile(path) as file:
        return list(Replay(file).entries())


def rewrite(path: Path, entries: list[codec.Entry]) -> None:
    """The file with these entries, and without its last one."""
    with JournalFile(path) as file:
        header = file.header
    with path.open("wb") as out:
        for message in (header, *entries):
            message.checksum = zlib.crc32(message.SerializeToString())
            serialize_length_prefixed(message, out)  # type: ignore[arg-type]  # any buffered file
            message.ClearField("checksum")


def messages(path: Path) -> list[codec.Entry]:
    with JournalFile(path) as file:
        return list(file.entries())


def command(*arguments: object) -> int:
    parser = Parser(prog="quire replay")
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Path]]:
    """One run, recorded with and without token ids."""
    folder = tmp_path_factory.mktemp("journals")
    paths = {hash_only: folder / f"{hash_only}" for hash_only in (False, True)}
    for hash_only, path in paths.items():
        record(path, seed=7, hash_only=hash_only, inputs=2500)
    return paths


@pytest.mark.parametrize("hash_only", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_decision_of_a_run_with_faults_is_made_again(
    tmp_path: Path, seed: int, hash_only: bool
) -> None:
    run = record(tmp_path / "j", seed, hash_only=hash_only)
    played = replay(tmp_path / "j")
    assert [one for one in played if not one.is_same] == []
    assert run.seen["lied"]
    assert run.seen["stop"]
    assert {"add", "apply", "plan", "lost", "attach", "pin", "configure_json", "flush"} <= {
        one.kind for one in played
    }
    if not hash_only:
        # The same tokens and ends to the same requests, not only the same digests.
        then = [(now, e) for now, e in run.events if e.handles.size or e.ended]
        now = [
            (one.now, one.events)
            for one in played
            if one.events is not None and (one.events.handles.size or one.events.ended)
        ]
        assert len(then) == len(now)
        for (at, before), (again_at, after) in zip(then, now, strict=True):
            assert at == again_at
            assert np.array_equal(before.handles, after.handles)
            assert np.array_equal(before.token_ids, after.token_ids)
            assert before.ended == after.ended


def test_the_runs_meet_all_that_can_befall_them(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in range(4):
        seen |= record(tmp_path / str(seed), seed).seen.keys()
    assert seen >= {
        "stop", "length", "abort", "failed", "no_worker", "deadline", "shed", "refused",
        "lied", "lost", "lost with open steps", "configured",
    }  # fmt: skip


@pytest.mark.parametrize("hash_only", [False, True])
@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_another_process_with_another_hash_seed_decides_the_same(
    journals: dict[bool, Path], hash_only: bool, hash_seed: str
) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from services.scheduler.commands import REPLAY\n"
            "from quire.cli.command import Parser\n"
            "command, parser = REPLAY.load(), Parser()\n"
            "command.configure(parser)\n"
            "sys.exit(command.run(parser.parse_args(sys.argv[1:])))",
            str(journals[hash_only]),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "identical: all" in run.stdout


@pytest.mark.parametrize("kind", ["plan", "apply", "add", "expire"])
def test_a_decision_that_differs_is_found_and_both_are_told(
    journals: dict[bool, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j"
    path.write_bytes(journals[False].read_bytes())
    entries = messages(path)
    number = [
        number
        for number, entry in enumerate(entries, 1)
        if entry.WhichOneof("input") == kind and entry.decision
    ][3 if kind != "add" else 0]
    entries[number - 1].decision ^= 1
    rewrite(path, entries)
    assert command(path, "--json", tmp_path / "report") == 1
    out = capsys.readouterr().out
    assert f"different: entry {number} ({kind}" in out
    assert f"{entries[number - 1].decision:016x}" in out or entries[number - 1].error
    report = json.loads((tmp_path / "report").read_text())
    assert report["replay"]["difference"]["entry"] == number
    assert report["replay"]["difference"]["input"] == kind


@pytest.mark.parametrize("hash_only", [False, True])
def test_another_input_makes_another_decision(
    journals: dict[bool, Path], tmp_path: Path, hash_only: bool
) -> None:
    """The digests see what the core does, not what the file says."""
    path = tmp_path / "j"
    path.write_bytes(journals[hash_only].read_bytes())
    entries = messages(path)
    end = next(
        end
        for entry in entries
        for end in entry.ended
        if end.reason == "LENGTH" and end.completion_tokens >= 5
    )
    number, entry = next(
        (number, entry) for number, entry in enumerate(entries, 1) if entry.add.handle == end.handle
    )
    entry.add.max_tokens = end.completion_tokens - 1
    rewrite(path, entries)
    different = [one.number for one in replay(path) if not one.is_same]
    assert different
    assert different[0] > number


def test_other_blocks_hashed_are_a_difference(journals: dict[bool, Path], tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(journals[True].read_bytes())
    entries = messages(path)
    number, entry = next((n, e) for n, e in enumerate(entries, 1) if len(e.block_hashes) > 64)
    entry.block_hashes = entry.block_hashes[:-32]
    rewrite(path, entries)
    first = next(one for one in replay(path) if not one.is_same)
    assert first.number == number
    assert first.decided.error == "other blocks were hashed"


def test_a_cut_file_is_replayed_up_to_the_cut(
    journals: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = journals[False].read_bytes()
    (tmp_path / "j").write_bytes(data[: len(data) * 2 // 3])
    assert command(tmp_path / "j") == 0
    out = capsys.readouterr().out
    assert "file: cut within an entry" in out
    assert "identical: all" in out
    whole, cut = len(messages(journals[False])), len(messages(tmp_path / "j"))
    assert whole / 3 < cut < whole
    assert f"identical: all {cut} decisions" in out


def test_the_summary_counts_the_run(tmp_path: Path) -> None:
    run = record(tmp_path / "j", seed=5)
    assert command(tmp_path / "j", "--json", tmp_path / "report") == 0
    report = json.loads((tmp_path / "report").read_text())
    summary = report["replay"]
    assert report["remark"] == ""
    assert summary["requests"] == len(run.added)
    assert summary["refused"] == run.seen["refused"]
    assert summary["ends"]["stop"] == run.seen["stop"]
    assert summary["output_tokens"] == sum(e.handles.size for _, e in run.events)
    assert summary["workers"] in (["left", "right"], ["right", "left"])
    assert summary["configurations"] == run.seen["configured"]
    assert summary["preemptions"] == run.core.loads().counters.preemptions
    assert summary["requeues"] == run.core.loads().counters.requeues > 0
    assert 0 < summary["queue_ms"]["p50"] <= summary["ttft_ms"]["p50"]
    assert summary["difference"] is None


@pytest.mark.parametrize("data", [b"", b"no journal"])
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(CommandError, match=r"/j: this is no journal of a scheduler"):
        command(tmp_path / "j")
    with pytest.raises(CommandError, match=r"/none: No such file"):
        command(tmp_path / "none")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: must be from 1 to"),
        (["--num-blocks", "x"], "--num-blocks: must be from 1 to"),
        (["--num-blocks", "16777217"], "--num-blocks: must be from 1 to 16777216"),
        (["--scheduling-policy", "best"], "invalid choice: 'best'"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command(tmp_path / "j", *flags)


def test_the_command_is_one_of_quire(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        quire_main(["replay", "--help"])
    assert "--max-num-batched-tokens" in capsys.readouterr().out


# What a recording teaches


def steady(path: Path, *, hash_only: bool = False, requests: int = 12) -> None:
    """A run on a worker that takes 1,000 + 100 * tokens microseconds for a step."""
    journal = open_journal(path, hash_only=hash_only)
    core = RecordingScheduler(CONFIG, SHA256, journal, hash_only=hash_only)
    now = START
    core.attach(worker_spec("w", 40), now)
    known: dict[int, int] = {}
    computed: dict[int, int] = {}
    waiting = list(range(requests))
    while waiting or not core.is_idle:
        if waiting and now >= START + 2_000 * waiting[0]:
            number = waiting.pop(0)
            prompt = np.arange(40, 52, dtype=np.uint32) + (0 if number % 2 else 20 * number)
            root = SHA256.root(b"model", b"t")
            hashes = b""
            for block in range(3):
                tokens = prompt[4 * block : 4 * block + 4].astype("<u4").tobytes()
                root = SHA256.block(root, tokens)
                hashes += root
            core.add(
                AddRequest(
                    request_id=str(number),
                    handle=number,
                    attempt=0,
                    prompt=prompt,
                    prompt_hashes=hashes,
                    max_tokens=8,
                    ignore_eos=True,
                    sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
                    tenant=f"t{number % 3}",
                ),
                now,
            )
        core.expire(now)
        step = core.plan("w", now)
        if step is None:
            now += 1_000
            continue
        for row in step.new_rows:
            known[row.slot], computed[row.slot] = row.token_ids.size, row.num_computed
        counts = []
        for slot, tokens in zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True):
            computed[slot] += tokens
            counts.append(computed[slot] == known[slot])
            known[slot] += counts[-1]
        took = 1_000 + 100 * int(step.num_tokens.sum())
        now += took
        result = StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=np.array(counts, np.uint8),
            token_ids=np.full(sum(counts), 77, np.uint32),
            execute_us=took,
        )
        core.apply("w", result, now)
    core.finish_recording()
    journal.close()


@pytest.mark.parametrize("hash_only", [False, True])
def test_arrivals_and_steps_come_out_of_a_journal(tmp_path: Path, hash_only: bool) -> None:
    steady(tmp_path / "j", hash_only=hash_only)
    requests = read_requests(tmp_path / "j")
    assert [one.request.request_id for one in requests] == [str(n) for n in range(12)]
    assert [one.output_tokens for one in requests] == [8] * 12
    assert requests[0].at_us == 0
    assert [worker.worker_id for worker in read_workers(tmp_path / "j")] == ["w"]
    arrivals = read_arrivals(tmp_path / "j")
    assert [one.prompt_tokens for one in arrivals] == [12] * 12
    assert [one.tenant for one in arrivals[:4]] == ["t0", "t1", "t2", "t0"]
    shared = [one.shared_tokens for one in arrivals]
    assert shared == [0, 12, 0, 12, 0, 12, 0, 12, 0, 12, 0, 12]
    assert len({one.session for one in arrivals}) == 6
    samples = list(step_samples(tmp_path / "j"))
    assert len(samples) > 10
    for shape, took in samples:
        assert took == 1_000 + 100 * shape.tokens
        assert 1 <= shape.rows <= shape.tokens
        assert shape.context >= shape.tokens


def test_aborts_and_what_was_cut_short_are_cancelled_arrivals(tmp_path: Path) -> None:
    run = record(tmp_path / "j", seed=3)
    requests = read_requests(tmp_path / "j")
    assert len(requests) == len(run.added)
    for one, added in zip(requests, run.added, strict=True):
        assert one.request.handle == added.handle
        assert one.output_tokens >= 1
        left = None if added.deadline is None else 30_000
        assert one.deadline_us == left
    gone = [one for one in requests if one.cancel_after_us is not None]
    unfinished = len(run.live)
    assert len(gone) == run.seen["abort"] + run.seen.get("replaced", 0) + unfinished


@pytest.mark.parametrize("hash_only", [False, True])
def test_what_if(tmp_path: Path, hash_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    steady(tmp_path / "j", hash_only=hash_only, requests=40)
    report = tmp_path / "report"
    assert command(tmp_path / "j", "--max-num-seqs", "1", "--json", report) == 0
    assert "What if" in capsys.readouterr().out
    told = json.loads(report.read_text())
    recorded, before, after = told["replay"], told["simulated"], told["what_if"]
    for simulated in (before, after):
        assert simulated["ends"] == {"length": 40}
        assert simulated["output_tokens"] == recorded["output_tokens"] == 320
    # As recorded, the simulation finds what was; alone in each step, all wait longer.
    assert before["cached_tokens"] == pytest.approx(recorded["cached_tokens"], rel=0.3)
    assert before["tpot_ms"]["p50"] == pytest.approx(recorded["tpot_ms"]["p50"], rel=0.35)
    assert after["most_running"] == 1
    assert after["steps"] > before["steps"]
    assert after["ttft_ms"]["p50"] > 2 * before["ttft_ms"]["p50"]


def test_what_if_with_a_smaller_cache(tmp_path: Path) -> None:
    steady(tmp_path / "j", requests=40)
    report = tmp_path / "report"
    assert command(tmp_path / "j", "--num-blocks", "6", "--json", report) == 0
    told = json.loads(report.read_text())
    assert told["what_if"]["preemptions"] + told["what_if"]["steps"] > told["simulated"]["steps"]
    assert told["what_if"]["ends"] == {"length": 40}


def test_a_cache_that_no_memory_is_left_for_names_the_flag(tmp_path: Path) -> None:
    steady(tmp_path / "j", requests=40)
    asked = f"{sys.executable} -m quire replay {tmp_path / 'j'} --num-blocks 16777216"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 2000000; exec {asked}"],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "--num-blocks 16777216: no memory for the workers' tables" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_if_needs_step_times(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    journal.close()
    with pytest.raises(CommandError, match="no request or no worker is in it"):
        command(tmp_path / "j", "--max-num-seqs", "1")
