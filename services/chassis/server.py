"""A gRPC server with health and reflection, and the order in which it stops.

Health names: `""` is "the process is up and, while it has work, gets on with it"; the name of a
service is "it can serve now".
"""

import errno
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.chassis.addresses import LONGEST_SOCKET_PATH, UNIX, split_host_port
from services.chassis.channel import SERVER_OPTIONS
from services.chassis.interceptors import ErrorInterceptor
from services.chassis.process import StartupError
from services.chassis.reflection import enable_reflection

_WHY: Mapping[int, str] = MappingProxyType(
    {
        errno.EADDRINUSE: "it is in use; take another port, or end the process that has it",
        errno.EACCES: "this user may not bind it; take a port from 1024 on",
        errno.EADDRNOTAVAIL: "it is no address of this machine",
    }
)


class GrpcServer:
    """One listening server.

    Use: make it, register servicers on `.grpc`, `start()`, `set_ready(True)` when the service can
    serve, and at the end `set_ready(False)`, wait until the work is done, `stop()`.

    Args:
        service_names: full names of the services whose readiness `set_ready` tells, e.g.
            `quire.v1.TextService`.
        always_ready: full names of services that can serve as soon as the process is up.
        observers: interceptors that see each call as its caller does.
    """

    def __init__(
        self,
        service_names: Iterable[str],
        always_ready: Iterable[str] = (),
        observers: Iterable[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        interceptors = [*observers, ErrorInterceptor()]
        self.grpc = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._names = tuple(service_names)
        self._always_ready = tuple(always_ready)
        self._health = health.aio.HealthServicer()
        self._sockets: list[Path] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        enable_reflection((*self._names, *self._always_ready, health.SERVICE_NAME), self.grpc)

    async def start(self, listen: Iterable[str]) -> list[str]:
        """Binds and serves.

        Args:
            listen: addresses, `host:port` (port 0: any free one) or `unix:///path`.

        Returns:
            The addresses bound, with real ports.

        Raises:
            StartupError: an address cannot be bound.
        """
        try:
            bound = [self._bind(address) for address in listen]
        except StartupError:
            await self.stop()
            raise
        await self.grpc.start()
        for name in ("", *self._always_ready):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        return bound

    async def set_ready(self, ready: bool) -> None:
        """Sets the health of every service name."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._names:
            await self._health.set(name, status)

    async def set_alive(self, alive: bool) -> None:
        """Sets the health of the process, name `""`: False where only a restart would mend it."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if alive
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await self._health.set("", status)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Closes the listener, gives live calls `grace_s` seconds, removes socket files.

        May be called again, and on a server that never started.
        """
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def _bind(self, address: str) -> str:
        if address.startswith(UNIX):
            path = Path(address.removeprefix(UNIX))
            _make_room(path)
            self._add_port(address)
            self._sockets.append(path)
            return address
        parts = split_host_port(address)
        if parts is None:
            raise StartupError(
                f"listen: must be host:port with a port of 0 to 65535, or unix:///path: {address!r}"
            )
        _check_free(address, *parts)
        return f"{address.rpartition(':')[0]}:{self._add_port(address)}"

    def _add_port(self, address: str) -> int:
        try:
            return self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(
                f"listen: cannot bind {address}: in use, not allowed, or no address of this machine"
            ) from error


def _check_free(address: str, host: str, port: int) -> None:
    """Binds for a moment: gRPC does not say why it cannot, and writes lines of its own."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"listen: cannot bind {address}: the host is not known") from error
    reasons = []
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            reasons.append(_WHY.get(error.errno or 0) or error.strerror or str(error))
        else:
            return
    raise StartupError(f"listen: cannot bind {address}: {reasons[0]}")


def _make_room(path: Path) -> None:
    """Makes the folder of a socket, and removes what a dead process left at its path."""
    if not path.is_absolute():
        raise StartupError(f"listen: socket path must be absolute: {UNIX}{path}")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise StartupError(
            f"listen: socket path is longer than {LONGEST_SOCKET_PATH} bytes: {path}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"listen: cannot make the folder {path.parent}: {error.strerror}"
        ) from error
    if not os.access(path.parent, os.W_OK):
        raise StartupError(f"listen: cannot write into the folder {path.parent}")
    try:
        if path.is_socket() and not _answers(path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"listen: cannot use {path}: {error.strerror}") from error
    if path.exists():
        taken = "another process listens there" if path.is_socket() else "it is not a socket"
        raise StartupError(f"listen: cannot bind {UNIX}{path}: {taken}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog would block, and is an answer
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True
        except ConnectionRefusedError:
            return False
    return True
