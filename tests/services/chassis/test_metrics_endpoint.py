"""The endpoint under connections that are not ordinary scrapes."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

from services.chassis import metrics_endpoint
from services.chassis.metrics_endpoint import MetricsEndpoint


class One:
    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("one:two", "A name with a colon.", 1)


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    registry = CollectorRegistry()
    registry.register(One())
    endpoint = MetricsEndpoint("127.0.0.1", 0, registry)
    yield endpoint
    endpoint.close()


def scrape(endpoint: MetricsEndpoint, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}/metrics")
    request.add_header("Accept", accept)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_names_keep_their_colons(endpoint: MetricsEndpoint, accept: str) -> None:
    assert "one:two 1.0" in scrape(endpoint, accept)


def test_connections_that_say_nothing_are_few_and_do_not_stay(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_endpoint._Scrape, "timeout", 0.3)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
            for _ in range(60)
        ]
        for connection in connections:
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError):  # it may be closed already
                connection.sendall(b"GET /")
        assert threading.active_count() - before <= 16
        for connection in connections:  # each is closed by the other side
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    assert "one:two 1.0" in scrape(endpoint)


def test_an_address_of_ipv6() -> None:
    with contextlib.suppress(OSError):  # where the machine has none
        endpoint = MetricsEndpoint("::1", 0, CollectorRegistry())
        assert endpoint.port > 0
        endpoint.close()


def test_it_ends_beside_a_connection_that_says_nothing() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, CollectorRegistry())
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.sendall(b"GET /")
        endpoint.close()
