"""The dashboard drawn without Grafana asks what Grafana asks, and draws what it is told."""

import contextlib
import http.server
import json
import math
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.dashboard import DASHBOARD, main, panels, resolved, shown

BOARD = json.loads(DASHBOARD.read_text())


@contextlib.contextmanager
def prometheus(values: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Answers every question with one series of these values; gives its URL and the questions."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parameters = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            asked.extend(parameters["query"])
            begin = float(parameters["start"][0])
            points = [[begin + index, text] for index, text in enumerate(values)]
            result = [{"metric": {"class": "batch"}, "values": points}] if values else []
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": {"result": result}}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("values", [["1", "NaN", "0.5"], ["NaN", "NaN"], []])
def test_every_panel_is_asked_and_drawn_whatever_comes(tmp_path: Path, values: list[str]) -> None:
    out = tmp_path / "d.png"
    with prometheus(values) as (url, asked):
        assert main(["--prometheus", url, "--out", str(out), "--dpi", "40"]) == 0
    wanted = [query.expression for panel in panels(BOARD, "20s") for query in panel.queries]
    assert asked == wanted
    assert not [expression for expression in asked if "$" in expression]
    with Image.open(out) as drawn:
        assert drawn.size[0] == 24 * 0.5 * 40
        assert len(drawn.convert("RGB").getcolors(10_000)) > 20


def test_variables_are_everything_they_may_be() -> None:
    asked = resolved('rate(a{instance=~"$instance",m=~"$model"}[$__rate_interval])', "30s")
    assert asked == 'rate(a{instance=~".*",m=~".*"}[30s])'


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *((0.25, "s", "250 ms"), (2.5, "s", "2.5 s"), (0, "s", "0 s")),
        *((0.123, "percentunit", "12.3 %"), (3 * 2**20, "bytes", "3 MiB"), (2, "reqps", "2 req/s")),
        *((12_345, "short", "12.3 k"), (7, "none", "7")),
    ],
)
def test_values_have_their_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_thresholds_begin_below_everything() -> None:
    for panel in panels(BOARD, "20s"):
        if panel.kind != "row":
            assert panel.thresholds[0][0] == -math.inf, panel.title
