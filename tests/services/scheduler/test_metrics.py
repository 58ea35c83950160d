"""What the scheduler's metrics say, against what was really done with its requests."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.v1 import generation_pb2
from services.scheduler.metrics import REFUSALS
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.metered import Metered, Scrape, metered_scheduler
from tests.services.scheduler.token_session import Session, opened, served


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Metered]:
    async with metered_scheduler(tmp_path) as running:
        yield running


def options(**fields: object) -> generation_pb2.SchedulingOptions:
    return generation_pb2.SchedulingOptions(**fields)


async def ends(session: Session, *streams: int) -> None:
    for stream in streams:
        await session.end_of(stream)


def assert_every_token_is_a_first_one_or_has_a_gap(scrape: Scrape, firsts: int) -> None:
    generated = scrape.total("quire_scheduler_generation_tokens_total")
    assert scrape.total("quire_request_time_to_first_token_seconds_count") == firsts
    assert scrape.total("quire_request_inter_token_latency_seconds_count") == generated - firsts


def assert_gaps_are_the_time_from_first_to_last_token(scrape: Scrape) -> None:
    """Of answers that end with a token; what they waited in the queue in between is part of it."""
    gaps_s = scrape.total("quire_request_inter_token_latency_seconds_sum")
    decode_s = scrape.total("quire_request_decode_time_seconds_sum")
    assert gaps_s == pytest.approx(decode_s, abs=1e-5)


async def test_what_plain_requests_took(scheduler: Metered) -> None:
    async with served(scheduler), opened(scheduler) as session:
        for stream in range(1, 5):
            name = "batch" if stream == 4 else ""
            await session.submit(
                stream, [stream, 2, 3, 4, 5], scheduling=options(priority_class=name)
            )
        await ends(session, *range(1, 5))
        scrape = await scheduler.scrape()
    total = scrape.total
    assert total("quire_scheduler_requests_accepted_total") == 4
    assert total("quire_scheduler_requests_ended_total", reason="length", class_="standard") == 3
    assert total("quire_scheduler_requests_ended_total", reason="length", class_="batch") == 1
    assert total("quire_scheduler_requests_ended_total") == 4
    assert_every_token_is_a_first_one_or_has_a_gap(scrape, 4)
    for name in ("duration", "queue_time", "time_to_first_token", "time_per_output_token"):
        assert total(f"quire_request_{name}_seconds_count", class_="standard") == 3, name
        assert total(f"quire_request_{name}_seconds_count", class_="batch") == 1, name
    for name in ("prefill", "decode", "inference", "worker"):
        assert total(f"quire_request_{name}_time_seconds_count") == 4, name
    parts = [f"quire_request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    assert sum(map(total, parts)) == pytest.approx(total("quire_request_duration_seconds_sum"))
    assert total("quire_request_prompt_tokens_sum") == 20
    assert total("quire_request_prompt_tokens_bucket", le="5.0") == 4
    assert total("quire_request_prompt_tokens_bucket", le="2.0") == 0
    assert total("quire_request_generation_tokens_sum") == 16
    assert total("quire_request_max_tokens_sum") == 16
    assert total("quire_request_computed_prompt_tokens_sum") == 20
    assert total("quire_scheduler_admitted_prompt_tokens_total", source="computed") == 20
    assert total("quire_scheduler_admitted_prompt_tokens_total", source="cached") == 0
    assert total("quire_scheduler_prompt_tokens_total") == 20
    # The last token of a request is sampled and never computed.
    assert total("quire_scheduler_computed_tokens_total") == 20 + 16 - 4
    assert total("quire_step_tokens_sum") == 20 + 16 - 4
    assert total("quire_scheduler_throughput", kind="decode") > 0
    assert 0 < total("quire_scheduler_time_per_token_seconds") < 10


async def test_what_steps_took_is_what_the_worker_told(scheduler: Metered) -> None:
    """The worker says 900 µs of computing and 10 of idling for each step, 100 of waiting."""
    async with served(scheduler) as worker, opened(scheduler) as session:
        await session.submit(1, [1, 2, 3], max_tokens=9)
        await session.end_of(1)
        scrape = await scheduler.scrape()
        steps = len(worker.steps)
    total = scrape.total
    assert total("quire_scheduler_steps_total") == steps
    assert total("quire_step_plan_time_seconds_count") == steps
    assert total("quire_step_execute_time_seconds_count") == steps
    assert total("quire_step_execute_time_seconds_bucket", le="0.001") == steps
    assert total("quire_step_execute_time_seconds_bucket", le="0.0005") == 0
    assert total("quire_step_link_time_seconds_count") == steps
    assert total("quire_step_rows_sum") == 9
    busy = total("quire_scheduler_worker_busy_time_seconds_total", worker="scripted")
    assert busy == pytest.approx(steps * 900e-6)
    idle = total("quire_scheduler_worker_idle_time_seconds_total", worker="scripted")
    assert idle == pytest.approx(steps * 10e-6)
    assert total("quire_request_worker_time_seconds_sum") <= busy
    assert 0 < total("quire_scheduler_worker_utilization", worker="scripted") <= 1
    assert total("quire_scheduler_token_budget", worker="scripted") == 8


async def test_what_runs_waits_and_holds_blocks(scheduler: Metered) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        for stream in range(1, 7):
            await session.submit(stream, [stream, 2, 3, 4, 5], scheduling=options())
        await worker.step()
        await worker.step()
        scrape = await scheduler.scrape()
        total = scrape.total
        running, waiting = total("quire_scheduler_running"), total("quire_scheduler_waiting")
        assert running + waiting == 6
        assert running == total("quire_scheduler_running", worker="scripted") > 0
        assert waiting == total("quire_scheduler_waiting", class_="standard") > 0
        assert total("quire_scheduler_waiting_tokens") == 5 * waiting
        blocks = {s: total("quire_scheduler_kv_blocks", state=s) for s in ("held", "free")}
        assert total("quire_scheduler_kv_blocks") == 16 == sum(blocks.values())
        assert total("quire_scheduler_kv_usage") == blocks["held"] / 16 > 0
        assert total("quire_scheduler_workers") == 1
        assert total("quire_scheduler_info", model="scripted-model", block_size="4") == 1


async def test_a_preemption_costs_a_gap_and_no_first_token(scheduler: Metered) -> None:
    """Four answers of 28 tokens take twice the blocks there are."""
    async with served(scheduler), opened(scheduler) as session:
        for stream in range(1, 5):
            await session.submit(stream, [stream, 2, 3, 4], max_tokens=28)
        await ends(session, 1, 2, 3, 4)
        scrape = await scheduler.scrape()
    assert scrape.total("quire_scheduler_preemptions_total") > 0
    assert scrape.total("quire_scheduler_recomputed_tokens_total") > 0
    assert scrape.total("quire_scheduler_generation_tokens_total") == 4 * 28
    assert_every_token_is_a_first_one_or_has_a_gap(scrape, 4)
    # All prompts were computed once before anybody gave way; what was again is not counted here.
    assert scrape.total("quire_scheduler_admitted_prompt_tokens_total") == 16
    assert_gaps_are_the_time_from_first_to_last_token(scrape)


async def test_a_lost_worker_leaves_no_series_and_its_requests_no_second_first_token(
    scheduler: Metered,
) -> None:
    async with opened(scheduler) as session, asyncio.TaskGroup() as tasks:
        async with attached(scheduler.target, worker_id="a") as first:
            for stream in (1, 2):
                await session.submit(stream, [stream, 2, 3], max_tokens=20)
            for _ in range(4):
                await first.answer(await first.step())
            await session.until(lambda: {1, 2} <= session.tokens.keys())
            before = await scheduler.scrape()
        async with attached(scheduler.target, worker_id="b") as second:
            serving = tasks.create_task(second.serve())
            await ends(session, 1, 2)
            scrape = await scheduler.scrape()
            serving.cancel()
    assert before.total("quire_scheduler_running", worker="a") == 2
    assert 'worker="a"' not in scrape.text
    assert scrape.total("quire_scheduler_workers_lost_total") == 1
    assert scrape.total("quire_scheduler_requeues_total") == 2
    assert scrape.total("quire_scheduler_generation_tokens_total") == 40
    assert_every_token_is_a_first_one_or_has_a_gap(scrape, 2)


async def test_two_workers_are_told_apart(scheduler: Metered) -> None:
    # Each takes one request at a time, so that both have some.
    async with (
        served(scheduler, worker_id="a", max_num_seqs=1),
        served(scheduler, worker_id="b", instance_id="2", max_num_seqs=1),
        opened(scheduler) as session,
    ):
        for stream in range(1, 9):
            await session.submit(stream, [stream, 2, 3], max_tokens=12)
        await ends(session, *range(1, 9))
        scrape = await scheduler.scrape()
    busy = [
        scrape.total("quire_scheduler_worker_busy_time_seconds_total", worker=name) for name in "ab"
    ]
    assert min(busy) > 0
    executed = scrape.total("quire_step_execute_time_seconds_sum")
    assert sum(busy) == pytest.approx(executed)
    assert scrape.total("quire_scheduler_workers") == 2
    for name in "ab":
        assert scrape.total("quire_scheduler_kv_blocks", worker=name) == 16
    assert_every_token_is_a_first_one_or_has_a_gap(scrape, 8)


async def test_a_slot_that_is_used_again_keeps_the_gap_of_who_had_it(scheduler: Metered) -> None:
    """Of seven requests on four slots some give way, and others get their slots meanwhile."""
    async with served(scheduler), opened(scheduler) as session:
        for stream in range(1, 8):
            name = "interactive" if stream > 4 else "batch"
            await session.submit(
                stream,
                [stream, 2, 3, 4],
                max_tokens=24,
                scheduling=options(priority_class=name),
            )
            if stream == 4:
                await session.until(lambda: len(session.tokens) == 4)
        await ends(session, *range(1, 8))
        scrape = await scheduler.scrape()
    assert scrape.total("quire_scheduler_displaced_total") > 0
    assert_every_token_is_a_first_one_or_has_a_gap(scrape, 7)
    assert_gaps_are_the_time_from_first_to_last_token(scrape)


async def test_a_resumed_request_has_no_first_token(scheduler: Metered) -> None:
    async with served(scheduler), opened(scheduler) as session:
        await session.submit(
            1, [5, 6], attempt=1, resumed=generation_pb2.TokenIds(ids=[7, 7]), max_tokens=6
        )
        await session.end_of(1)
        scrape = await scheduler.scrape()
    assert scrape.total("quire_scheduler_generation_tokens_total") == 4
    assert scrape.total("quire_request_time_to_first_token_seconds_count") == 0
    assert scrape.total("quire_request_inter_token_latency_seconds_count") == 3


async def test_a_cached_prefix_is_told_from_what_was_computed(scheduler: Metered) -> None:
    prompt = list(range(10, 22))
    async with served(scheduler), opened(scheduler) as session:
        for stream in (1, 2):
            await session.submit(stream, prompt)
            end = await session.end_of(stream)
        scrape = await scheduler.scrape()
    total = scrape.total
    cached = end.finished.usage.cached_tokens
    assert cached >= 8
    assert total("quire_scheduler_admitted_prompt_tokens_total", source="cached") == cached
    assert total("quire_scheduler_prefix_cache_hits_total") == cached
    assert total("quire_scheduler_prefix_cache_queries_total") == 24
    assert total("quire_scheduler_prefix_cache_hit_rate") == cached / 24
    assert total("quire_request_computed_prompt_tokens_sum") == 24 - cached
    assert total("quire_scheduler_kv_blocks", state="cached") > 0


async def test_every_end_has_its_reason(scheduler: Metered) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], scheduling=options(deadline_ms=100))
        await session.end_of(1)
        await session.submit(2, [5, 6], max_tokens=30)
        await worker.answer(await worker.step())
        await session.send(abort={"stream_id": 2})
        await session.end_of(2)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(worker.serve())
            await session.submit(3, [5, 6], stop_token_ids=[7])
            await session.submit(4, [5, 6])
            await ends(session, 3, 4)
            serving.cancel()
        scrape = await scheduler.scrape()
    ended = "quire_scheduler_requests_ended_total"
    for reason in ("deadline", "abort", "stop", "length"):
        assert scrape.total(ended, reason=reason) == 1, reason
    assert scrape.total(ended) == scrape.total("quire_scheduler_requests_accepted_total") == 4
    assert scrape.total("quire_scheduler_deadline_exceeded_total") == 1


async def test_a_shed_request_is_counted(scheduler: Metered) -> None:
    """The worker does not answer, so that the second one's first token would be late."""
    async with attached(scheduler.target, max_num_seqs=1) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], max_tokens=30)
        await worker.step()
        await session.submit(
            2, [5, 6], scheduling=options(ttft_target_ms=200, shed_late=True, deadline_ms=60_000)
        )
        await session.end_of(2)
        scrape = await scheduler.scrape()
    assert scrape.total("quire_scheduler_shed_total") == 1
    assert scrape.total("quire_scheduler_requests_ended_total", reason="shed") == 1
    assert scrape.total("quire_scheduler_ttft_targets_total", outcome="missed") == 1


