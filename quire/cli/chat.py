"""`quire chat`: one question, or a conversation of many turns."""

import argparse
import asyncio
import readline
import sys

from quire.answers import ChatMessage
from quire.cli.command import CommandError, UsageError
from quire.cli.sampling import add_request_flags, as_json, request_of
from quire.cli.terminal import read_stdin, stream_answer, tell_if_it_waits
from quire.cli.tracing import traced
from quire.client import AsyncClient
from quire.errors import QuireError
from quire.params import SamplingParams
from quire.request_options import CallOptions


class Chat:
    """Talks with the model."""

    name = "chat"
    help = "talk with the model, one question or many turns"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "prompt",
            nargs="*",
            help="one question; - or a pipe: all of standard input is one; else a conversation",
        )
        parser.add_argument("--system", metavar="TEXT", help="the system message")
        add_request_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one answer, or as many as the user asks for."""
        params, options = request_of(args)
        system = [] if args.system is None else [ChatMessage(role="system", content=args.system)]
        if args.prompt or not sys.stdin.isatty():
            typed = " ".join(args.prompt)
            question = typed if args.prompt and typed != "-" else read_stdin()
            if not question.strip():
                raise UsageError("quire chat: the question is empty (see quire chat --help)")
            with traced(args):
                asyncio.run(_answer_once(args, params, options, [*system, _asked(question)]))
            return 0
        if args.json:
            raise UsageError("quire chat: --json needs a question (see quire chat --help)")
        with traced(args):
            _converse(args, params, options, system)
        return 0


async def _answer_once(
    args: argparse.Namespace,
    params: SamplingParams,
    options: CallOptions,
    messages: list[ChatMessage],
) -> None:
    async with AsyncClient(args.target) as client:
        await tell_if_it_waits(client)
        if args.json:
            print(as_json(await client.complete_chat(messages, params, **options)))
        else:
            await stream_answer(client.chat(messages, params, **options), [])


def _asked(question: str) -> ChatMessage:
    return ChatMessage(role="user", content=question)


def _converse(
    args: argparse.Namespace,
    params: SamplingParams,
    options: CallOptions,
    system: list[ChatMessage],
) -> None:
    readline.parse_and_bind("set bell-style none")
    # One loop for all turns, but none running while the user types: Ctrl-C then reaches input().
    with asyncio.Runner() as runner:
        client = AsyncClient(args.target)
        runner.run(client.__aenter__())
        try:
            info = runner.run(client.info())
            if not info.has_chat_template:
                raise CommandError(f"{info.model} has no chat template; use: quire generate")
            print(f"{info.model} at {args.target}. Ctrl-C stops an answer, Ctrl-D ends.")
            conversation = _Conversation(runner, client, params, options, system)
            while (question := _typed()) is not None:
                conversation.turn(question)
        finally:
            runner.run(client.__aexit__(None, None, None))


class _Conversation:
    """What has been said, and who goes on with it."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: AsyncClient,
        params: SamplingParams,
        options: CallOptions,
        system: list[ChatMessage],
    ) -> None:
        self._runner = runner
        self._client = client
        self._params = params
        self._options = options
        self._said = list(system)

    def turn(self, question: str) -> None:
        """Prints the answer and remembers it; an answer cut short is kept as far as it came."""
        asked = [*self._said, _asked(question)]
        pieces: list[str] = []
        answer = self._client.chat(asked, self._params, **self._options)
        try:
            self._runner.run(stream_answer(answer, pieces))
        except KeyboardInterrupt:
            print("(stopped)")
        except QuireError as error:
            print(f"quire: {error.message}", file=sys.stderr)
        if any(pieces):
            self._said = [*asked, ChatMessage(role="assistant", content="".join(pieces))]


def _typed() -> str | None:
    """What the user types, None at the end of input."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            return line


COMMAND = Chat()
