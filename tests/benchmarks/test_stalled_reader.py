"""The benchmark of a stalled reader runs a real set and compares both cases."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.assets.checkpoints import make_successor_checkpoint
from tests.quire.cli.running_quire import started


@pytest.mark.system
async def test_it_compares_the_others_without_and_with_a_stalled_one(tmp_path: Path) -> None:
    model = make_successor_checkpoint(tmp_path / "model")
    out = tmp_path / "stalled.json"
    sizes = ("--streams", "4", "--rounds", "1", "--input-len", "5", "--output-len", "30")
    command = (sys.executable, "-m", "benchmarks", "stalled-reader", *sizes)
    async with started(*command, "--model", str(model), "--json", str(out)) as process:
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    report = json.loads(await asyncio.to_thread(out.read_text))
    read, stalled = report["cases"]
    assert (read["case"], stalled["case"]) == ("all read", "one stalled")
    for case in (read, stalled):
        # Three streams of 30 tokens are compared; a message may carry several tokens.
        assert 3 <= case["messages"] <= 3 * 29
        assert 0 < case["p50_ms"] <= case["p99_ms"]
        assert set(case["rss_mib"]) == {"scheduler", "worker-0", "tokenizer-0"}
    assert report["ratios"]["p50"] == pytest.approx(stalled["p50_ms"] / read["p50_ms"])
