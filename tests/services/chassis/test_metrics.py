"""Histograms, values of a loop, the endpoint and the push."""

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from services.chassis.metrics import OTHER, Histogram, LoopValue, Metrics, watch_lag
from services.chassis.process import StartupError
from tests.fakes.otlp_receiver import dead_url, receiving, silent_url

RESOURCE = Resource.create({"service.name": "quire-test", "service.instance.id": "one"})


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics(RESOURCE, prometheus=True, push_to=None)
    yield made
    made.close()


def scraped(port: int) -> dict[str, float]:
    """The samples of an endpoint, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_values_fall_into_the_bucket_whose_bound_they_do_not_exceed() -> None:
    histogram = Histogram("a.b", unit="s", description="d", bounds=(1.0, 2.0), labels=("kind",))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.record(value, "x", times=times)
    histogram.record(1.0, "y")
    first, second = histogram.metric().data.data_points
    assert dict(first.attributes) == {"kind": "x"}
    assert list(first.bucket_counts) == [3, 1, 3]
    assert (first.count, first.sum) == (7, 31.0)
    assert list(first.explicit_bounds) == [1.0, 2.0]
    assert (second.count, dict(second.attributes)) == (1, {"kind": "y"})


def test_label_sets_beyond_the_bound_are_counted_together() -> None:
    histogram = Histogram("a", unit="", description="d", bounds=(1.0,), labels=("a", "b"))
    for number in range(1000):
        histogram.record(0.5, str(number), "x")
    points = histogram.metric().data.data_points
    assert len(points) == 257
    assert {tuple(point.attributes.values()): point.count for point in points}[OTHER, OTHER] == 744
    assert sum(point.count for point in points) == 1000


def test_prometheus_text_has_all_kinds_and_what_is_made_of_them(metrics: Metrics) -> None:
    histogram = metrics.histogram("quire.wait", "d", bounds=(0.5, 1.0), labels=("kind",))
    empty = metrics.histogram("quire.empty", "d", bounds=(0.5,))
    metrics.counter("quire.tokens", "d", lambda: [(3.0, {"kind": "in"})])
    metrics.gauge("quire.live", "d", lambda: [(2.0, {})])

    def also(families: Mapping[str, Metric]) -> Iterator[Metric]:
        (sample,) = families["quire_live"].samples
        yield GaugeMetricFamily("other:live", "d", value=sample.value)

    port = metrics.serve("127.0.0.1", 0, also)
    histogram.record(0.7, "x", times=2)
    found = scraped(port)
    assert found['quire_wait_seconds_bucket{kind="x",le="0.5"}'] == 0
    assert found['quire_wait_seconds_bucket{kind="x",le="1.0"}'] == 2
    assert found['quire_wait_seconds_bucket{kind="x",le="+Inf"}'] == 2
    assert found['quire_wait_seconds_sum{kind="x"}'] == 1.4
    assert found['quire_tokens_total{kind="in"}'] == 3
    assert found["quire_live"] == found["other:live"] == 2
    assert found["quire_empty_seconds_count"] == 0, "without labels a series is there at once"
    empty.record(0.1)
    histogram.record(0.1, "x")
    again = scraped(port)
    assert again['quire_wait_seconds_count{kind="x"}'] == 3
    assert again["quire_empty_seconds_count"] == 1


def test_a_port_in_use_is_told_with_the_setting_s_name(metrics: Metrics) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            metrics.serve("127.0.0.1", port)
    assert str(caught.value) == (
        f"--metrics-port: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    metrics.gauge("quire.live", "d", lambda: [(2.0, {})])
    assert scraped(metrics.serve("127.0.0.1", 0))["quire_live"] == 2


async def test_a_value_of_the_loop_is_read_on_the_loop_and_once_a_collection() -> None:
    threads = []

    def read() -> int:
        threads.append(threading.current_thread())
        return len(threads)

    value = LoopValue(asyncio.get_running_loop(), read, at_first=0)
    assert await asyncio.to_thread(lambda: [value.get() for _ in range(3)]) == [1, 1, 1]
    assert threads == [threading.main_thread()]


async def test_the_readings_of_one_collection_wait_once_for_a_blocked_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.chassis.metrics._LOOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("services.chassis.metrics._FRESH_S", 60.0)
    asked: list[int] = []
    loop = asyncio.get_running_loop()
    value = LoopValue(loop, lambda: asked.append(1), at_first=None)
    thread = threading.Thread(target=lambda: [value.get() for _ in range(40)])
    thread.start()
    thread.join()  # the loop stands still
    await asyncio.sleep(0)
    assert len(asked) == 1


async def test_a_blocked_loop_does_not_block_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.chassis.metrics._LOOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("services.chassis.metrics._FRESH_S", 0.0)
    values = iter(range(1, 9))
    value = LoopValue(asyncio.get_running_loop(), lambda: next(values), at_first=0)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(value.get()))
    thread.start()
    time.sleep(0.2)  # noqa: ASYNC251 - the loop stands still
    thread.join()
    assert got == [0]
    await asyncio.sleep(0)  # the question that came too late is answered
    assert await asyncio.to_thread(value.get) == 2


def test_the_value_of_a_closed_loop_is_the_last_one() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert LoopValue(loop, lambda: 1, at_first=7).get() == 7


async def test_what_reading_raises_is_raised_where_it_was_asked_for() -> None:
    value = LoopValue(asyncio.get_running_loop(), lambda: 1 // 0, at_first=0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(value.get)


async def test_a_blocked_loop_shows_as_lag() -> None:
    lag = Histogram("lag", unit="s", description="d", bounds=(0.001, 0.2), labels=())
    watch = asyncio.get_running_loop().create_task(watch_lag(lag))
    await asyncio.sleep(0.01)
    time.sleep(0.4)  # noqa: ASYNC251 - the loop stands still
    await asyncio.sleep(0.15)
    watch.cancel()
    (point,) = lag.metric().data.data_points
    assert point.bucket_counts[-1] == 1


async def test_what_is_left_is_pushed_at_the_end() -> None:
    async with receiving() as receiver:
        metrics = Metrics(RESOURCE, prometheus=False, push_to=receiver.url)
        histogram = metrics.histogram("quire.wait", "d", bounds=(0.5,), labels=("kind",))
        metrics.counter("quire.tokens", "d", lambda: [(3.0, {"kind": "in"})])
        histogram.record(0.25, "x", times=4)
        await asyncio.to_thread(metrics.close)
    got = receiver.metrics["one", "quire.wait"]
    assert (got.unit, got.points) == ("s", {frozenset({("kind", "x")}): (4, 1.0)})
    assert got.resource["service.name"] == "quire-test"
    assert receiver.metrics["one", "quire.tokens"].points == {frozenset({("kind", "in")}): 3.0}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("url", [dead_url, silent_url])
def test_a_receiver_that_is_away_does_not_keep_the_process(url: object) -> None:
    with url() as address:
        metrics = Metrics(RESOURCE, prometheus=False, push_to=address)
        metrics.histogram("quire.wait", "d", bounds=(0.5,)).record(1.0)
        metrics.close()
