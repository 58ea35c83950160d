"""The names of vLLM: which there are, of what kind and labels, and that they tell the truth."""

import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from quire.v1 import generation_pb2
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.metered import Metered, Scrape, metered_scheduler
from tests.services.scheduler.token_session import opened, served

GAUGES = {
    "num_requests_running": set(),
    "num_requests_waiting": set(),
    "num_requests_waiting_by_reason": {"reason"},
    "kv_cache_usage_perc": set(),
    "cache_config_info": {
        *("block_size", "num_gpu_blocks", "enable_prefix_caching", "prefix_caching_hash_algo"),
    },
    "gpu_cache_usage_perc": set(),
    "num_prefill_tokens": set(),
    "num_decode_tokens": set(),
    "prefill_throughput": set(),
    "decode_throughput": set(),
    "avg_time_per_token": set(),
}
"""vLLM's gauges that Quire can tell of, and those without `_total` in their names; more labels."""

COUNTERS = {
    "num_preemptions": set(),
    "prompt_tokens": set(),
    "prompt_tokens_by_source": {"source"},
    "prompt_tokens_cached": set(),
    "generation_tokens": set(),
    "request_success": {"finished_reason"},
    "prefix_cache_queries": set(),
    "prefix_cache_hits": set(),
    "num_requests": set(),
}

LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960]
LATENCY += [1920, 7680]
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20]
TTFT += [40, 80, 160, 640, 2560]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20]
PER_TOKEN += [40, 80]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6]
ITERATION = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]

HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_n": [1, 2, 5, 10, 20],
    "request_params_max_tokens": TOKENS,
    "iteration_tokens_total": ITERATION,
    "request_prefill_kv_computed_tokens": TOKENS,
}

ALWAYS = {"model_name": "scripted-model", "engine": "0"}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Metered]:
    async with metered_scheduler(tmp_path) as running:
        yield running


def aliases(scrape: Scrape) -> dict[str, Metric]:
    return {
        name.removeprefix("vllm:"): family
        for name, family in scrape.families.items()
        if name.startswith("vllm:")
    }


async def test_every_name_has_its_type_labels_and_buckets(scheduler: Metered) -> None:
    async with served(scheduler):
        found = aliases(await scheduler.scrape())
    assert found.keys() == GAUGES.keys() | COUNTERS.keys() | HISTOGRAMS.keys()
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, more in table.items():
            assert found[name].type == kind, name
            suffix = "_total" if kind == "counter" else ""
            for sample in found[name].samples:
                assert sample.name == f"vllm:{name}{suffix}"
                assert sample.labels.items() >= ALWAYS.items(), name
                assert sample.labels.keys() == ALWAYS.keys() | more, name
    for name, bounds in HISTOGRAMS.items():
        assert found[name].type == "histogram", name
        buckets = [s for s in found[name].samples if s.name == f"vllm:{name}_bucket"]
        assert [float(s.labels["le"]) for s in buckets] == [*bounds, math.inf], name
        assert all(s.labels.items() >= ALWAYS.items() for s in found[name].samples), name
        assert {s.name.removeprefix(f"vllm:{name}") for s in found[name].samples} == {
            *("_bucket", "_count", "_sum")
        }


def test_the_page_for_those_who_come_from_vllm_has_all_names() -> None:
    page = (Path(__file__).parents[3] / "docs/migrating-from-vllm.md").read_text()
    counters = {f"{name}_total" for name in COUNTERS}
    assert set(re.findall(r"`vllm:(\w+)`", page)) == GAUGES.keys() | counters | HISTOGRAMS.keys()


