"""A real scheduler in this process with its metrics endpoint, and what a scrape of it says."""

import asyncio
import contextlib
import math
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.chassis.telemetry import Telemetry
from services.scheduler.__main__ import wire
from services.scheduler.settings import Settings
from services.scheduler.vllm_names import vllm_families
from tests.services.scheduler.conftest import Running

FRESH_S = 0.25
"""After this, nothing read for the scrape before is given out again."""


@dataclass(frozen=True)
class Scrape:
    """One answer of the endpoint."""

    text: str

    @property
    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text)}

    def _samples(self, name: str, labels: dict[str, str]) -> Iterator[float]:
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample.value

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series that have these labels; NaN where there is none."""
        found = list(self._samples(name, {name.rstrip("_"): v for name, v in labels.items()}))
        return sum(found) if found else math.nan

    @property
    def num_series(self) -> int:
        return sum(not line.startswith("#") for line in self.text.splitlines())


@dataclass(frozen=True)
class Metered(Running):
    port: int

    async def scrape(self) -> Scrape:
        """What the endpoint says, nothing of it older than this call."""
        await asyncio.sleep(FRESH_S)
        url = f"http://127.0.0.1:{self.port}/metrics"
        # As a Prometheus 2 asks.
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        request = urllib.request.Request(url, headers={"Accept": accept})

        def read() -> str:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.read().decode()

        return Scrape(await asyncio.to_thread(read))


@contextlib.asynccontextmanager
async def metered_scheduler(folder: Path, **settings: object) -> AsyncIterator[Metered]:
    made = Settings(**{"check_block_tables": True, "enable_metrics": True, **settings})
    telemetry = Telemetry(made, service="scheduler", version="0", env={})
    loop, server = wire(made, telemetry=telemetry)
    port = telemetry.metrics.serve("127.0.0.1", 0, vllm_families)
    (target,) = await server.start([f"unix://{folder}/s.sock"])
    async with asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel(target) as channel:
        tasks.create_task(loop.run())
        try:
            yield Metered(target, loop, channel, port)
        finally:
            loop.close()
            await server.stop()
            await telemetry.close()
