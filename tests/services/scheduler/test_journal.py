"""The file of a recording: what is in it, what is not, and when it cannot be written."""

import dataclasses
import inspect
import logging
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.scheduler import journal_codec as codec
from services.scheduler.core.config import Config, Eviction, Policy, PriorityClass, TenantPolicy
from services.scheduler.core.plan import AddRequest, Sampling, StepResult, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from services.scheduler.journal_digest import NOTHING, Answer
from services.scheduler.journal_file import JournalFile
from services.scheduler.journal_values import from_json, to_json
from services.scheduler.journal_veil import Veil
from services.scheduler.recording import RecordingScheduler
from tests.fakes.recorded_run import CONFIG, EOS, START, VOCAB, RecordedRun, open_journal
from tests.fakes.recorded_run import worker_spec as spec


def entries(path: Path) -> tuple[list[codec.Entry], JournalFile]:
    with JournalFile(path) as file:
        return list(file.entries()), file


def expire(now: int) -> codec.Entry:
    entry = codec.entry(now)
    entry.expire.SetInParent()
    return entry


def request(**given: object) -> AddRequest:
    values: dict[str, object] = {
        "request_id": "r",
        "handle": 1 << 40 | 3,
        "attempt": 2,
        "prompt": np.array([300, 5, 70_000], np.uint32),
        "prompt_hashes": bytes(range(64)),
        "resumed": np.array([9, 331], np.uint32),
        "max_tokens": 7,
        "ignore_eos": True,
        "stop_token_ids": (331, 12),
        "sampling": Sampling(temperature=0.7, top_p=0.9, top_k=4, seed=2**63 - 1),
        "traceparent": "00-x",
        "salt": b"smine",
        "read_prefix_cache": False,
        "priority_class": "batch",
        "tenant": "a",
        "deadline": 5,
        "ttft_target_us": 6,
        "tpot_target_us": 8,
        "shed_late": True,
    }
    return AddRequest(**{**values, **given})  # type: ignore[arg-type]


def same(one: object, other: object) -> bool:
    """Equality of two values of one dataclass, whatever fields it has."""
    assert dataclasses.is_dataclass(one)
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_tokens": None, "deadline": None, "ttft_target_us": None, "tpot_target_us": None},
        {"stop_token_ids": (), "prompt_hashes": b"", "resumed": np.empty(0, np.uint32)},
        {"ignore_eos": False, "read_prefix_cache": True, "shed_late": False, "salt": b"t"},
    ],
)
def test_every_field_of_a_request_comes_back(given: dict[str, object]) -> None:
    entry = codec.entry(1)
    codec.fill_add(entry, request(**given), None)
    assert same(codec.parse_add(entry.add), request(**given))


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 0, 1], []])
def test_every_field_of_a_result_comes_back(counts: list[int]) -> None:
    result = StepResult(
        epoch=3,
        step_id=2**40,
        counts=np.array(counts, np.uint8),
        token_ids=np.arange(sum(counts), dtype=np.uint32) + 400,
        execute_us=123_456,
    )
    entry = codec.entry(1)
    codec.fill_apply(entry, "w", result, None)
    assert same(codec.parse_apply(entry.apply), result)


