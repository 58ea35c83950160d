"""Client channels and the gRPC arguments both ends must agree on.

Owns the table of C-core arguments; sources: gRPC core's `grpc_types.h` and its keepalive guide.
"""

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message on any hop, both directions, both ends."""

_KEEPALIVE_MS = 20_000

_COMMON: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a ping has a minute, that of keepalive too
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON,
    # The default lets a client ping once in five minutes, and cuts it off after two more.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Two servers on one port would share its traffic in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
]

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON,
    # Keeps what a stalled reader can pile up inside the transport near 100 KB instead of 5 MB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def open_channel(target: str) -> grpc.aio.Channel:
    """A channel to a service inside the set: `host:port` or `unix:///path`. Close it when done."""
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
