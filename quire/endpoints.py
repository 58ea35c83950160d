"""Where a call goes: one of several servers that can all answer it.

Owns the channels of a client, their order, and what is known of each connection. Knows no message.
"""

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import grpc

from quire.errors import Cancelled, InvalidRequest, QuireError, Unavailable, Unreachable
from quire.v1 import text_pb2_grpc

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Keeps what a slow reader can pile up inside the transport near 100 KB instead of 5 MB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long one attempt to connect may take before the address counts as down.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A name with several addresses: all of them are used, and asked for anew when one goes.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_UNSETTLED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_DRAINING = "DRAINING"

_ADDRESS = re.compile(
    r"(?:dns:(?://[^/\s]*/)?|ipv[46]:)?(?:\[[^\]\s]+\]|[^\s/:\[\]]+):(?P<port>[0-9]{1,5})"
    r"|unix(?:-abstract)?:\S+"
)
"""What gRPC takes; it would take more for the name of a host, and look for it for ever."""


def split_target(target: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses that `target` names, each once, in order.

    Args:
        target: one address, several joined by commas, or a sequence of them.

    Raises:
        InvalidRequest: it names none, or one is no address.
    """
    if not isinstance(target, Sequence):
        raise InvalidRequest("target", f"must name one server or more, got {target!r}")
    texts = target.split(",") if isinstance(target, str) else target
    addresses = []
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("target", f"must name one server or more, got {target!r}")
        address = _ADDRESS.fullmatch(text.strip())
        if address is None or not 0 < int(address["port"] or 1) < 2**16:
            raise InvalidRequest(
                "target", f"must be HOST:PORT or unix:///PATH, got {text.strip()!r}"
            )
        addresses.append(text.strip())
    if not addresses:
        raise InvalidRequest("target", "must name one server or more, got none")
    return tuple(dict.fromkeys(addresses))


class Endpoint:
    """One server.

    Args:
        target: its address.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self.text: Any = text_pb2_grpc.TextServiceStub(self.channel)

    @property
    def is_down(self) -> bool:
        """Whether the last attempt to connect failed, and none succeeded since."""
        state = self.channel.get_state()
        return bool(state is grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    async def connect(self, timeout_s: float | None) -> bool:
        """Waits until there is a connection, or until it is known that there can be none.

        So that, when a call fails, it is known whether the server can have seen it. The channel's
        own way to wait cannot be cancelled safely; this one asks again and again.

        Args:
            timeout_s: how long to wait at most, seconds.

        Returns:
            Whether there is one.
        """
        clock = asyncio.get_running_loop().time
        ends_at = None if timeout_s is None else clock() + timeout_s
        pause_s = _FIRST_POLL_S
        while (state := self.channel.get_state(try_to_connect=True)) in _UNSETTLED:
            if ends_at is not None and clock() >= ends_at:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_POLL_S)
        return bool(state is grpc.ChannelConnectivity.READY)


class Endpoints:
    """All servers of a client; close it in any case.

    Args:
        targets: their addresses, at least one.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._all = tuple(Endpoint(target) for target in targets)
        self._is_closed = False
        # Clients that start at once do not all begin with the same server.
        self._turns = itertools.count(random.randrange(len(self._all)))

    def in_turn(self) -> list[Endpoint]:
        """All of them in the order to try: the one whose turn it is, the next ones, those down."""
        first = next(self._turns) % len(self._all)
        order = [*self._all[first:], *self._all[:first]]
        return sorted(order, key=lambda endpoint: endpoint.is_down)

    def choose(self, tried: Collection[Endpoint]) -> Endpoint:
        """The one whose turn it is, of those not yet tried; of all if all were."""
        order = self.in_turn()
        return next((endpoint for endpoint in order if endpoint not in tried), order[0])

    def has_more(self, tried: Collection[Endpoint]) -> bool:
        """Whether one has not been tried."""
        return any(endpoint not in tried for endpoint in self._all)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Around calls: what ends because all was closed meanwhile, ends with an error.

        The channels cancel their calls then, and whoever waits for one is told that it was
        cancelled itself, which nobody did.

        Raises:
            QuireError: all was closed.
        """
        try:
            yield
        except (asyncio.CancelledError, Cancelled, grpc.aio.UsageError) as error:
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise QuireError("the client was closed meanwhile") from error

    async def close(self) -> None:
        """Ends all connections, and what still runs on them."""
        self._is_closed = True
        for endpoint in self._all:
            await endpoint.channel.close()


def may_go_elsewhere(failure: Unavailable) -> bool:
    """Whether another server may well do what this one could not."""
    return isinstance(failure, Unreachable) or failure.reason == _DRAINING
