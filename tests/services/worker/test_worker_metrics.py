"""A worker's metrics as Prometheus reads them, after steps over a real link."""

import asyncio
import contextlib
import re
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.resources import Resource

from services.chassis.metrics import Metrics
from services.worker.engine import Footprint
from services.worker.metrics import WorkerMetrics, error_type
from services.worker.observer import AttachmentObserver
from services.worker.plan import DeviceLost
from tests.fakes.scheduler_link import FakeScheduler, new_request, step
from tests.services.worker.scraping import scrape
from tests.services.worker.sum_worker import LIMITS, Worker, attached, eventually, running

ROOT = Path(__file__).parents[3]
FOOTPRINT = Footprint(threads=3, load_s=1.5, largest_step_bytes=2**20, kv_cache_bytes=2**21)


class Scraped:
    """The metrics of a worker under test."""

    def __init__(self):
        self._metrics = Metrics(Resource.create({}), prometheus=True, push_to=None)
        self._port = self._metrics.serve("127.0.0.1", 0)
        self._ours: WorkerMetrics | None = None

    def of(self, worker):
        """Begins to count; the thread is there only with the worker."""
        self._ours = WorkerMetrics(
            self._metrics,
            limits=LIMITS,
            footprint=FOOTPRINT,
            device=torch.device("cpu"),
            thread=worker.thread,
        )

    def observe(self, attachment):
        return AttachmentObserver(attachment, metrics=self._ours, spans=None)

    async def read(self):
        """Every sample by its name and labels."""
        return await asyncio.to_thread(scrape, self._port)

    async def value(self, name, *labels):
        return (await self.read()).get((f"quire_worker_{name}", *labels))

    def close(self):
        self._metrics.close()


@pytest.fixture
def scraped():
    metrics = Scraped()
    yield metrics
    metrics.close()


@contextlib.asynccontextmanager
async def attachment(address, scraped):
    """A worker whose first attachment is there, and its scheduler."""
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address, observe=scraped.observe)
        scraped.of(worker)
        async with running(worker):
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            await eventually(lambda: worker.ready == [True])
            yield worker, scheduler, link


async def play(link, *steps):
    for one in steps:
        await link.send(one)
        await link.result()


async def test_steps_and_tokens_are_counted_by_kind(address, scraped):
    async with attachment(address, scraped) as (_, _, link):
        await play(
            link,
            step(step_id=1, new=[new_request(0, [1] * 5)], rows=[(0, 4, [1, 2])]),
            step(step_id=2, new=[new_request(1, [2])], rows=[(0, 1, []), (1, 1, [3])]),
            step(step_id=3, rows=[(0, 1, []), (1, 1, [])]),
            step(step_id=4, released=[0], rows=[(1, 1, [])]),
        )
        read = await scraped.read()
    assert read["quire_worker_steps_total",] == 4
    assert read["quire_worker_tokens_total", "prefill"] == 6
    assert read["quire_worker_tokens_total", "decode"] == 3
    assert read["quire_worker_rows",] == 1
    assert read["quire_worker_attached",] == 1
    for phase in ("wait", "execute", "idle"):
        assert read["quire_worker_step_duration_seconds_count", phase] == 4
    assert read["quire_worker_failed_rows_total", "bad_request"] == 0


async def test_what_the_worker_is_can_be_read_before_any_step(address, scraped):
    async with attachment(address, scraped):
        read = await scraped.read()
    assert read["quire_worker_kv_blocks",] == LIMITS.num_blocks
    assert read["quire_worker_kv_memory_bytes",] == 2**21
    assert read["quire_worker_threads",] == 3
    assert read["quire_worker_load_time_seconds",] == 1.5
    assert read["quire_worker_largest_step_memory_bytes",] == 2**20
    assert read["quire_worker_steps_total",] == 0
    assert ("quire_worker_device_memory_bytes", "total") not in read


async def test_a_step_under_way_counts_as_busy(address, scraped):
    async with attachment(address, scraped) as (worker, _, link):
        worker.executors[0].gate.clear()
        await link.send(step(step_id=1))
        await eventually(lambda: worker.executors[0].started == [1])
        first = await scraped.value("busy_time_seconds_total")
        second = await scraped.value("busy_time_seconds_total")
        assert second > first > 0
        idle = await scraped.value("idle_time_seconds_total")
        assert await scraped.value("idle_time_seconds_total") == idle > 0
        worker.executors[0].gate.set()
        await link.result()


async def test_a_failed_row_counts_once_and_its_tokens_do_not(address, scraped):
    async with attachment(address, scraped) as (_, _, link):
        await play(
            link,
            step(step_id=1, new=[new_request(0, [12345])], rows=[(0, 1, [1])]),
            step(step_id=2, rows=[(0, 1, [])]),
            step(step_id=3, released=[0], new=[new_request(0, [12345])], rows=[(0, 1, [1])]),
        )
        assert await scraped.value("failed_rows_total", "bad_request") == 2
        assert await scraped.value("tokens_total", "prefill") == 0
        assert await scraped.value("tokens_total", "decode") == 0


async def test_a_failed_step_and_the_end_of_the_link_are_counted_by_reason(address, scraped):
    async with attachment(address, scraped) as (worker, scheduler, link):
        await play(link, step(step_id=1, new=[new_request(0, [1])], rows=[(0, 1, [1])]))
        worker.executors[0].fails[2] = RuntimeError("x")
        await link.send(step(step_id=2))
        again = await scheduler.next_link()
        assert await scraped.value("failed_steps_total", "RuntimeError") == 1
        assert await scraped.value("link_ends_total", "link_broken") == 1
        assert await scraped.value("attached") == 0
        assert await scraped.value("rows") == 0
        await again.accept(epoch=2)
        await play(again, step(epoch=2, step_id=1))
        assert await scraped.value("attached") == 1
        await again.close()
        await scheduler.next_link()
        assert await scraped.value("link_ends_total", "link_lost") == 1
        assert await scraped.value("steps_total") == 2


async def test_nobody_watches_where_nothing_is_asked_for(address, scraped):
    async with attached(address) as (worker, _, link):
        scraped.of(worker)
        await play(link, step(step_id=1))
        assert await scraped.value("steps_total") == 0


def test_the_types_of_errors_are_a_bounded_set():
    class Odd(Exception):
        pass

    assert error_type(DeviceLost("cuda:0")) == "DeviceLost"
    assert error_type(torch.OutOfMemoryError("x")) == "OutOfMemoryError"
    assert error_type(Odd()) == "other"


def test_every_metric_is_documented_and_every_documented_one_is_there():
    told = (ROOT / "docs/operations.md").read_text()
    made = (ROOT / "services/worker/metrics.py").read_text()
    documented = re.findall(r"^\| `(quire\.worker\.[a-z_.]+)` \|", told, re.MULTILINE)
    assert sorted(documented) == sorted(re.findall(r'"(quire\.worker\.[a-z_.]+)"', made))
    assert len(documented) > 10
