"""The flags of `quire-scheduler` that the core decides by, on a command of the simulation.

They are the service's own settings, so that names, defaults, limits and messages are the same.
"""

import argparse
from dataclasses import Field, fields, replace
from typing import Any

from quire.cli.command import UsageError
from services.chassis.settings import SettingsError, parse
from services.scheduler.core.config import Config
from services.scheduler.settings import Settings

_CORE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk_size",
    "enable_prefix_caching",
    "tpot_target",
    "priority_class",
    "default_class",
    "tenant",
    "other_tenants",
    "ageing",
    "max_queued_requests",
    "max_queued_tokens",
    "eviction_policy",
    "time_wheel_slots",
    "partial_block_reuse",
)
_BOUNDS = ("max_queued_requests", "max_queued_tokens")
_PREFIX = "core_"


def add_core_flags(parser: argparse.ArgumentParser, *, is_queue_bounded: bool = True) -> None:
    """Adds them as a group of their own.

    Args:
        parser: of the command.
        is_queue_bounded: whether the bounds of the queue are the service's; else there are none
            but those given.
    """
    parser.set_defaults(is_queue_bounded=is_queue_bounded)
    group = parser.add_argument_group("flags of quire-scheduler")
    for field in _settings():
        default = "" if field.default in (None, (), "") else f" (default: {_shown(field.default)})"
        if field.name in _BOUNDS and not is_queue_bounded:
            default = " (default: no bound)"
        flag = field.name.replace("_", "-")
        switch = isinstance(field.default, bool)
        group.add_argument(
            f"--{flag}",
            dest=_PREFIX + field.name,
            action="append",
            nargs="?" if switch else None,
            const="true" if switch else None,
            metavar="true|false" if switch else "VALUE",
            help=f"{field.metadata['help']}{default}".replace("%", "%%"),
        )


def core_config(args: argparse.Namespace, prog: str) -> Config:
    """The configuration that the flags say; its policy is left at the default.

    Raises:
        UsageError: a flag is wrong; names it and its limit.
    """
    argv = [
        f"--{field.name.replace('_', '-')}={value}"
        for field in _settings()
        for value in getattr(args, _PREFIX + field.name) or ()
    ]
    try:
        config = parse(Settings, prog=prog, argv=argv, env={}).core_config()
    except SettingsError as error:
        raise UsageError("; ".join(str(error).splitlines())) from error
    if args.is_queue_bounded:
        return config
    unbounded: dict[str, Any] = {
        name: None for name in _BOUNDS if not getattr(args, _PREFIX + name)
    }
    return replace(config, **unbounded)


def _settings() -> list[Field[Any]]:
    return [field for field in fields(Settings) if field.name in _CORE]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
