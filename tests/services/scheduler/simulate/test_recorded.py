"""A recorded run as a load, and as the source of a step model."""

import json
from pathlib import Path

import pytest

from quire.cli.command import CommandError
from services.scheduler import journal_codec
from services.scheduler.core.config import Config
from services.scheduler.hashing import SHA256
from services.scheduler.journal import Journal
from services.scheduler.recording import RecordingScheduler
from services.scheduler.simulate.command import COMMAND
from services.scheduler.simulate.load import OpenLoop, Prompts
from services.scheduler.simulate.loop import Simulation
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.step_model import StepModel, load_model
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals

MODEL = StepModel(
    name="known",
    base_us=9_000.0,
    per_token_us=80.0,
    per_row_us=150.0,
    per_context_us=1.5,
    blocks=256,
    block_size=16,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=512,
)

LOAD = Load(
    requests=40,
    prompt=Lengths(mean=80, sigma=0.6, most=300),
    output=Lengths(mean=20, sigma=0.6, most=80),
    rate=25.0,
    shared=0.5,
    shared_tokens=48,
    tenants=("a", "b"),
    cancelled=0.1,
    cancel_after_us=200_000,
    seed=2,
)


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Report]:
    """The journal of a simulated run, and the report of that run."""
    path = tmp_path / "run.journal"
    header = journal_codec.header(
        config=Config(), prefix_hash="sha256", hash_key=b"", hash_only=False, clocks=(0, 0)
    )
    journal = Journal(path, header)
    core = RecordingScheduler(Config(), SHA256, journal, hash_only=False)
    source = OpenLoop(arrivals(LOAD))
    simulation = Simulation(core, source, MODEL, Prompts(0, MODEL.max_model_len))
    simulation.run()
    core.finish_recording()
    journal.close()
    return path, simulation.report("fair")


def simulate(*arguments: str) -> int:
    return COMMAND.run("quire simulate", list(arguments))


def test_fit_finds_the_model_that_the_steps_came_from(
    recorded: tuple[Path, Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = recorded
    out = tmp_path / "found.yaml"
    assert simulate("fit", str(path), "-o", str(out)) == 0
    found = load_model(str(out))
    assert found.name == "found"
    assert found.base_us == pytest.approx(MODEL.base_us, rel=0.01)
    assert found.per_token_us == pytest.approx(MODEL.per_token_us, rel=0.01)
    assert found.per_row_us == pytest.approx(MODEL.per_row_us, rel=0.05)
    assert found.per_context_us == pytest.approx(MODEL.per_context_us, rel=0.01)
    assert (found.blocks, found.max_num_seqs) == (MODEL.blocks, MODEL.max_num_seqs)
    assert f"found.yaml: {found.base_us:g} µs" in " ".join(capsys.readouterr().out.split())
    assert report.steps > 100


def test_a_recorded_run_is_a_load(recorded: tuple[Path, Report], tmp_path: Path) -> None:
    path, was = recorded
    out, model = tmp_path / "out.json", tmp_path / "known.yaml"
    simulate("fit", str(path), "-o", str(model))
    assert (
        simulate(*("run", "--recording", str(path), "--model", str(model)), "--json", str(out)) == 0
    )
    (report,) = json.loads(out.read_text())
    assert report["arrived"] == was.arrived == 40
    assert report["ends"] == was.ends
    assert report["prompt_tokens"] == was.prompt_tokens
    assert report["duration_s"] == pytest.approx(was.duration_s, rel=0.05)
    assert report["output_tokens"] == pytest.approx(was.output_tokens, rel=0.05)


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"something else")
    for arguments in (("fit", str(path), "-o", f"{tmp_path}/x"), ("run", "--recording", str(path))):
        with pytest.raises(CommandError, match=str(path)):
            simulate(*arguments)
