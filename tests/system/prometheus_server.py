"""A real Prometheus that scrapes the services of a test, and questions to it."""

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.service_set import Program, ServiceSet

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
_ENDPOINT = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none."""
    folder = os.environ.get("QUIRE_PROMETHEUS", "/var/tmp/quire-prometheus")
    found = shutil.which(name) or shutil.which(name, path=f"{folder}/usr/bin")
    if found is None:
        pytest.skip(f"no {name}: run deploy/ci/prometheus.sh, or install Debian's prometheus")
    return found


class MeteredSet(ServiceSet):
    """Services with a metrics endpoint each; a service that is started again has its old port."""

    def command(self, name: str) -> tuple[str, ...]:
        log = self.folder / f"{name}.log"
        port = self.port(name) if log.exists() else 0
        return (*super().command(name), "--enable-metrics", f"--metrics-port={port}")

    def port(self, name: str) -> int:
        found = _ENDPOINT.search(self.programs[name].log)
        assert found is not None, self.logs
        return int(found[1])


class Prometheus:
    """A running server's HTTP API."""

    def __init__(self, url: str, server: Program) -> None:
        self._url = url
        self._server = server

    async def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer; fails with the server's words."""
        query = urllib.parse.urlencode(parameters)

        def read() -> Any:
            try:
                with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}") as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                error.add_note(f"{parameters}: {error.read().decode()}")
                raise

        return await asyncio.to_thread(read)

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an expression now."""
        return (await self.get("query", query=expression))["result"]

    async def total(self, expression: str) -> float:
        """The one value of an expression; NaN where it has none."""
        result = await self.query(expression)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else math.nan

    async def has_data(self, expression: str) -> bool:
        """Whether at least one series has a value that is a number."""
        return any(not math.isnan(float(one["value"][1])) for one in await self.query(expression))

    async def firing(self) -> set[str]:
        """The alerts that fire."""
        alerts = (await self.get("alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until_up(self, targets: int) -> None:
        """Waits until so many targets answer."""
        async with asyncio.timeout(60):
            while True:
                assert self._server.is_running, self._server.log
                with contextlib.suppress(urllib.error.URLError):  # it is not there yet
                    if await self.total('count(up{job!="prometheus"} == 1)') == targets:
                        return
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def scraping(
    services: MeteredSet, jobs: Mapping[str, Sequence[str]], folder: Path
) -> AsyncIterator[Prometheus]:
    """Scrapes these services each second, with the project's rules and quicker alerts.

    Args:
        services: that run.
        jobs: names of services by job.
        folder: for its configuration and data.
    """
    path = program("prometheus")
    rules = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = "1s"
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [f"127.0.0.1:{services.port(name)}" for name in names]}
                ],
            }
            for job, names in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = await Program.start(
        (
            path,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ),
        folder / "prometheus.log",
    )
    try:
        running = Prometheus(f"http://127.0.0.1:{port}", server)
        await running.until_up(sum(map(len, jobs.values())))
        yield running
    finally:
        await server.kill()