async def test_refusals_are_told_by_reason_at_the_door_and_in_the_core(tmp_path: Path) -> None:
    async with (
        metered_scheduler(tmp_path, max_queued_requests=1) as scheduler,
        attached(scheduler.target, max_num_seqs=1) as worker,
        opened(scheduler) as session,
    ):
        await session.submit(1, [5] * 64)
        await session.submit(2, [100])
        await session.submit(3, [5], scheduling=options(priority_class="no such class"))
        await ends(session, 1, 2, 3)
        await session.submit(4, [5])
        await worker.step()
        for stream in (5, 6):
            await session.submit(stream, [5])
        await session.end_of(6)
        scrape = await scheduler.scrape()
    refused = "quire_scheduler_requests_refused_total"
    for reason in ("CONTEXT_LENGTH", "VOCABULARY", "UNKNOWN_CLASS", "QUEUE_REQUESTS"):
        assert scrape.total(refused, reason=reason) == 1, reason
    assert scrape.total(refused) == 4
    assert scrape.total("quire_scheduler_requests_accepted_total") == 2


async def test_every_metric_is_documented_and_every_documented_one_is_there(
    scheduler: Metered,
) -> None:
    async with served(scheduler):
        families = (await scheduler.scrape()).families
    kinds = r"quire[._](?:scheduler|request|step)[._]"
    made = {name.removesuffix("_seconds") for name in families if re.match(kinds, name)}
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    table = page.split("### Metrics of a scheduler")[1].split("###")[0]
    told = re.findall(
        rf"`({kinds}[a-z_.]+)`", "".join(re.findall(r"^\|[^|]*", table, re.MULTILINE))
    )
    assert sorted(name.replace(".", "_") for name in told) == sorted(made)


