"""A bad network between a client and a server: pauses, cuts, and drips byte by byte.

async with Proxy.between(listen="unix:///tmp/p.sock", target=stack.text_target) as proxy:
    channel = grpc.aio.insecure_channel(proxy.address)
    proxy.pause()
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

_CHUNK = 65536
_UNIX = "unix://"

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Passes bytes on in both directions, as it is told. Use `between`.

    Attributes:
        address: where clients dial.
        drip_s: pause after each byte from the server to the client; None passes them on at once.
        accepted: connections so far.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.drip_s: float | None = None
        self.accepted = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def between(cls, *, listen: str, target: str) -> AsyncIterator["Proxy"]:
        """Listens until the block is left; both are `unix:///path` or `host:port`, port 0: any."""
        proxy = cls(target)
        if listen.startswith(_UNIX):
            server = await asyncio.start_unix_server(proxy._serve, listen.removeprefix(_UNIX))
            proxy.address = listen
        else:
            host, _, port = listen.rpartition(":")
            server = await asyncio.start_server(proxy._serve, host, int(port))
            proxy.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            server.close()
            proxy.go_on()
            proxy.cut()
            _remove_socket(listen)

    def pause(self) -> None:
        """Nothing passes in either direction; connections stay."""
        self._open.clear()

    def go_on(self) -> None:
        """Everything passes again, what was held back first."""
        self._open.set()

    def cut(self) -> None:
        """Ends all connections at once; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        server_reader, server_writer = await self._dial()
        writers = {writer, server_writer}
        self._writers |= writers
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, server_writer, drips=False))
                tasks.create_task(self._pass(server_reader, writer, drips=True))
        finally:
            self._writers -= writers
            for each in writers:
                each.close()

    async def _dial(self) -> _Streams:
        if self._target.startswith(_UNIX):
            return await asyncio.open_unix_connection(self._target.removeprefix(_UNIX))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, drips: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                if not drips or self.drip_s is None:
                    writer.write(data)
                    await writer.drain()
                    continue
                for place in range(len(data)):
                    await self._open.wait()
                    writer.write(data[place : place + 1])
                    await writer.drain()
                    await asyncio.sleep(self.drip_s)
        writer.close()


def _remove_socket(address: str) -> None:
    if address.startswith(_UNIX):
        Path(address.removeprefix(_UNIX)).unlink(missing_ok=True)
