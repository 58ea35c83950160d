"""The load generator: its arithmetic, and a run against a scripted server."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.command import COMMAND
from benchmarks.load import Load, Sample, figures, prompts, quantile
from quire.cli.main import guarded
from tests.fakes.text_service import FakeTextService, failure, serving
from tests.quire.cli.running_quire import Result, started

LOAD = Load(
    concurrency=2,
    requests=4,
    warmup=0,
    input_len=10,
    output_len=3,
    ignore_eos=True,
    temperature=0.0,
    seed=1,
)


async def bench(*arguments: str) -> Result:
    async with started(sys.executable, "-m", "benchmarks", "serve", *arguments) as process:
        out, err = await process.communicate()
        assert process.returncode is not None
        return Result(process.returncode, out.decode(), err.decode())


def test_the_figures_of_known_times() -> None:
    samples = [
        # Three tokens in two messages.
        Sample(sent=0.0, arrivals=(0.1, 0.5), ended=0.6, tokens=3),
        Sample(sent=1.0, arrivals=(1.3,), ended=1.4, tokens=1),
        Sample(sent=1.5, arrivals=(), ended=2.0, tokens=0, error="queue is full"),
    ]
    result = figures(LOAD, samples)
    assert (result.completed, result.failed, result.errors) == (2, 1, ("queue is full",))
    assert (result.input_tokens, result.output_tokens) == (20, 4)
    assert result.duration_s == 2.0
    assert result.output_tokens_per_s == 2.0
    assert result.total_tokens_per_s == 12.0
    assert result.requests_per_s == 1.0
    assert result.ttft_ms.mean == pytest.approx(200)
    assert result.ttft_ms.p50 == pytest.approx(200)
    assert result.ttft_ms.p90 == pytest.approx(280)
    assert result.tpot_ms.mean == pytest.approx(200)
    assert result.itl_ms.mean == pytest.approx(400)
    assert result.latency_ms.mean == pytest.approx(500)


def test_figures_without_one_good_request() -> None:
    result = figures(LOAD, [Sample(sent=0.0, arrivals=(), ended=1.0, tokens=0, error="no")])
    assert (result.completed, result.failed, result.output_tokens_per_s) == (0, 1, 0.0)
    assert result.ttft_ms.p99 is None


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.sampled_from([0, 1, 50, 90, 99, 100]),
)
def test_quantiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert quantile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_prompts_are_the_same_again_and_different_from_one_another() -> None:
    def first(load: Load, count: int) -> list[list[int]]:
        source = prompts(load, 50, avoid=(2, 3))
        return [next(source) for _ in range(count)]

    drawn = first(LOAD, 20)
    assert drawn == first(LOAD, 20)
    assert len({tuple(prompt[:4]) for prompt in drawn}) == 20
    assert all(len(prompt) == 10 for prompt in drawn)
    used = {token_id for prompt in drawn for token_id in prompt}
    assert used <= set(range(50)) - {2, 3}


async def test_a_run(tmp_path: Path) -> None:
    service = FakeTextService(length=100)
    report = tmp_path / "report.json"
    async with serving(service) as target:
        result = await bench(
            *("--target", target, "--concurrency", "1,3", "--requests-per-stream", "2"),
            *("--input-len", "5", "--output-len", "12", "--json", str(report)),
        )
    assert result.code == 0, result.err
    assert "fake, 5 tokens in, 12 out" in result.out
    written: dict[str, Any] = json.loads(report.read_text())
    assert written["server"]["model"] == "fake"
    assert written["settings"]["input_len"] == 5
    levels = written["levels"]
    assert [level["load"]["concurrency"] for level in levels] == [1, 3]
    assert [level["completed"] for level in levels] == [2, 6]
    assert [level["output_tokens"] for level in levels] == [24, 72]
    assert [level["input_tokens"] for level in levels] == [10, 30]
    for level in levels:
        assert level["failed"] == 0
        assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"]
        assert level["output_tokens_per_s"] > 0
    # One request per stream to warm up, then what was asked for; no prompt twice.
    assert len(service.requests) == (1 + 2) + (3 + 6)
    sent = [request.token_ids.packed for request in service.requests]
    assert len(set(sent)) == len(sent)
    assert {len(data) for data in sent} == {20}
    assert all(request.stopping.ignore_eos for request in service.requests)


async def test_requests_of_a_tenant_and_a_class() -> None:
    service = FakeTextService(length=2)
    async with serving(service) as target:
        result = await bench(
            *("--target", target, "--concurrency", "1", "--num-prompts", "2"),
            *("--input-len", "3", "--output-len", "2"),
            *("--tenant", "acme", "--priority-class", "batch"),
        )
    assert result.code == 0, result.err
    asked = {(r.scheduling.tenant, r.scheduling.priority_class) for r in service.requests}
    assert asked == {("acme", "batch")}


async def test_failed_requests_are_counted_and_said(tmp_path: Path) -> None:
    service = FakeTextService(
        cuts=[None, 0, None, 1], failure=failure("UNAVAILABLE", "the worker is gone")
    )
    async with serving(service) as target:
        result = await bench(
            *("--target", target, "--concurrency", "1", "--num-prompts", "3"),
            *("--input-len", "5", "--output-len", "4", "--no-ignore-eos"),
        )
    assert result.code == 1
    assert result.out.count("failed: the worker is gone") == 1
    assert len(service.requests) == 4


async def test_more_than_the_model_can_hold() -> None:
    async with serving(FakeTextService()) as target:
        result = await bench("--target", target, "--input-len", "500", "--output-len", "13")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: --input-len 500 and --output-len 13 are more than the 512 tokens that fake can "
        "hold\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,0"], "argument --concurrency: must be >= 1, got 0"),
        (["--concurrency", ""], "argument --concurrency: must be a whole number, got ''"),
        (["--num-prompts", "3", "--requests-per-stream", "3"], "not allowed with argument"),
        (["--local", "--target", "x:1"], "not allowed with argument"),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: COMMAND.run("quire bench", ["serve", *arguments])) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
