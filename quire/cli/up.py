"""`quire up`: the whole set on this machine, until Ctrl-C."""

import argparse
import asyncio

from quire.cli.running import with_local_set
from quire.cli.set_flags import add_set_flags, local_config
from quire.client import DEFAULT_TARGET
from quire.local import LocalSet


class Up:
    """Starts the whole set on this machine and keeps it running."""

    name = "up"
    help = "start the whole set on this machine and keep it running"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        add_set_flags(parser, port=50051)

    def run(self, args: argparse.Namespace) -> int:
        """Returns 0 after Ctrl-C or SIGTERM, when everything has ended in order."""
        config = local_config(args)

        async def serve(running: LocalSet) -> None:
            _say_how_to_talk(config.served_model_name, running)
            await running.failure()

        asyncio.run(with_local_set(config, serve, verbose=args.verbose))
        return 0


def _say_how_to_talk(model: str, running: LocalSet) -> None:
    target = "" if running.target == DEFAULT_TARGET else f" --target {running.target}"
    print(f"{model} is served at {running.target}; Ctrl-C ends it. Talk to it with:")
    print(f'  quire chat{target} --temperature 0 "What is the capital of France?"', flush=True)


COMMAND = Up()
