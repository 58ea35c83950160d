"""`quire admin pin`, `quire admin unpin` and `quire admin pins`."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from quire.cli.admin_call import actor, add_admin_flags, add_origin_flags, admin_service, natural
from quire.cli.command import CommandError
from quire.cli.terminal import read_stdin
from quire.client import DEFAULT_TARGET, AsyncClient
from quire.v1 import admin_pb2, generation_pb2


class Pin:
    """Keeps a prefix cached."""

    name = "pin"
    help = "keep a prefix cached"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument("pin", metavar="NAME", help="a pin of the same name is replaced")
        prefix = parser.add_mutually_exclusive_group(required=True)
        prefix.add_argument("--text", help="a prefix of prompts; - is standard input")
        prefix.add_argument("--file", type=Path, metavar="FILE", help="the same, from a file")
        prefix.add_argument(
            "--system", metavar="TEXT", help="a system prompt, as the model's template renders it"
        )
        prefix.add_argument(
            "--token-ids", type=_ids, metavar="N,N,...", help="the prefix as the model sees it"
        )
        parser.add_argument(
            "--tokenizer",
            default=DEFAULT_TARGET,
            metavar="HOST:PORT",
            help="whom to ask for the token ids of a text (default: %(default)s)",
        )
        parser.add_argument(
            "--ttl",
            type=natural,
            metavar="SECONDS",
            help="absent: until it is unpinned",
        )
        parser.add_argument(
            "--tenant", default="", metavar="NAME", help="whose requests share the prefix"
        )
        parser.add_argument(
            "--cache-salt", metavar="TEXT", help="the same, for requests that bring this salt"
        )
        add_origin_flags(parser)
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints how much is pinned."""
        request = admin_pb2.PinPrefixRequest(
            name=args.pin,
            tokens=generation_pb2.TokenIds(ids=_tokens(args)),
            tenant=args.tenant,
            cache_salt=args.cache_salt,
            ttl_s=args.ttl,
            actor=actor(args),
            reason=args.reason,
        )
        with admin_service(args) as service:
            response = service.PinPrefix(request, timeout=args.timeout)
        if args.json:
            print(json.dumps({"blocks": response.blocks, "cached": response.blocks_cached}))
        else:
            print(f"{args.pin}: {response.blocks} blocks, {response.blocks_cached} cached now")
        return 0


class Unpin:
    """Lets a pinned prefix go."""

    name = "unpin"
    help = "let a pinned prefix go"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument("pin", metavar="NAME", help="of the pin")
        add_origin_flags(parser)
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints nothing but that it is done."""
        request = admin_pb2.UnpinPrefixRequest(name=args.pin, actor=actor(args), reason=args.reason)
        with admin_service(args) as service:
            service.UnpinPrefix(request, timeout=args.timeout)
        print(json.dumps({"unpinned": args.pin}) if args.json else f"{args.pin}: unpinned")
        return 0


class Pins:
    """Shows the pinned prefixes."""

    name = "pins"
    help = "show the pinned prefixes"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one line per pin."""
        with admin_service(args) as service:
            response = service.ListPins(admin_pb2.ListPinsRequest(), timeout=args.timeout)
        if args.json:
            pins = [_facts(pin) for pin in response.pins]
            print(json.dumps({"pins": pins, "blocks_pinned": response.blocks_pinned}))
            return 0
        width = max((len(pin.name) for pin in response.pins), default=0)
        for pin in response.pins:
            left = f"{pin.expires_in_ms / 1000:.0f} s left" if _expires(pin) else "until unpinned"
            blocks = f"{pin.blocks_cached} of {pin.blocks} blocks cached"
            print(f"{pin.name:<{width}}  {blocks}  {left}")
        print(f"{response.blocks_pinned} blocks are kept by pins alone now")
        return 0


def _facts(pin: admin_pb2.PinnedPrefix) -> dict[str, str | int | None]:
    left_ms = pin.expires_in_ms if _expires(pin) else None
    return {
        "name": pin.name,
        "blocks": pin.blocks,
        "cached": pin.blocks_cached,
        "expires_in_ms": left_ms,
    }


def _expires(pin: admin_pb2.PinnedPrefix) -> bool:
    return pin.HasField("expires_in_ms")


def _ids(text: str) -> list[int]:
    return [natural(part.strip()) for part in text.split(",")]


def _tokens(args: argparse.Namespace) -> Sequence[int]:
    if args.token_ids is not None:
        return list(args.token_ids)
    if args.system is not None:
        return asyncio.run(_rendered(args.tokenizer, args.system))
    return asyncio.run(_encoded(args.tokenizer, _text(args)))


def _text(args: argparse.Namespace) -> str:
    if args.file is None:
        return read_stdin() if args.text == "-" else str(args.text)
    try:
        return str(args.file.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise CommandError(f"{args.file}: is not UTF-8 at byte {error.start}") from error


async def _encoded(target: str, text: str) -> Sequence[int]:
    """As the text of a prompt is encoded."""
    async with AsyncClient(target) as client:
        return await client.tokenize(text)


async def _rendered(target: str, text: str) -> Sequence[int]:
    """As a conversation that begins with it is encoded."""
    async with AsyncClient(target) as client:
        messages = [{"role": "system", "content": text}]
        rendered = await client.render_chat(messages, add_generation_prompt=False)
        return rendered.token_ids


PIN = Pin()
UNPIN = Unpin()
PINS = Pins()
