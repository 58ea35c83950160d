"""docs/migrating-from-vllm.md names settings and parameters that there are, and refuses what is."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from quire import SamplingParams, Scheduling
from quire.cli import up
from quire.params import LATER as LATER_PARAMETERS
from quire.set_options import LATER
from tests.architecture.settings_classes import SERVICES, settings_class

PAGE = (Path(__file__).parents[2] / "docs/migrating-from-vllm.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def refused(title: str) -> set[str]:
    """What a section says is refused by name."""
    return named(re.search(r"Refused by name[^:]*: (.*?)\.(?= |\n)", section(title), re.DOTALL)[1])


def flags_of(owner: str) -> set[str]:
    if owner == "quire up":
        parser = argparse.ArgumentParser()
        up.COMMAND.configure(parser)
        return set(re.findall(r"--[a-z-]+", parser.format_help()))
    fields = dataclasses.fields(settings_class(owner))
    return {f"--{field.name.replace('_', '-')}" for field in fields}


@pytest.mark.parametrize("row", rows("Flags"), ids=lambda row: row[0])
def test_each_flag_is_one_of_its_service(row: list[str]) -> None:
    _, ours, owners, _ = row
    for owner in filter(None, (owner.strip(" `") for owner in owners.split(","))):
        assert owner in (*SERVICES, "quire up")
        assert named(ours)
        assert named(ours) <= flags_of(owner)


def test_flags_said_to_be_refused_are() -> None:
    assert refused("Flags") <= LATER.keys()
    assert len(refused("Flags")) > 3


def test_parameters_are_taken_or_refused_as_the_page_says() -> None:
    known = {
        field.name for kind in (SamplingParams, Scheduling) for field in dataclasses.fields(kind)
    }
    new = re.search(r"New here, .*?: (.*?)\.\n", section("Request parameters"), re.DOTALL)[1]
    taken = {name for row in rows("Request parameters") for name in named(row[1])}
    assert taken | named(new) == known
    assert refused("Request parameters") == LATER_PARAMETERS.keys()
