"""The whole system gives the token ids of an independent implementation.

All prompts at once through tokenizer, scheduler and worker processes, with chunked prefill: on one
worker each twice, with prefix hits and a KV cache so small that requests are preempted; and on two.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.params import SamplingParams
from tests.system.conftest import running_system

REFERENCE = Path(__file__).parents[1] / "reference" / "smollm2_greedy.json"

NEAR_TIE = 1e-3
"""Where the two highest logits are this close, the order of additions may decide."""

pytestmark = [pytest.mark.system, pytest.mark.demo_model, pytest.mark.timeout(420)]


def first_difference(output: Sequence[int], wanted: Sequence[int]) -> int | None:
    for position, (got, expected) in enumerate(zip(output, wanted, strict=False)):
        if got != expected:
            return position
    return None if len(output) == len(wanted) else min(len(output), len(wanted))


@pytest.mark.parametrize("workers", [1, 2])
async def test_token_ids_equal_the_reference_under_pressure(workers: int) -> None:
    reference = json.loads(REFERENCE.read_text())
    cases = reference["cases"]
    lengths = sorted(len(case["prompt"]) for case in cases)
    assert len(cases) >= 64
    assert sum(1000 <= length <= 2000 for length in lengths) >= 4
    # On two workers the prompts come once: it is where they run that matters there.
    asked = [case for case in cases for _ in range(2 if workers == 1 else 1)]
    params = SamplingParams(temperature=0.0, max_tokens=reference["max_new_tokens"])
    # 136 blocks of 16 tokens, 720 KiB each: hardly more than the longest prompt needs.
    worker = ("--kv-cache-memory=97920KiB", "--max-num-seqs=48", "--max-num-batched-tokens=256")
    async with running_system({"worker": worker}, workers=workers) as system:
        completions = await asyncio.gather(
            *(system.client.complete(case["prompt"], params) for case in asked)
        )
        loads = await system.loads()
    for case, completion in zip(asked, completions, strict=True):
        position = first_difference(completion.token_ids, case["output"])
        if position is None:
            assert completion.finish_reason == case["finish"]
            continue
        assert case["gaps"][position] <= NEAR_TIE, (
            f"prompt of {len(case['prompt'])} tokens differs at {position}, "
            f"where the two highest logits are {case['gaps'][position]} apart"
        )
    counters = loads.counters
    if workers == 1:
        assert counters.preemptions > 0
        assert counters.prefix_hit_tokens > 0
    assert counters.mixed_steps > 0
    assert counters.chunked_prefills > 0
    assert len(loads.workers) == workers
    for load in loads.workers:
        assert load.steps > 0
        assert load.blocks_free + load.blocks_evictable == load.blocks_total
    assert (loads.running, loads.waiting) == (0, 0)
