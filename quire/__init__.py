"""Quire serves large language models as asyncio gRPC services; this package is what a client needs.

`AsyncClient` talks to a server, `SamplingParams` says how to sample, `errors` holds what can go
wrong, and `quire.v1` the stubs. Imports nothing of the services: `quire.local` starts them as
processes.
"""

import importlib

from quire import errors
from quire.answers import ChatMessage, Completion, Delta, Finished, Usage
from quire.client import AsyncClient
from quire.params import SamplingParams

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Completion",
    "Delta",
    "Finished",
    "SamplingParams",
    "Usage",
    "__version__",
    "errors",
]

__version__: str


def __getattr__(name: str) -> str:
    # Finding out the version takes a fifth of the whole import, and few ask for it.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version: str = importlib.import_module("quire.version").VERSION
    return version