def test_configurations_and_workers_come_back() -> None:
    config = Config(
        max_num_seqs=3,
        policy=Policy.PRIORITY,
        eviction=Eviction.TIME_WHEEL,
        classes=(PriorityClass(name="é", share=1, floor=1, ttft_target_us=5),),
        default_class="é",
        tenants=(("a", TenantPolicy(weight=3, max_live_requests=2)),),
        tpot_target_us=9,
    )
    assert from_json(Config, to_json(config)) == config
    assert from_json(WorkerSpec, to_json(spec("w"))) == spec("w")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_num_seqs": "3"}', r"Config.max_num_seqs: '3' is not a value for it"),
        ('{"later": 1}', "Config: this version knows no field 'later'"),
        ('{"classes": [{"name": 1, "share": 1, "floor": 1}]}', r"Config.classes\[0\].name: 1 is"),
        ('{"policy": "other"}', "other"),
        ("[]", "Config"),
        ("{", "Expecting"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_its_field(text: str, message: str) -> None:
    with pytest.raises(codec.JournalError, match=message):
        codec.read_config(text)


def test_the_recording_core_has_what_the_core_has() -> None:
    def public(kind: type) -> dict[str, inspect.Signature | None]:
        return {
            name: inspect.signature(value) if callable(value) else None
            for name, value in vars(kind).items()
            if not name.startswith("_")
        }

    recording = public(RecordingScheduler)
    assert recording.pop("finish_recording") is not None
    assert recording == public(Scheduler)


def test_entries_come_back_in_order_and_the_end_is_told(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for now in range(START, START + 1000):
        journal.put(expire(now), NOTHING)
    journal.close()
    read, file = entries(tmp_path / "j")
    assert [entry.now for entry in read] == list(range(START, START + 1000))
    assert file.ended_well
    assert file.remark == ""
    assert codec.config_of(file.header) == CONFIG
    assert file.header.started_unix_us == 1_700_000_000_000_000


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("dear")
    for _ in range(2):
        open_journal(tmp_path / "j").close()
    assert (tmp_path / "j").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "j.1", "j.2"]
    assert (tmp_path / "j.1").stat().st_mode & 0o777 == 0o600


def test_every_cut_is_noticed_and_what_is_whole_is_read(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for now in range(START, START + 5):
        journal.put(expire(now), Answer(b"something"))
    journal.close()
    data = (tmp_path / "j").read_bytes()
    whole, _ = entries(tmp_path / "j")
    lengths = set()
    begin = data.index(whole[0].SerializeToString()) - 1
    for size in range(begin, len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        read, file = entries(tmp_path / "cut")
        assert read == whole[: len(read)]
        assert not file.ended_well
        assert "cut" in file.remark
        lengths.add(len(read))
    assert lengths == set(range(6))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"hello, world\n" * 9,
        b"\xff" * 99,
        b"\x80",
        b"\xff" * 8 + b"\x7fabc",  # a length beyond any memory
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(codec.JournalError, match="this is no journal of a scheduler"):
        JournalFile(tmp_path / "j")


def test_a_journal_of_a_later_version_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    journal.close()
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data.replace(b"quire-journal\x10\x02", b"quire-journal\x10\x07"))
    with pytest.raises(codec.JournalError, match="version 7; this version reads 2"):
        JournalFile(tmp_path / "j")


def test_a_damaged_entry_is_told_from_a_cut(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for now in range(START, START + 5):
        journal.put(expire(now), Answer(b"something"))
    journal.close()
    data = bytearray((tmp_path / "j").read_bytes())
    whole, _ = entries(tmp_path / "j")
    place = bytes(data).index(whole[2].SerializeToString())
    data[place] = 0x07  # no wire type has this number
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(codec.JournalError, match="an entry is damaged"):
        entries(tmp_path / "j")


def test_no_changed_bit_goes_unnoticed(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "j", seed=2)
    run.run(20)
    run.close()
    data = (tmp_path / "j").read_bytes()
    whole, _ = entries(tmp_path / "j")
    assert len(whole) > 10
    for bit in range(0, 8 * len(data), 11):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "changed").write_bytes(changed)
        try:
            read, file = entries(tmp_path / "changed")
        except codec.JournalError:
            continue
        assert not file.ended_well
        assert read == whole[: len(read)]


@pytest.fixture
def full_disk() -> Iterator[int]:
    """Files may hold 20,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_recording_and_not_the_serving(
    tmp_path: Path, full_disk: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = RecordedRun(tmp_path / "j", seed=1)
    with caplog.at_level(logging.ERROR):
        run.run(1500)
        run.journal._thread.join(0.3)
        run.run(1500)
        run.close()
    assert run.seen["stop"] > 20
    assert [record.message for record in caplog.records if "serving goes on" in record.message]
    read, file = entries(tmp_path / "j")
    assert 100 < len(read) < 1500
    assert file.remark == "recording failed: File too large"
    assert (tmp_path / "j").stat().st_size <= full_disk


def test_a_slow_disk_ends_the_recording_and_says_so_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_journal(tmp_path / "j", max_pending_bytes=4096)
    with caplog.at_level(logging.ERROR):
        for now in range(START, START + 10_000):
            journal.put(expire(now), Answer(bytes(100)))
        assert not journal.is_open
        journal.close()
    assert "the disk is too slow: 4096 bytes wait" in caplog.text
    read, file = entries(tmp_path / "j")
    assert [entry.now for entry in read] == list(range(START, START + len(read)))
    assert 0 < len(read) < 10_000
    assert "recording failed: the disk is too slow" in file.remark


def test_a_fault_in_recording_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "j", seed=2)
    run.run(200)

    def broken(*_: object) -> None:
        raise ValueError("no entry of it")

    monkeypatch.setattr(codec, "fill_apply", broken)
    with caplog.at_level(logging.ERROR):
        run.run(1000)
        run.close()
    assert "an entry could not be made" in caplog.text
    assert run.seen["stop"] > 10
    _, file = entries(tmp_path / "j")
    assert "recording failed: an entry could not be made" in file.remark


# Without token ids


def test_ids_are_told_apart_only_by_what_they_end() -> None:
    veil = Veil()
    veil.learn(spec("w"))
    ids = np.array([3, 5, 8, 900, 331, 976, 3], np.uint32)
    assert veil.special(ids) == ([1, 3], [5, 900])
    (stop,) = veil.stop_ids((331,))
    assert stop not in (331, veil.neutral, *EOS)
    assert veil.stop_ids((331, 5)) == (stop, 5)
    assert veil.special(ids) == ([1, 3, 4], [5, 900, stop])
    assert veil.neutral not in EOS


def test_ids_beyond_the_vocabulary_are_kept() -> None:
    veil = Veil()
    veil.learn(spec("w"))
    ids = np.array([3, VOCAB, 5, 2**32 - 1], np.uint32)
    assert veil.special(ids) == ([1, 2, 3], [VOCAB, 5, 2**32 - 1])
    assert veil.outside(ids) == ([1, 3], [VOCAB, 2**32 - 1])
    assert veil.stop_ids((VOCAB + 1,)) == (VOCAB + 1,)


def test_every_id_of_a_vocabulary_may_be_a_stop_id() -> None:
    veil = Veil()
    veil.learn(dataclasses.replace(spec("w"), vocab_size=6, eos_token_ids=(5,)))
    stops = veil.stop_ids(range(6))
    assert sorted(stops) == [0, 1, 2, 3, 4, 5]
    assert stops[5] == 5


def test_no_token_id_is_in_the_file(tmp_path: Path) -> None:
    """Ids are looked for as packed, as varint and as text."""
    core_journal = open_journal(tmp_path / "j", hash_only=True)
    core = RecordingScheduler(CONFIG, SHA256, core_journal, hash_only=True)
    worker = dataclasses.replace(spec("w"), vocab_size=200_000, eos_token_ids=(5,))
    prompt = np.arange(100_123, 100_143, dtype=np.uint32)
    asked = request(
        handle=7,
        prompt=prompt,
        prompt_hashes=b"",
        resumed=np.array([150_001, 150_002], np.uint32),
        stop_token_ids=(160_001, 160_002),
        max_tokens=10,
        salt=b"ssecret-salt",
        deadline=None,
        shed_late=False,
        priority_class="",
    )
    core.add(asked, START)
    core.attach(worker, START)
    said = [170_001, 170_002, 160_002]
    for number in range(200):
        step = core.plan("w", START + number)
        if step is None:
            break
        known = number >= 3  # twenty-two tokens in chunks of six
        result = StepResult(
            epoch=1,
            step_id=step.step_id,
            counts=np.array([known], np.uint8),
            token_ids=np.array([said.pop(0)] if known else [], np.uint32),
        )
        events = core.apply("w", result, START + number)
        if events.ended:
            assert events.ended[0].stop_token_id == 160_002
            break
    assert not said
    core.finish_recording()
    core_journal.close()
    data = (tmp_path / "j").read_bytes()
    secret = [*prompt.tolist(), 150_001, 150_002, 160_001, 160_002, 170_001, 170_002]
    for token in secret:
        assert token.to_bytes(4, "little") not in data
        varint = bytes([token & 127 | 128, token >> 7 & 127 | 128, token >> 14])
        assert varint not in data
        assert str(token).encode() not in data
    assert b"secret-salt" not in data


def test_without_any_worker_no_id_is_in_the_file_either(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", hash_only=True)
    core = RecordingScheduler(CONFIG, SHA256, journal, hash_only=True)
    core.add(request(deadline=None, ttft_target_us=None), START)
    core.finish_recording()
    journal.close()
    ((entry,), file) = entries(tmp_path / "j")
    assert file.ended_well
    read = codec.parse_add(entry.add)
    assert read.prompt.tolist() == [0, 0, 0]
    assert read.resumed.tolist() == [0, 0]
    assert read.stop_token_ids == (0, 0)


def test_what_cannot_be_recorded_without_ids_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.recording._MAX_HELD_BYTES", 3000)
    journal = open_journal(tmp_path / "j", hash_only=True)
    core = RecordingScheduler(CONFIG, SHA256, journal, hash_only=True)
    for handle in range(10):
        core.add(
            request(
                request_id=f"r{handle}",
                handle=handle,
                prompt=np.zeros(200, np.uint32),
                deadline=None,
                ttft_target_us=None,
            ),
            START,
        )
    assert not journal.is_open
    assert "too much came before the first worker" in caplog.text
    core.finish_recording()
    journal.close()
    assert "too much came" in entries(tmp_path / "j")[1].remark
