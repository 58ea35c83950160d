"""`quire admin get`, `quire admin set` and `quire admin changes`."""

import argparse
import json
from collections.abc import Iterable

from quire.cli.admin_call import actor, add_admin_flags, add_origin_flags, admin_service, natural
from quire.scheduler_config import config_lines, parse_change
from quire.v1 import admin_pb2


class Get:
    """Shows the configuration in force."""

    name = "get"
    help = "show the configuration in force"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one line per setting."""
        with admin_service(args) as service:
            response = service.GetConfig(admin_pb2.GetConfigRequest(), timeout=args.timeout)
        lines = config_lines(response.config)
        if args.json:
            print(json.dumps({"version": response.version, "settings": lines}))
            return 0
        print(f"version {response.version}")
        width = max(map(len, lines))
        for name, value in lines.items():
            print(f"{name:<{width}}  {value}")
        return 0


class Set:
    """Changes the configuration."""

    name = "set"
    help = "change the configuration, without a restart"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "assignments",
            nargs="+",
            metavar="NAME=VALUE",
            help="named as the flags are, e.g. max-num-seqs=64, policy=priority, "
            "class.batch.share=100, tenant.acme.weight=3; none takes a bound or a target away",
        )
        parser.add_argument(
            "--expected-version",
            type=natural,
            metavar="N",
            help="refused where another version is in force (see quire admin get)",
        )
        add_origin_flags(parser)
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints what changed."""
        request = admin_pb2.SetConfigRequest(
            change=parse_change(args.assignments),
            actor=actor(args),
            reason=args.reason,
            expected_version=args.expected_version,
        )
        with admin_service(args) as service:
            response = service.SetConfig(request, timeout=args.timeout)
        if args.json:
            changes = [_values(change) for change in response.changes]
            print(json.dumps({"version": response.version, "changes": changes}))
            return 0
        for change in response.changes:
            print(f"{change.field}: {change.old_value} -> {change.new_value}")
        print(f"version {response.version}{'' if response.changes else '; nothing changed'}")
        return 0


class Changes:
    """Shows the latest changes."""

    name = "changes"
    help = "show the latest changes, and who made them"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument(
            "--limit",
            type=natural,
            default=0,
            metavar="N",
            help="only the last N",
        )
        add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one line per change, the latest last."""
        request = admin_pb2.ListChangesRequest(limit=args.limit)
        with admin_service(args) as service:
            response = service.ListChanges(request, timeout=args.timeout)
        if args.json:
            changes = [_facts(change) for change in response.changes]
            print(json.dumps({"total": response.total, "changes": changes}))
            return 0
        for line in _lines(response.changes):
            print(line)
        return 0


def _lines(changes: Iterable[admin_pb2.Change]) -> Iterable[str]:
    for change in changes:
        who = f"{change.actor} at {change.peer}"
        why = f" ({change.reason})" if change.reason else ""
        what = f"{change.field}: {change.old_value} -> {change.new_value}"
        yield f"{_time(change)}  {what}  by {who}{why}"


def _time(change: admin_pb2.Change) -> str:
    return change.time.ToDatetime().isoformat(" ", "seconds") + "Z"


def _values(change: admin_pb2.Change) -> dict[str, str]:
    return {"field": change.field, "old": change.old_value, "new": change.new_value}


def _facts(change: admin_pb2.Change) -> dict[str, str | int]:
    return {
        "time": change.time.ToJsonString(),
        "actor": change.actor,
        "peer": change.peer,
        "reason": change.reason,
        **_values(change),
        "version": change.version,
    }


GET = Get()
SET = Set()
CHANGES = Changes()
