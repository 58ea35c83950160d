"""What an address looks like, checked before gRPC sees it.

gRPC itself takes a missing port for 443, a large one modulo 65536, and looks names up that are
none. Knows nothing of servers or channels.
"""

UNIX = "unix://"
LONGEST_SOCKET_PATH = 107
"""Bytes; the system has no room for more."""

TARGET_RULE = "must be host:port with a port of 1 to 65535, or unix:///path"


def split_host_port(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port`; None if it is not one. An IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = bool(bare) and bare.isprintable() and not set(bare) & set(" /[]@?#,")
    if not is_host or (":" in bare and bare == host):
        return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        return None
    return bare, int(port)


def is_target(address: str) -> bool:
    """Whether `address` is one to dial: `host:port`, or `unix:///path` with an absolute path."""
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        return (
            path.startswith("/") and len(path.encode()) <= LONGEST_SOCKET_PATH and "\0" not in path
        )
    parts = split_host_port(address)
    return parts is not None and parts[1] > 0
