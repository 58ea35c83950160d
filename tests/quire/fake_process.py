"""A service that only lives and dies: what `quire.local` sees of a real one.

    fake_process.py SERVICE [--flags of the service ...]

The environment says how it behaves, per SERVICE: `DIE_scheduler=message` ends at start with that
message, `STUBBORN_worker=1` does not mind SIGTERM. `DIE_LIST` names a file: the services in it die
too, and the file may change. Each one adds its service to the file in `ENDED` when it ends in
order, and its pid to the file in `STARTED`.
"""

import argparse
import os
import signal
import sys
import time
from concurrent import futures
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
    parser.add_argument("--listen", required=True)
    flags, others = parser.parse_known_args(sys.argv[2:])
    note("STARTED", str(os.getpid()))
    sys.stderr.write(f"{service} was given {' '.join(others)}\n")
    if message := dies(service):
        sys.exit(f"some detail\n{message}")
    server = grpc.server(futures.ThreadPoolExecutor(2))
    serve(server, service, flags.listen)
    while signal.sigwait(SIGNALS) and f"STUBBORN_{service}" in os.environ:
        pass
    server.stop(None)
    note("ENDED", service)


def serve(server: grpc.Server, service: str, listen: str) -> None:
    """Serves health."""
    states = health.HealthServicer()
    serving = health_pb2.HealthCheckResponse.SERVING
    states.set("", serving)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    server.add_insecure_port(listen)
    server.start()
    if service == "worker":
        socket_of(listen).with_name("worker-is-here").touch()
    if service == "scheduler":
        worker = socket_of(listen).with_name("worker-is-here")
        while not worker.exists() and not signal.sigpending() & SIGNALS:
            time.sleep(0.02)
    states.set(SERVICES[service], serving)


def socket_of(target: str) -> Path:
    """The file of a socket's address."""
    return Path(target.removeprefix("unix://"))


if __name__ == "__main__":
    main()
