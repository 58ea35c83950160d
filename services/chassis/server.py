"""A gRPC server with health and reflection, and the order in which it stops.

Health names: `""` is "the process is up"; the name of a service is "it can serve now".
"""

import os
from collections.abc import Iterable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.chassis.channel import SERVER_OPTIONS
from services.chassis.interceptors import ErrorInterceptor
from services.chassis.process import StartupError

_UNIX = "unix://"


class GrpcServer:
    """One listening server.

    Use: make it, register servicers on `.grpc`, `start()`, `set_ready(True)` when the service can
    serve, and at the end `set_ready(False)`, wait until the work is done, `stop()`.

    Args:
        service_names: full names of the services it offers, e.g. `quire.v1.TextService`.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._names = tuple(service_names)
        self._health = health.aio.HealthServicer()
        self._sockets: list[Path] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )

    async def start(self, listen: Iterable[str]) -> list[str]:
        """Binds and serves.

        Args:
            listen: addresses, `host:port` (port 0: any free one) or `unix:///path`.

        Returns:
            The addresses bound, with real ports.

        Raises:
            StartupError: an address cannot be bound.
        """
        bound = [self._bind(address) for address in listen]
        await self.grpc.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
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

    async def stop(self, grace_s: float = 0.5) -> None:
        """Closes the listener, gives live calls `grace_s` seconds, removes socket files."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def _bind(self, address: str) -> str:
        if address.startswith(_UNIX):
            path = Path(address.removeprefix(_UNIX))
            if len(os.fsencode(path)) > 107:
                raise StartupError(f"listen: socket path is longer than 107 bytes: {path}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._sockets.append(path)
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(f"listen: cannot bind {address}: in use or not allowed") from error
        if address.startswith(_UNIX):
            return address
        return f"{address.rsplit(':', 1)[0]}:{port}"
