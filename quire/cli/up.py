"""`quire up`: the whole set on this machine, until Ctrl-C."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from quire.cli.admin_call import DEFAULT_TARGET as SCHEDULER_TARGET
from quire.cli.running import with_local_set
from quire.cli.set_flags import add_set_flags, local_config
from quire.client import DEFAULT_TARGET
from quire.local import LocalSet
from quire.local_plan import GATEWAY, dialled

_OPENAI_PORT = 30000


class Up:
    """Starts the whole set on this machine and keeps it running."""

    name = "up"
    help = "start the whole set on this machine and keep it running"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        add_set_flags(parser, port=50051)
        parser.add_argument(
            "--openai", action="store_true", help="serve OpenAI clients too, by the gateway smg"
        )
        parser.add_argument(
            "--openai-port",
            type=int,
            metavar="N",
            help=f"where; 0 is any free one; implies --openai (default: {_OPENAI_PORT})",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Returns 0 after Ctrl-C or SIGTERM, when everything has ended in order."""
        config = local_config(args)
        told = info_told(args, os.environ)
        if not told:
            config = replace(config, info_port=int(SCHEDULER_TARGET.rpartition(":")[2]))
        with_metrics = asks_for_metrics(args, os.environ)
        config = replace(config, serves_metrics=with_metrics)
        if args.openai or args.openai_port is not None:
            port = _OPENAI_PORT if args.openai_port is None else args.openai_port
            config = replace(config, openai_port=port)

        async def serve(running: LocalSet) -> None:
            _say_how_to_talk(config.served_model_name, running, told or running.info)
            if with_metrics:
                _say_where_metrics_are(running, args.metrics_host or "127.0.0.1")
            await running.failure()

        asyncio.run(with_local_set(config, serve, verbose=args.verbose))
        return 0


def info_told(args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Where the user has the scheduler tell facts about itself; "" where he left that open."""
    flags = (args.info_listen or [], args.admin_listen or [])
    variables = (environment.get(f"QUIRE_{name}_LISTEN", "") for name in ("INFO", "ADMIN"))
    for addresses in (*map(",".join, flags), *variables):
        if addresses:
            return addresses.partition(",")[0].strip()
    return ""


def asks_for_metrics(args: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the processes serve metrics."""
    said = args.enable_metrics or environment.get("QUIRE_ENABLE_METRICS", "")
    return said.lower() in ("true", "1", "yes", "on")


def _say_where_metrics_are(running: LocalSet, host: str) -> None:
    ports = [(member.name, member.metrics_port) for member in running.members]
    ours = ((name, port) for name, port in ports if name != GATEWAY)
    if not all(port for _, port in ours):
        print("Metrics: the log of each process names its URL", flush=True)
        return
    where = ", ".join(f"{name} {dialled(host, port)}" for name, port in ports if port)
    print(f"Metrics, at /metrics of each: {where}", flush=True)


def _say_how_to_talk(model: str, running: LocalSet, info: str) -> None:
    target = "" if running.target == DEFAULT_TARGET else f" --target {running.target}"
    print(f"{model} is served at {running.target}; Ctrl-C ends it. Talk to it with:")
    print(f'  quire chat{target} --temperature 0 "What is the capital of France?"')
    print("Watch it with:")
    target = "" if info == SCHEDULER_TARGET else f" --target {info}"
    print(f"  quire top{target}")
    if running.openai_url:
        print(f"OpenAI clients: base URL {running.openai_url}, model {model}, any API key")
    sys.stdout.flush()


COMMAND = Up()
