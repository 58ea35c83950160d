"""Says what is wrong with the settings of a service, without starting it.

    python -m services.check_settings SERVICE [FLAG ...]

For whoever is about to start several services: a wrong flag shows before any of them loads a model.
Ends with 0, or with 2 and one problem a line on standard error. Imports no service, only settings.
SERVICE may be `gateway` too, the program `smg` that OpenAI clients talk to: of that is looked
whether it is installed, with the stubs by which a scheduler serves it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import services.scheduler.settings as scheduler
import services.tokenizer.settings as tokenizer
import services.worker.settings as worker
from services.chassis.settings import SettingsError, parse

Environment = Mapping[str, str]

_GATEWAY_PACKAGES = ("smg", "smg_grpc_proto")
"""Of the extra `openai`."""


def _read_scheduler(argv: Sequence[str], env: Environment) -> scheduler.Settings:
    later = scheduler.LATER_FLAGS
    return parse(scheduler.Settings, prog="quire-scheduler", argv=argv, env=env, later=later)


def _look_for_gateway(argv: Sequence[str], env: Environment) -> None:
    del argv, env  # its flags are for itself to check
    missing = [name for name in _GATEWAY_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"--openai needs {' and '.join(missing)}; install with: pip install 'quire-llm[openai]'"
        )


_READERS: Mapping[str, Callable[[Sequence[str], Environment], Any]] = MappingProxyType(
    {
        "scheduler": _read_scheduler,
        "tokenizer": tokenizer.read_settings,
        "worker": worker.read_settings,
        "gateway": _look_for_gateway,
    }
)


def main(argv: Sequence[str]) -> int:
    """Checks the settings of the service that the first argument names; returns the exit code."""
    service, *flags = argv
    try:
        _READERS[service](flags, os.environ)
    except SettingsError as error:
        for problem in str(error).splitlines():
            sys.stderr.write(problem.removeprefix(f"quire-{service}: ") + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
