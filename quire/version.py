"""The version of the installed distribution."""

import importlib.metadata


def _installed() -> str:
    try:
        return importlib.metadata.version("quire-llm")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


VERSION = _installed()
"""What is installed; "0+source" where the package is used without being installed."""
