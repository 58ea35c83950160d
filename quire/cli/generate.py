"""`quire generate`: completes a prompt."""

import argparse
import asyncio

from quire.cli.sampling import add_request_flags, as_json, sampling_params
from quire.cli.terminal import read_stdin, stream_answer
from quire.client import AsyncClient


class Generate:
    """Completes a prompt, streaming to the terminal."""

    name = "generate"
    help = "complete a prompt"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--prompt",
            required=True,
            metavar="TEXT",
            help="what to complete; - is standard input",
        )
        add_request_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints the completion."""
        asyncio.run(_generate(args))
        return 0


async def _generate(args: argparse.Namespace) -> None:
    params = sampling_params(args)
    prompt = read_stdin() if args.prompt == "-" else args.prompt
    async with AsyncClient(args.target) as client:
        if args.json:
            print(as_json(await client.complete(prompt, params, deadline_s=args.deadline)))
        else:
            await stream_answer(client.generate(prompt, params, deadline_s=args.deadline), [])


COMMAND = Generate()