def test_every_refusal_that_the_core_knows_has_a_series() -> None:
    sources = Path(__file__).parents[3] / "services" / "scheduler" / "core"
    text = "".join((sources / f"{name}.py").read_text() for name in ("admission", "entrance"))
    assert all(f'"{reason}"' in text for reason in REFUSALS)


async def test_a_stall_is_told_while_it_lasts(tmp_path: Path) -> None:
    async with (
        metered_scheduler(tmp_path, stall_timeout=0.1) as scheduler,
        attached(scheduler.target) as worker,
        opened(scheduler) as session,
    ):
        await session.submit(1, [5, 6], max_tokens=1)
        step = await worker.step()
        stalled = await scheduler.scrape()
        await worker.answer(step)
        await session.end_of(1)
        await worker.answer(await worker.step())  # it is told what was released
        moving = await scheduler.scrape()
    assert stalled.total("quire_scheduler_stalled_seconds") > 0.1
    assert moving.total("quire_scheduler_stalled_seconds") == 0


async def test_b043_all_are_cancelled_and_nothing_comes_after(scheduler: Metered) -> None:
    async with attached(scheduler.target, num_blocks=64) as worker, opened(scheduler) as session:
        for stream in range(1, 21):
            await session.submit(stream, [stream, 6, 7], max_tokens=30)
        await worker.answer(await worker.step())
        busy = await scheduler.scrape()
        for stream in range(1, 21):
            await session.send(abort={"stream_id": stream})
        await ends(session, *range(1, 21))
        scrape = await scheduler.scrape()
    gauges = ("running", "waiting", "waiting_tokens", "kv_usage")
    for name in gauges:
        assert busy.total(f"quire_scheduler_{name}") > 0, name
        assert scrape.total(f"quire_scheduler_{name}") == 0, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert busy.total(f"vllm:{name}") > 0, name
        assert scrape.total(f"vllm:{name}") == 0, name
    assert scrape.total("vllm:num_requests_waiting_by_reason") == 0


