"""`quire health`: asks a service whether it can serve. Starts fast: health checks run it often."""

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.cli.command import EXIT_FAILED, CommandError
from quire.statuses import error_of


class Health:
    """Asks a service whether it can serve."""

    name = "health"
    help = "ask a service whether it can serve"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "target",
            metavar="TARGET",
            help="HOST:PORT or unix:///PATH of a tokenizer, scheduler or worker",
        )
        parser.add_argument(
            "--service",
            default="",
            metavar="NAME",
            help="e.g. quire.v1.TextService; absent: whether the process is up",
        )
        parser.add_argument(
            "--timeout", type=float, default=3.0, metavar="SECONDS", help="(default: %(default)s)"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Prints the state and returns 0 if it is SERVING."""
        request = health_pb2.HealthCheckRequest(service=args.service)
        with grpc.insecure_channel(args.target) as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=args.timeout)
            except grpc.RpcError as error:
                raise CommandError(_problem(error, args)) from error
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        print(state)
        return 0 if state == "SERVING" else EXIT_FAILED


def _problem(error: grpc.RpcError, args: argparse.Namespace) -> str:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return f"{args.target} has no service {args.service!r}"
    return error_of(error, args.target, service="health service").message


COMMAND = Health()
