"""The commands end to end: what they print and write, and what they say of wrong flags."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.cli.command import CommandError, UsageError
from services.scheduler.simulate import fleet, run
from services.scheduler.simulate.command import COMMAND
from services.scheduler.simulate.step_model import load_model, write_model

PNG = b"\x89PNG\r\n\x1a\n"


def simulate(*arguments: str) -> int:
    return COMMAND.run("quire simulate", list(arguments))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file of a small, fast worker."""
    path = tmp_path / "small.yaml"
    small = replace(
        load_model("llama-70b-8xh100"), name="small", blocks=96, max_num_seqs=8, max_model_len=1024
    )
    write_model(small, path)
    return str(path)


def test_the_table_of_commands_loads_each() -> None:
    for entry in COMMAND.entries:
        command = entry.load()
        assert (command.name, command.help) == (entry.name, entry.help)


def test_mixes_print_a_table_and_write_json_and_a_plot(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = simulate(
        *("mixes", "--model", model, "--mixes", "32/16,200/16", "--concurrency", "1,6"),
        *("--rounds", "2", "--processes", "1", "--json", f"{tmp_path}/out.json"),
        *("--plot", f"{tmp_path}/out.png"),
    )
    assert code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "/16" in line]
    assert len(lines) == 8
    assert [line.split()[2] for line in lines] == ["v0", "fair"] * 4
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(results) == 8
    assert all(one["report"]["ends"].keys() <= {"length", "stop"} for one in results)
    ours = next(
        one["report"]
        for one in results
        if one["cell"]["policy"] == "fair"
        and one["cell"]["concurrency"] == 6
        and one["cell"]["prompt_tokens"] == 200
    )
    v0 = next(
        one["report"]
        for one in results
        if one["cell"]["policy"] == "v0"
        and one["cell"]["concurrency"] == 6
        and one["cell"]["prompt_tokens"] == 200
    )
    assert ours["output_tokens"] == v0["output_tokens"], "the same load for both"
    assert ours["output_tokens_per_s"] > v0["output_tokens_per_s"]
    assert ours["ttft_ms"]["p50"] < v0["ttft_ms"]["p50"]
    assert ours["kv_filled"] / ours["kv_held"] > v0["kv_filled"] / v0["kv_held"]


def test_equal_outputs_waste_nothing_in_a_static_batch(tmp_path: Path, model: str) -> None:
    simulate(
        *("mixes", "--model", model, "--mixes", "32/16", "--concurrency", "4", "--rounds", "2"),
        *("--output-sigma", "0", "--processes", "1", "--json", f"{tmp_path}/out.json"),
    )
    v0, ours = json.loads((tmp_path / "out.json").read_text())["results"]
    assert v0["report"]["duration_s"] == pytest.approx(ours["report"]["duration_s"], rel=0.01)


def test_cells_in_processes_give_what_they_give_here(tmp_path: Path, model: str) -> None:
    flags = ("--model", model, "--mixes", "32/16", "--concurrency", "1,4", "--rounds", "1")
    for processes in ("1", "2"):
        out = f"{tmp_path}/{processes}.json"
        assert simulate("mixes", *flags, "--processes", processes, "--json", out) == 0
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()


