"""`quire generate`: completes a prompt."""

import argparse
import asyncio
import shlex
from typing import Any

from quire.cli.command import UsageError
from quire.cli.sampling import add_request_flags, as_json, request_of
from quire.cli.terminal import read_stdin, stream_answer, tell_if_it_waits
from quire.cli.tracing import traced
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
        parser.add_argument("loose", nargs="*", action=_Loose, help=argparse.SUPPRESS)
        add_request_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints the completion."""
        with traced(args):
            asyncio.run(_generate(args))
        return 0


class _Loose(argparse.Action):
    """Says where text that stands alone belongs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values:
            text = shlex.quote(" ".join(values))
            raise UsageError(f"{parser.prog}: the text goes after --prompt: --prompt {text}")


async def _generate(args: argparse.Namespace) -> None:
    params, options = request_of(args)
    prompt = read_stdin() if args.prompt == "-" else args.prompt
    async with AsyncClient(args.target) as client:
        await tell_if_it_waits(client)
        if args.json:
            print(as_json(await client.complete(prompt, params, **options)))
        else:
            await stream_answer(client.generate(prompt, params, **options), [])


COMMAND = Generate()
