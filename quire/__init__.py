"""Quire serves large language models as asyncio gRPC services; this package is what a client needs.

`LLM` is a model as an object, `AsyncClient` talks to a server, `SamplingParams` says how to sample,
`errors` holds what can go wrong, and `quire.v1` the stubs. Imports nothing of the services:
`quire.local` starts them as processes.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

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
    "Usage",
    "__version__",
    "errors",
]

__version__: str


def __getattr__(name: str) -> Any:
    # What starts processes, and finding out the version, take time that few imports need.
    if name == "LLM":
        return importlib.import_module("quire.llm").LLM
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("quire.version").VERSION