def test_one_load_under_several_policies(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = simulate(
        *("run", "--model", model, "--policy", "v0,fcfs,fair", "--requests", "40"),
        *("--output-tokens", "20", "--tenants", "a,b", "--json", f"{tmp_path}/out.json"),
        *("--prefill-chunk-size", "64", "--tpot-target", "40", "--concurrency", "4"),
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "v0: classes and tenants" in out
    reports = json.loads((tmp_path / "out.json").read_text())
    assert [report["policy"] for report in reports] == ["v0", "fcfs", "fair"]
    assert [report["completed"] for report in reports] == [40, 40, 40]


def test_a_flag_of_the_core_changes_what_it_does(tmp_path: Path, model: str) -> None:
    steps = {}
    for chunk in ("64", "512"):
        simulate(
            *("run", "--model", model, "--requests", "10", "--prompt-tokens", "256"),
            *("--output-tokens", "4", "--prefill-chunk-size", chunk),
            *("--concurrency", "1", "--json", f"{tmp_path}/out.json"),
        )
        steps[chunk] = json.loads((tmp_path / "out.json").read_text())[0]["steps"]
    assert steps["64"] - steps["512"] == 10 * 3


def test_a_trace_is_run_at_its_times(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,prompt_tokens,output_tokens,class\n0,20,5,batch\n3,30,5,interactive\n")
    assert simulate("run", "--model", model, "--trace", str(path)) == 0
    out = capsys.readouterr().out
    assert "2 / 2" in out
    assert "3.1 s" in out
    assert "interactive" in out


def test_a_fleet_reports_what_it_cost(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = simulate(
        *("fleet", "--model", model, "--schedulers", "3", "--requests", "61", "--processes", "1"),
        *("--prompt-tokens", "16", "--output-tokens", "8", "--json", f"{tmp_path}/out.json"),
    )
    assert code == 0
    assert "61 / 61" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["most_live"] == 61, "all of them at once"
    assert report["schedulers"] == 3
    assert report["output_tokens_per_s"] == pytest.approx(61 * 8 / report["duration_s"])
    assert len(report["peak_bytes"]) == 1


def test_a_fleet_bounds_its_queues_only_where_it_is_asked_to(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # More than a scheduler lets wait by default.
    size = ("--requests", "9000", "--prompt-tokens", "1", "--output-tokens", "1")
    fleet = (
        "fleet",
        "--model",
        model,
        "--schedulers",
        "1",
        *size,
        "--json",
        f"{tmp_path}/out.json",
    )
    assert simulate(*fleet) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["most_live"], report["ends"]) == (9000, {"length": 9000})
    assert simulate(*fleet, "--max-queued-requests", "1000") == 0
    assert "refused: QUEUE_REQUESTS 8000" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["ends"] == {"length": 1000, "refused: QUEUE_REQUESTS": 8000}


def test_the_help_of_a_fleet_tells_that_its_queues_have_no_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, bound in (("fleet", "no bound"), ("run", "8192")):
        with pytest.raises(SystemExit, match="0"):
            simulate(command, "--help")
        told = " ".join(capsys.readouterr().out.split())
        assert f"waiting for their first admission (default: {bound})" in told


def test_refusals_are_shown_beside_the_figures(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = ("--max-queued-requests", "1", "--json", f"{tmp_path}/out.json")
    cell = ("--mixes", "32/16", "--concurrency", "16", "--processes", "1")
    assert simulate("mixes", "--model", model, *cell, *bound) == 0
    assert "32/16, 16 clients, fair: refused " in capsys.readouterr().out
    simulate("soak", "--hours", "0.02", *bound)
    assert " QUEUE_REQUESTS" in capsys.readouterr().out
    looks = json.loads((tmp_path / "out.json").read_text())["looks"]
    assert looks[-1]["ends"]["refused: QUEUE_REQUESTS"] > 0


def test_names_are_printed_as_they_are(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,prompt_tokens,output_tokens,tenant\n0,1,1,[/b]\n0,1,1,[red]x\n")
    assert simulate("run", "--model", model, "--trace", str(path)) == 0
    out = capsys.readouterr().out
    assert "[/b]" in out
    assert "[red]x" in out


def test_a_model_without_memory_for_its_tables_is_named(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(run, "run_policy", fails)
    monkeypatch.setattr(fleet, "run_part", fails)
    with pytest.raises(CommandError, match=f"--model {model}: no memory for the workers' tables"):
        simulate("run", "--model", model)
    with pytest.raises(CommandError, match=f"--model {model}: no memory for the workers' tables"):
        simulate("fleet", "--model", model, "--processes", "1")


def test_a_short_soak_prints_memory_over_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = simulate("soak", "--hours", "0.05", "--json", f"{tmp_path}/out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert code == (0 if report["flat"] else 1)
    assert capsys.readouterr().out.count("resident ") == 25
    looks = report["looks"]
    assert looks[-1]["hours"] == pytest.approx(0.05)
    assert looks[-1]["completed"] > 500
    assert looks[-1]["preemptions"] > 0
    assert [look["steps"] for look in looks] == sorted(look["steps"] for look in looks)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("mixes", "--mixes", "128x128"), "argument --mixes: must be like 128/128,8192/128"),
        (("mixes", "--concurrency", "0"), "argument --concurrency: must be from 1 to"),
        (("run", "--policy", "v1"), "argument --policy: must be of v0, fair, priority, fcfs"),
        (("run", "--tenants", "a,\udcff"), "argument --tenants: must be names"),
        (("run", "--rate", "0"), "argument --rate: must be above 0"),
        (("run", "--shared", "1.5"), "argument --shared: must be from 0 to 1, got 1.5"),
        (("run", "--requests", "many"), "argument --requests: must be a whole number, got 'many'"),
        (("run", "--rate", "1", "--concurrency", "2"), "not allowed with argument --rate"),
        (("run", "--prefill-chunk-size", "0"), "--prefill-chunk-size must be from 1 to"),
        (("run", "--priority-class", "x"), "--priority-class 'x': needs share=1..1000"),
        (("run", "--rate", "1", "--trace", "f"), "--rate is for synthetic loads"),
        (("soak", "--hours", "nan"), "argument --hours: must be a number, got 'nan'"),
        (("soak", "--model", "x"), "there is no flag --model"),
        (("fit", "recording"), "the following arguments are required: -o/--output"),
        (("flee",), "there is no command 'flee'; did you mean quire simulate fleet?"),
    ],
)
def test_a_wrong_flag_is_named_with_its_limit(arguments: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(UsageError) as error:
        simulate(*arguments)
    assert wrong in error.value.message


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("mixes", "--mixes", "131072/1"), "--mixes 131072/1: longer than the 131072 tokens"),
        (("run", "--model", "nothing"), "--model nothing: No such file"),
        (("run", "--trace", "nowhere"), "nowhere: No such file"),
        (("run", "--recording", "nowhere"), "--recording nowhere: No such file"),
        (("fit", "nowhere", "-o", "x.yaml"), "nowhere: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(arguments: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(CommandError) as error:
        simulate(*arguments)
    assert wrong in error.value.message


def test_what_cannot_be_written_is_named(tmp_path: Path, model: str) -> None:
    flags = ("--model", model, "--mixes", "16/2", "--concurrency", "1", "--processes", "1")
    for flag in ("--json", "--plot"):
        with pytest.raises(CommandError, match=f"{flag} .*: Is a directory"):
            simulate("mixes", *flags, flag, str(tmp_path))