async def test_b134_the_number_of_series_does_not_grow_with_requests(scheduler: Metered) -> None:
    async with served(scheduler), opened(scheduler) as session:

        async def ask(streams: range) -> Scrape:
            for batch in range(streams.start, streams.stop, 50):
                for stream in range(batch, min(batch + 50, streams.stop)):
                    name = f"class-{stream}" if stream % 5 == 0 else ""
                    await session.submit(
                        stream,
                        [stream % 90, 6, 7],
                        max_tokens=2,
                        request_id=f"unique-{stream}",
                        scheduling=options(
                            tenant=f"tenant-{stream}",
                            session_id=f"s-{stream}",
                            priority_class=name,
                        ),
                        model=f"model-{stream}" if stream % 7 == 0 else "",
                    )
                await ends(session, *range(batch, min(batch + 50, streams.stop)))
            return await scheduler.scrape()

        few = await ask(range(1, 101))
        many = await ask(range(101, 1_001))
    assert many.num_series == few.num_series
    assert many.total("vllm:num_requests_total") > few.total("vllm:num_requests_total") > 0
    for text in ("unique-", "tenant-", "class-", "model-"):
        assert text not in many.text


async def test_b133_counters_only_grow_while_workers_come_and_go(scheduler: Metered) -> None:
    scrapes = []
    async with opened(scheduler) as session:
        for round_number in range(3):
            async with served(scheduler, instance_id=str(round_number)):
                for stream in range(10 * round_number + 1, 10 * round_number + 4):
                    await session.submit(stream, [stream, 6, 7], max_tokens=12)
                await session.end_of(10 * round_number + 1)
                scrapes.append(await scheduler.scrape())
    for before, after in itertools.pairwise(scrapes):
        later = after.families
        for name, family in before.families.items():
            if family.type not in ("counter", "histogram") or "worker_" in name:
                continue  # what is told of one attached worker begins anew with it
            old = {(s.name, *sorted(s.labels.items())): s.value for s in family.samples}
            new = {(s.name, *sorted(s.labels.items())): s.value for s in later[name].samples}
            assert all(new[key] >= value for key, value in old.items()), name