async def test_what_they_say_is_what_was_done(scheduler: Metered) -> None:
    """Two workers are one engine. The first prompt is asked twice, another answer is stopped."""
    async with (
        served(scheduler, worker_id="a"),
        attached(scheduler.target, worker_id="b", instance_id="2", max_num_seqs=1) as idle,
        opened(scheduler) as session,
    ):
        before = await scheduler.scrape()
        for stream in (1, 2):
            await session.submit(stream, list(range(10, 22)))
            await session.end_of(stream)
        await session.submit(3, [3, 6, 7], stop_token_ids=[7])
        await session.end_of(3)
        await idle.no_step()
        scrape = await scheduler.scrape()
    for name in ("num_requests", "generation_tokens", "prompt_tokens", "request_success"):
        assert before.total(f"vllm:{name}_total") == 0, name
    total = scrape.total
    assert total("vllm:num_requests_total") == 3
    assert total("vllm:request_success_total", finished_reason="length") == 2
    assert total("vllm:request_success_total", finished_reason="stop") == 1
    assert total("vllm:request_success_total") == 3
    assert total("vllm:generation_tokens_total") == 4 + 4 + 1
    assert total("vllm:prompt_tokens_total") == 12 + 12 + 3
    cached = total("vllm:prompt_tokens_cached_total")
    assert 8 <= cached < 12
    assert total("vllm:prefix_cache_hits_total") == cached
    assert total("vllm:prefix_cache_queries_total") == 27
    assert total("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert total("vllm:prompt_tokens_by_source_total", source="local_compute") == 27 - cached
    planned = total("vllm:num_prefill_tokens") + total("vllm:num_decode_tokens")
    assert planned == total("vllm:iteration_tokens_total_sum")
    assert planned >= 27 - cached + 3 + 3
    assert total("vllm:prefill_throughput") > 0 < total("vllm:decode_throughput")
    assert 0 < total("vllm:avg_time_per_token") < 10
    for name in HISTOGRAMS:
        if name not in ("inter_token_latency_seconds", "iteration_tokens_total"):
            # The answer of one token has no time per output token.
            wanted = 2 if name == "request_time_per_output_token_seconds" else 3
            assert total(f"vllm:{name}_count") == wanted, name
            assert total(f"vllm:{name}_bucket", le="+Inf") == wanted, name
    assert total("vllm:inter_token_latency_seconds_count") == 6
    assert total("vllm:request_prompt_tokens_sum") == 27
    assert total("vllm:request_prompt_tokens_bucket", le="10.0") == 1
    assert total("vllm:request_generation_tokens_sum") == 9
    assert total("vllm:request_max_num_generation_tokens_sum") == 9
    assert total("vllm:request_params_max_tokens_sum") == 12
    assert total("vllm:request_params_n_sum") == 3
    assert total("vllm:request_prefill_kv_computed_tokens_sum") == 27 - cached
    config = {"block_size": "4", "num_gpu_blocks": "32", "enable_prefix_caching": "True"}
    assert total("vllm:cache_config_info", **config) == 1


async def test_finer_buckets_of_ours_are_joined(scheduler: Metered) -> None:
    """Everything is quick here: what lies in our finest buckets is in vLLM's first one."""
    async with served(scheduler), opened(scheduler) as session:
        await session.submit(1, [5, 6])
        await session.end_of(1)
        scrape = await scheduler.scrape()
    for theirs, ours, first in (
        ("e2e_request_latency_seconds", "quire_request_duration_seconds", "0.3"),
        ("inter_token_latency_seconds", "quire_request_inter_token_latency_seconds", "0.01"),
    ):
        for bound in (first, "0.5", "+Inf"):
            same = scrape.total(f"vllm:{theirs}_bucket", le=bound)
            assert same == scrape.total(f"{ours}_bucket", le=bound), theirs
        assert scrape.total(f"vllm:{theirs}_sum") == scrape.total(f"{ours}_sum")


@pytest.mark.parametrize(
    "scheduling", [{"deadline_ms": 100}, {"ttft_target_ms": 50, "shed_late": True}]
)
async def test_what_is_ended_for_its_time_counts_as_aborted(
    scheduler: Metered, scheduling: dict[str, object]
) -> None:
    async with attached(scheduler.target, max_num_seqs=1) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], max_tokens=30)
        await worker.step()
        options = generation_pb2.SchedulingOptions(**scheduling)
        await session.submit(2, [5, 6], scheduling=options)
        await session.end_of(2)
        scrape = await scheduler.scrape()
    assert scrape.total("vllm:request_success_total", finished_reason="abort") == 1
    assert scrape.total("vllm:request_success_total") == 1
    assert scrape.total("vllm:num_requests_running") == 1


async def test_without_a_worker_all_names_are_there(tmp_path: Path) -> None:
    async with metered_scheduler(tmp_path, worker_grace=0.2) as scheduler, opened(scheduler) as one:
        never = aliases(await scheduler.scrape())
        await one.submit(1, [5, 6])
        await one.end_of(1)
        failed = await scheduler.scrape()
        async with served(scheduler):
            pass
        after = await scheduler.scrape()
    assert never.keys() == GAUGES.keys() | COUNTERS.keys() | HISTOGRAMS.keys()
    assert failed.total("vllm:request_success_total", finished_reason="error") == 1
    assert after.total("vllm:kv_cache_usage_perc") == 0
    assert after.total("vllm:kv_cache_usage_perc", model_name="scripted-model") == 0
    assert after.total("vllm:cache_config_info", num_gpu_blocks="0") == 1
