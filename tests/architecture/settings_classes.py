"""Finds the settings dataclass of each service."""

import dataclasses
import importlib

SERVICES = ("scheduler", "worker", "tokenizer")


def settings_class(service: str) -> type:
    """The one settings dataclass in `services/<service>/settings.py`."""
    module = importlib.import_module(f"services.{service}.settings")
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and dataclasses.is_dataclass(value)
        and all("help" in field.metadata for field in dataclasses.fields(value))
    ]
    return found
