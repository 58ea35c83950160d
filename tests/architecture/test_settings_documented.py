"""docs/operations.md lists every setting of every service, with its default."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.architecture.settings_classes import SERVICES, settings_class

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()


def documented(service: str) -> dict[str, str]:
    """Flags in the service's table, with the default that stands beside each."""
    found: dict[str, str] = {}
    for heading in ("All services", f"quire-{service}"):
        section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
        rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", section, re.MULTILINE)
        found |= {flag: default.strip("`") for flag, default in rows}
    return found


def default_text(value: object) -> str:
    """A default as the page writes it."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_stands_in_the_table(service: str) -> None:
    flags = {
        f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings_class(service))
    }
    assert set(documented(service)) == flags


@pytest.mark.parametrize("service", SERVICES)
def test_every_plain_default_is_the_true_one(service: str) -> None:
    """A default the service computes is None in the class; the page says in words what it is."""
    table = documented(service)
    for field in dataclasses.fields(settings_class(service)):
        default = default_text(field.default)
        if field.name == "metrics_port":
            assert f"{default} {service}" in table["--metrics-port"]
        elif default:
            assert table[f"--{field.name.replace('_', '-')}"] == default
