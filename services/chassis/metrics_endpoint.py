"""The HTTP endpoint that Prometheus scrapes: few connections at a time, none of them for long.

Owns its threads and its socket. What is told is the registry's.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.registry import CollectorRegistry

log = logging.getLogger(__name__)

_MOST_SCRAPES = 16
_TIMEOUT_S = 5.0


class MetricsEndpoint:
    """Serves a registry in Prometheus' text format until `close`.

    Args:
        host: to listen on.
        port: to listen on, 0 for any free one.
        registry: what to tell.

    Raises:
        OSError: it cannot be bound.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        server_class = _Server6 if ":" in host else _Server
        self._server = server_class((host, port), _Scrape)
        self._server.set_app(_text_of(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Ends it; scrapes under way are left to themselves. Blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _text_of(registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    app: Any = prometheus_client.make_wsgi_app(registry)

    def call(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        # In OpenMetrics the library writes `a:b` as `a_b` (prometheus/client_python#1177), so
        # whatever is asked for, the older text format is given, which every Prometheus reads.
        answer: Iterable[bytes] = app({**environ, "HTTP_ACCEPT": ""}, start)
        return answer

    return call


class _Scrape(WSGIRequestHandler):
    """One connection; one that says nothing for some seconds is closed."""

    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing of it goes into the log."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and so many at most; further ones are closed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[_Scrape]) -> None:
        self._places = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s was cut", client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6
