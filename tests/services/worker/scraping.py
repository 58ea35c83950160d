"""Reads a Prometheus endpoint as Prometheus does."""

import contextlib
import http.client

from prometheus_client.parser import text_string_to_metric_families


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Every sample of the endpoint by its name and the values of its labels; blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
