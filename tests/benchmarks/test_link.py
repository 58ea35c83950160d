"""The link benchmark runs against a real scheduler process and gives figures."""

import json
from pathlib import Path

from benchmarks.command import COMMAND


def test_it_reports_percentiles(tmp_path: Path) -> None:
    out = tmp_path / "link.json"
    assert (
        COMMAND.run("quire bench", ["link", "--rows", "3", "--steps", "40", "--json", str(out)])
        == 0
    )
    (cost,) = json.loads(out.read_text())["link"]
    assert cost["rows"] == 3
    assert 0 < cost["us_p50"] <= cost["us_p90"] <= cost["us_p99"]


def test_the_scheduler_benchmark_reports_the_cost_per_row(tmp_path: Path) -> None:
    out = tmp_path / "scheduler.json"
    assert (
        COMMAND.run(
            "quire bench",
            [
                *("scheduler", "--rows", "8", "--steps", "40", "--long-prompts", "1"),
                *("--json", str(out)),
            ],
        )
        == 0
    )
    figures = json.loads(out.read_text())
    for cost in figures["decode"]:
        assert cost["us_per_row"] == cost["us_per_step"] / 8 > 0
    assert [cost["hash"] for cost in figures["hash"]] == ["sha256", "blake2b"]
    assert all(cost["ns_per_block"] > 0 for cost in figures["hash"])
    cases = [cost["case"] for cost in figures["long_prompt"]]
    assert cases == ["one new prompt", "8 new prompts", "one cached prompt"]
    for cost in figures["long_prompt"]:
        assert cost["more_ms"] == cost["more_ms_most"]  # of one trial
        assert cost["ms_with"] > 0 < cost["ms_without"]
