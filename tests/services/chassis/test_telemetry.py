"""What a service's flags and environment make of logs, metrics and traces."""

import asyncio
import logging
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from services.chassis.telemetry import Telemetry
from services.chassis.telemetry_settings import TelemetrySettings
from tests.fakes.otlp_receiver import receiving


@pytest.fixture(autouse=True)
def the_test_s_own_logs() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


def made(env: Mapping[str, str] | None = None, **settings: Any) -> Telemetry:
    return Telemetry(
        TelemetrySettings(**settings), service="test", version="1.2.3", env=dict(env or {})
    )


async def test_nothing_is_there_unless_asked_for() -> None:
    telemetry = made()
    assert telemetry.metrics is None
    assert telemetry.tracing is None
    assert telemetry.observers() == []
    telemetry.serve()
    await telemetry.close()


async def test_the_endpoint_tells_of_process_and_loop(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = made(enable_metrics=True)
    caplog.set_level(logging.INFO)
    logging.getLogger().addHandler(caplog.handler)
    telemetry.serve()
    url = caplog.messages[-1].removeprefix("metrics on ")
    running = asyncio.get_running_loop().create_task(telemetry.run())
    await asyncio.sleep(0.25)

    def read() -> str:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()

    text = await asyncio.to_thread(read)
    running.cancel()
    await telemetry.close()
    for name in (
        "quire_loop_lag_seconds_count",
        'process_cpu_time_seconds_total{cpu_mode="user"}',
        "process_memory_usage_bytes",
        "process_thread_count",
        "process_uptime_seconds",
        f'service_instance_id="{telemetry.instance_id}"',
        'service_name="quire-test"',
        'service_version="1.2.3"',
    ):
        assert name in text
    assert len(telemetry.observers()) == 1


async def test_traces_and_metrics_go_where_the_environment_says() -> None:
    async with receiving() as receiver:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "mine"}
        telemetry = made(env)
        telemetry.tracing.tracer.start_span("one").end()
        await telemetry.close()
        (span,) = receiver.spans
        assert (span.name, span.service) == ("one", "mine")
        assert span.resource["service.instance.id"] == telemetry.instance_id
        assert span.resource["service.namespace"] == "quire"
        names = {name for _, name in receiver.metrics}
        assert {"process.cpu.time", "quire.trace.spans"} <= names


async def test_the_flag_beats_the_environment_and_off_is_off() -> None:
    async with receiving() as receiver:
        other = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}
        telemetry = made(other, otlp_traces_endpoint=receiver.url)
        assert telemetry.metrics is None
        telemetry.tracing.tracer.start_span("one").end()
        await telemetry.close()
        assert [span.name for span in receiver.spans] == ["one"]
        off = made({"OTEL_SDK_DISABLED": "true"}, otlp_traces_endpoint=receiver.url)
        assert off.tracing is None


async def test_the_share_of_traces_that_begin_here_can_be_set() -> None:
    async with receiving() as receiver:
        telemetry = made(otlp_traces_endpoint=receiver.url, trace_sample_ratio=0.0)
        assert not telemetry.tracing.tracer.start_span("one").is_recording()
        telemetry.tracing.chosen_tracer.start_span("chosen").end()
        await telemetry.close()
        assert [span.name for span in receiver.spans] == ["chosen"]
