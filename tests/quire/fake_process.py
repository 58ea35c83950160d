"""A service that only lives and dies: what `quire.local` sees of a real one.

    fake_process.py SERVICE [--flags of the service ...]

The environment says how it behaves, per SERVICE: `DIE_scheduler=message` ends at start with that
message, `STUBBORN_worker=1` does not mind SIGTERM. `DIE_LIST` names a file: the services in it die
too, and the file may change. Each one adds its service to the file in `ENDED` when it ends in
order, and its pid to the file in `STARTED`. The gateway speaks HTTP, and is ready at the second
time of asking.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICES = {
    "scheduler": "quire.v1.TokenService",
    "tokenizer": "quire.v1.TextService",
    "worker": "quire.v1.WorkerLinkService",
}
SIGNALS = {signal.SIGTERM, signal.SIGINT}


def note(variable: str, line: str) -> None:
    """Adds a line to the file that a variable names."""
    if variable in os.environ:
        with Path(os.environ[variable]).open("a") as file:
            file.write(f"{line}\n")


def dies(service: str) -> str:
    """What it dies of, or ""."""
    dying = os.environ.get("DIE_LIST", "")
    if dying and Path(dying).exists() and service in Path(dying).read_text().split():
        return "it is on the list"
    return os.environ.get(f"DIE_{service}", "")


def main() -> None:
    """Serves health until SIGTERM; the scheduler is ready once a worker is there."""
    # Blocked before there are threads, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    service = sys.argv[1]
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", action="append")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    flags, others = parser.parse_known_args(sys.argv[2:])
    note("STARTED", str(os.getpid()))
    sys.stderr.write(f"{service} was given {' '.join(others)}\n")
    if message := dies(service):
        sys.exit(f"some detail\n{message}")
    with (
        gateway(flags.host, flags.port)
        if service == "gateway"
        else health_of(service, flags.listen)
    ):
        while signal.sigwait(SIGNALS) and f"STUBBORN_{service}" in os.environ:
            pass
    note("ENDED", service)


@contextlib.contextmanager
def gateway(host: str, port: int) -> Iterator[None]:
    """Answers the question whether it is ready."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            ready = self.path == "/readiness" and len(asked) > 1
            self.send_response(200 if ready else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, port), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield
        http.shutdown()


@contextlib.contextmanager
def health_of(service: str, listen: Sequence[str]) -> Iterator[None]:
    """Serves health."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    states = health.HealthServicer()
    serving = health_pb2.HealthCheckResponse.SERVING
    states.set("", serving)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    for address in listen:
        server.add_insecure_port(address)
    server.start()
    if service == "worker":
        socket_of(listen[0]).with_name("worker-is-here").touch()
    if service == "scheduler":
        worker = socket_of(listen[0]).with_name("worker-is-here")
        while not worker.exists() and not signal.sigpending() & SIGNALS:
            time.sleep(0.02)
    states.set(SERVICES[service], serving)
    yield
    server.stop(None)


def socket_of(target: str) -> Path:
    """The file of a socket's address."""
    return Path(target.removeprefix("unix://"))


if __name__ == "__main__":
    main()
