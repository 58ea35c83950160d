"""What the commands of `quire admin` share: whom to ask, in whose name, and the call."""

import argparse
import contextlib
import getpass
import os
import socket
from collections.abc import Iterator

import grpc

from quire.cli.command import CommandError
from quire.errors import Unreachable
from quire.statuses import error_of
from quire.v1 import admin_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50052"
"""Where a scheduler listens unless it was told otherwise."""


_WHERE = (
    "the scheduler listens where its --listen or --admin-listen says, and quire up takes "
    f"--admin-listen {DEFAULT_TARGET}"
)
_LARGEST = 2**32 - 1


def natural(text: str) -> int:
    """A whole number as argparse reads it."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LARGEST):
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {_LARGEST}, got {text!r}"
        )
    return int(text)


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, `--timeout` and `--json`."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="TARGET",
        help="HOST:PORT or unix:///PATH of the scheduler, or its --admin-listen "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="prints one JSON object")


def add_origin_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--actor` and `--reason`."""
    parser.add_argument(
        "--actor", metavar="WHO", help="who makes the change, for its log (default: user@host)"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for its log")


def actor(args: argparse.Namespace) -> str:
    """Who makes a change: as given, else who runs this on which host."""
    if args.actor is not None:
        return str(args.actor)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@contextlib.contextmanager
def admin_service(args: argparse.Namespace) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """The service at `--target`; what goes wrong in the block is one of `quire.errors`."""
    with grpc.insecure_channel(args.target) as channel:
        try:
            yield admin_pb2_grpc.AdminServiceStub(channel)
        except grpc.RpcError as error:
            problem = error_of(error, args.target, service="admin service")
            if isinstance(problem, Unreachable) or error.code() is grpc.StatusCode.UNIMPLEMENTED:
                # Most likely a set whose scheduler listens for its own processes, or tells others
                # facts alone.
                raise CommandError(f"{problem.message}; {_WHERE}") from error
            raise problem from error
