"""`quire demo`: the whole set up, one streamed answer, everything down again."""

import argparse
import asyncio
import contextlib
import signal
import sys
import time

from quire.cli.running import with_local_set
from quire.cli.set_flags import add_set_flags, local_config
from quire.client import AsyncClient
from quire.local import LocalSet
from quire.params import SamplingParams

_QUESTION = "What is the capital of France?"


class Demo:
    """Starts the set, asks one question, stops the set."""

    name = "demo"
    help = "start the set, ask one question, stop it"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        add_set_flags(parser, port=0)

    def run(self, args: argparse.Namespace) -> int:
        """Returns 0 if an answer came and nothing was left behind."""
        started = time.monotonic()
        done = asyncio.run(with_local_set(local_config(args), _ask, verbose=args.verbose))
        if not done:
            return 128 + signal.SIGINT
        print(f"all processes ended; {time.monotonic() - started:.1f} s in all")
        return 0


async def _ask(running: LocalSet) -> None:
    print(f"\n> {_QUESTION}")
    asked = time.monotonic()
    first = tokens = 0.0
    params = SamplingParams(temperature=0, max_tokens=64)
    async with AsyncClient(running.target) as client:
        answer = client.chat([{"role": "user", "content": _QUESTION}], params)
        async with contextlib.aclosing(answer):
            async for delta in answer:
                if delta.token_ids and not first:
                    first = time.monotonic()
                tokens += len(delta.token_ids)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    end = time.monotonic()
    first = first or end
    print(
        f"\n\nfirst token after {(first - asked) * 1000:.0f} ms, "
        f"{tokens:.0f} tokens in {(end - asked) * 1000:.0f} ms"
    )


COMMAND = Demo()
