"""A real Prometheus scrapes a running set: the dashboard, the rules and the sums hold.

One course of real load makes everything happen that the dashboard shows; the tests look at it.
"""

import asyncio
import collections
import itertools
import json
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from benchmarks.dashboard import DASHBOARD, panels, resolved
from quire.v1 import generation_pb2, token_pb2
from tests.system.prometheus_server import (
    ROOT,
    RULES,
    MeteredSet,
    Prometheus,
    program,
    scraping,
)
from tests.system.raw_requests import text_request, token_ids

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

JOBS = {
    "scheduler": ("scheduler",),
    "worker": ("worker-0", "worker-1"),
    "tokenizer": ("tokenizer",),
}
# 128 blocks of 16 tokens on each worker, of which eight streams at their longest need 176.
WORKER = (
    *("--max-num-seqs=8", "--max-num-batched-tokens=64", "--max-model-len=512"),
    "--kv-cache-memory=256KiB",
)
PROMPT, ANSWER = 40, 300
BOARD = json.loads(DASHBOARD.read_text())
INTERVAL = "2m"


@dataclass
class Course:
    """What was asked, and what the callers got."""

    services: MeteredSet
    prometheus: Prometheus
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 100_000)))

    async def ask(self, answer: int = ANSWER, text: str = "", **scheduling: Any) -> None:
        """One request; without a text, of a prompt that nobody had before."""
        number = next(self.numbers)
        prompt = [number % 200, *((number // 200 + index) % 200 for index in range(PROMPT - 1))]
        request = text_request(
            prompt, answer, scheduling=generation_pb2.SchedulingOptions(**scheduling)
        )
        if text:
            request.text = text
        tokens = 0
        try:
            async for response in self.services.text.Generate(request):
                tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            self.errors[error.code().name] += 1
            assert not tokens
            return
        usage = response.finished.usage
        assert tokens == usage.completion_tokens == answer
        self.completed += 1
        self.output_tokens += tokens
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    async def crowd(self, streams: int, answer: int = ANSWER, **scheduling: Any) -> None:
        await asyncio.gather(*(self.ask(answer, **scheduling) for _ in range(streams)))


async def run(course: Course) -> None:
    """Everything that the dashboard shows happens once, or oftener."""
    services = course.services
    for _ in range(2):
        await course.ask(8, "The second one of the two finds the prefix.")
    refused = token_pb2.TokenServiceGenerateRequest(
        request=token_pb2.TokenRequest(prompt=token_ids([1] * 600))
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await services.tokens.Generate(refused).read()
    await course.ask(priority_class="none such")

    async with asyncio.TaskGroup() as tasks:
        # More than both workers hold, in all classes: some give way, and more important ones enter.
        tasks.create_task(course.crowd(16, priority_class="batch"))
        await asyncio.sleep(0.2)
        tasks.create_task(course.crowd(16))
        await asyncio.sleep(0.2)
        tasks.create_task(course.crowd(16, priority_class="interactive", ttft_target_ms=2_000))

        async def busy() -> bool:
            workers = (await services.loads()).workers
            return len(workers) == 2 and all(worker.running >= 2 for worker in workers)

        await services.until(busy)
        await services.programs["worker-0"].kill()

        async def requeued() -> bool:
            return bool((await services.loads()).counters.requeues)

        await services.until(requeued)
        await services.start("worker-0")
    await services.until_ready()
    await course.crowd(16, answer=40)
    await shed(course)
    await course.ask(8, "Another text to encode.")
    await services.until(services.at_rest)
    await asyncio.sleep(2.5)  # two scrapes, so that all of this has been seen


async def shed(course: Course) -> None:
    """A request is next, but the workers stand still for longer than it wants to wait."""
    workers = [course.services.programs[name] for name in JOBS["worker"]]
    for worker in workers:
        worker.send(signal.SIGSTOP)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(course.crowd(16, answer=40, priority_class="batch"))

        async def still() -> bool:
            loads = await course.services.loads()
            return loads.waiting > 4 and all(one.steps_in_flight == 2 for one in loads.workers)

        await course.services.until(still)
        await course.ask(priority_class="interactive", ttft_target_ms=700, shed_late=True)
        for worker in workers:
            worker.send(signal.SIGCONT)


@pytest.fixture(scope="module")
async def course(successor_model: Path) -> AsyncIterator[Course]:
    program("prometheus")  # or skip, before anything is started
    flags = {
        "worker": WORKER,
        "scheduler": ("--check-block-tables=true", "--worker-grace=30"),
    }
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as name:
        folder = Path(name)
        services = MeteredSet(folder, successor_model, flags)
        try:
            await services.start(*(name for names in JOBS.values() for name in names))
            await services.until_ready()
            async with scraping(services, JOBS, folder) as prometheus:
                made = Course(services, prometheus)
                await run(made)
                yield made
        finally:
            await services.end()


async def test_every_panel_of_the_dashboard_has_data(course: Course) -> None:
    asked = [
        (panel.title, query.expression)
        for panel in panels(BOARD, INTERVAL)
        for query in panel.queries
    ]
    assert len(asked) > 50
    empty = [one for one in asked if not await course.prometheus.has_data(one[1])]
    assert not empty


async def test_every_variable_of_the_dashboard_has_choices(course: Course) -> None:
    queries = [v["query"]["query"] for v in BOARD["templating"]["list"] if v["type"] == "query"]
    assert queries
    for query in queries:
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        found = await course.prometheus.query(resolved(series, INTERVAL))
        assert found, query
        assert all(one["metric"][label] for one in found), query


def rules(kind: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


async def test_every_rule_has_data(course: Course) -> None:
    """Of alerts, which have none as long as all is well, both sides of each comparison."""
    groups = (await course.prometheus.get("rules"))["groups"]
    states = [(rule["name"], rule["health"]) for group in groups for rule in group["rules"]]
    assert len(states) == len(rules("record")) + len(rules("alert"))
    assert {health for _, health in states} == {"ok"}
    asked = [rule["record"] for rule in rules("record")] + [
        rule["expr"] for rule in rules("record")
    ]
    for rule in rules("alert"):
        for part in re.split(r"\s+and(?: on \([a-z, ]+\))?\s+", rule["expr"]):
            asked += [re.fullmatch(r"(.+?) (?:>|==) [\d.]+", part)[1]]
    empty = [one for one in asked if not await course.prometheus.has_data(one)]
    assert not empty


async def test_what_happened_is_counted(course: Course) -> None:
    total = course.prometheus.total
    assert await total("quire_scheduler_preemptions_total") > 0
    assert await total("quire_scheduler_displaced_total") > 0
    assert await total("quire_scheduler_requeues_total") > 0
    lost = course.services.programs["scheduler"].log.count(" lost: ")
    assert await total("quire_scheduler_workers_lost_total") == lost > 0
    assert await total("quire_scheduler_shed_total") == 1
    refused = 'quire_scheduler_requests_refused_total{reason="%s"}'
    assert await total(refused % "CONTEXT_LENGTH") == 1
    assert await total(refused % "UNKNOWN_CLASS") == 1
    assert await total("vllm:num_preemptions_total") == await total(
        "quire_scheduler_preemptions_total"
    )


async def test_b133_sums_are_what_the_clients_counted(course: Course) -> None:
    total = course.prometheus.total
    assert course.completed == 2 + 3 * 16 + 2 * 16 + 1
    assert course.errors == {"INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1}
    done = 'sum(quire_scheduler_requests_ended_total{reason="length"})'
    assert await total(done) == course.completed
    assert await total('vllm:request_success_total{finished_reason="length"}') == course.completed
    for name in (
        "quire_scheduler_generation_tokens_total",
        "quire_request_generation_tokens_sum",
        "vllm:generation_tokens_total",
        "quire_tokenizer_output_tokens_total",
    ):
        assert await total(name) == course.output_tokens, name
    assert course.cached_tokens > 0
    cached = 'quire_scheduler_admitted_prompt_tokens_total{source="cached"}'
    assert await total(cached) == course.cached_tokens
    assert await total("quire_tokenizer_cached_tokens_total") == course.cached_tokens
    prompts = "sum(quire_scheduler_admitted_prompt_tokens_total)"
    assert await total(prompts) == course.prompt_tokens
    # Each generated token is a first one or has a gap, across preemptions and a lost worker.
    firsts = await total("sum(quire_request_time_to_first_token_seconds_count)")
    gaps = await total("quire_request_inter_token_latency_seconds_count")
    assert (firsts, firsts + gaps) == (course.completed, course.output_tokens)


async def test_b133_counters_only_grow_except_where_a_worker_began_anew(course: Course) -> None:
    names = r".+_(total|count|bucket|sum)"
    found = await course.prometheus.query(f'{{__name__=~"{names}"}}[10m]')
    fell = {
        (series["metric"]["instance"], series["metric"]["__name__"])
        for series in found
        if any(after < before for before, after in itertools.pairwise(values(series)))
    }
    again = f"127.0.0.1:{course.services.port('worker-0')}"
    # What the scheduler tells of an attached worker begins anew with its next attachment.
    assert {name for instance, name in fell if instance != again} <= {
        "quire_scheduler_worker_busy_time_seconds_total",
        "quire_scheduler_worker_idle_time_seconds_total",
    }
    began = f'resets(process_uptime_seconds{{instance="{again}"}}[10m])'
    assert await course.prometheus.total(began) == 1


def values(series: dict[str, Any]) -> list[float]:
    return [float(text) for _, text in series["values"]]


async def test_idle_gauges_are_zero(course: Course) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert await course.prometheus.total(f"vllm:{name}") == 0, name
        assert await course.prometheus.total(f"max_over_time(vllm:{name}[10m])") > 0, name


async def test_real_alerts_fire(course: Course) -> None:
    """A worker was killed before; now nobody computes. Without the pauses that the rules make."""
    assert "QuireWorkersLost" in await course.prometheus.firing()
    assert "QuireNoWorkers" not in await course.prometheus.firing()
    for name in JOBS["worker"]:
        await course.services.programs[name].kill()
    wanted = {"QuireNoWorkers", "QuireDown"}

    async def fire() -> bool:
        return wanted <= await course.prometheus.firing()

    await course.services.until(fire)


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        (program("promtool"), *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_well_formed_and_fire_as_they_should() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES.with_name("rules_test.yml")))


def test_the_configuration_is_well_formed() -> None:
    promtool("check", "config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))


def test_every_alert_has_a_severity_a_summary_and_a_paragraph_in_the_docs() -> None:
    headings = re.findall(
        r"^#+ (.*)$", (ROOT / "docs/operations.md").read_text(), flags=re.MULTILINE
    )
    anchors = {heading.lower() for heading in headings}
    for alert in rules("alert"):
        assert alert["labels"]["severity"] in ("critical", "warning"), alert["alert"]
        assert alert["annotations"]["summary"].endswith("."), alert["alert"]
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors, alert["alert"]


def test_panels_do_not_overlap_and_name_the_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
