"""A service that only lives and dies: what `quire.local` sees of a real one.

    fake_process.py NAME [--flags of the service ...]

The environment says how it behaves, per NAME: `DIE_scheduler=message` ends at start with that
message, `STUBBORN_worker=1` does not mind SIGTERM. Each one adds its name to the file in `ENDED`
when it ends in order, and its pid to the file in `STARTED`.
"""

import argparse
import os
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICES = {"scheduler": "quire.v1.TokenService", "tokenizer": "quire.v1.TextService"}


def note(variable: str, line: str) -> None:
    """Adds a line to the file that a variable names."""
    if variable in os.environ:
        with Path(os.environ[variable]).open("a") as file:
            file.write(f"{line}\n")


def main() -> None:
    """Serves health until SIGTERM."""
    name = sys.argv[1]
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    flags, others = parser.parse_known_args(sys.argv[2:])
    note("STARTED", str(os.getpid()))
    sys.stderr.write(f"{name} was given {' '.join(others)}\n")
    if message := os.environ.get(f"DIE_{name}"):
        sys.exit(f"some detail\n{message}")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    server = grpc.server(futures.ThreadPoolExecutor(2))
    states = health.HealthServicer()
    states.set("", health_pb2.HealthCheckResponse.SERVING)
    if flags.listen:
        states.set(SERVICES[name], health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(states, server)
        server.add_insecure_port(flags.listen)
        server.start()
    while not asked.wait() or f"STUBBORN_{name}" in os.environ:
        asked.clear()
    server.stop(None)
    note("ENDED", name)


if __name__ == "__main__":
    main()
