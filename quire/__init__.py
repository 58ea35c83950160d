"""Quire serves large language models as asyncio gRPC services; this package is what a client needs.

`LLM` is a model as an object, `AsyncClient` talks to a server, `SamplingParams` says how to sample,
`Scheduling` how urgent it is, `errors` holds what can go wrong, and `quire.v1` the stubs. Imports
nothing of the services: `quire.local` starts them as processes.
"""

import importlib

from quire import errors
from quire.answers import (
    ChatMessage,
    Completion,
    CompletionOutput,
    Delta,
    Finished,
    RequestOutput,
    Usage,
)
from quire.client import AsyncClient
from quire.llm import LLM
from quire.params import SamplingParams, Scheduling

__all__ = [
    "LLM",
    "AsyncClient",
    "ChatMessage",
    "Completion",
    "CompletionOutput",
    "Delta",
    "Finished",
    "RequestOutput",
    "SamplingParams",
    "Scheduling",
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
