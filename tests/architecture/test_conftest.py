"""The rules that tests/conftest.py sets are in force, seen in test runs of their own."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import uvloop

ROOT = Path(__file__).parents[2]

TESTS = """
import asyncio, pytest

@pytest.mark.system
def test_system_passes(): pass

@pytest.mark.system
def test_system_skips(): pytest.skip("the model is not there")

@pytest.mark.system
@pytest.mark.skipif(True, reason="slow")
def test_system_is_marked_to_skip(): pass

@pytest.mark.system
@pytest.mark.xfail(reason="known", strict=True)
def test_system_fails_as_expected(): assert 1 == 2

@pytest.mark.demo_model
def test_model_skips(): pytest.skip("the model is not there")

def test_plain_skips(): pytest.skip("no GPU")

async def test_leaks():
    asyncio.get_running_loop().create_task(asyncio.sleep(60), name="leaked")

async def test_async_passes(): pass
"""

MODULE_SKIPS = "import pytest; pytest.skip('no processes here', allow_module_level=True)"


def outcomes(tmp_path: Path, *, ci: str) -> tuple[dict[str, str], str]:
    """What became of each test, in the order they ran, and the whole output."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(TESTS)
    (tmp_path / "tests/system").mkdir()
    (tmp_path / "tests/system/test_all.py").write_text(MODULE_SKIPS)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-v",
            "--continue-on-collection-errors",
        ],
        cwd=tmp_path,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, str] = {}
    for name, outcome in re.findall(r"^\S+::(\w+) ([A-Z]+)", ended.stdout, re.MULTILINE):
        found[name] = found[name] + " " + outcome if name in found else outcome
    return found, ended.stdout


def test_in_ci_a_skip_of_what_proves_the_whole_is_a_failure(tmp_path: Path) -> None:
    found, out = outcomes(tmp_path, ci="true")
    assert found == {
        "test_model_skips": "FAILED",
        "test_plain_skips": "SKIPPED",
        "test_leaks": "PASSED ERROR",
        "test_async_passes": "PASSED",
        "test_system_passes": "PASSED",
        "test_system_skips": "FAILED",
        "test_system_is_marked_to_skip": "ERROR",
        "test_system_fails_as_expected": "XFAIL",
    }
    assert "test_system_skips must not be skipped in CI: the model is not there" in out
    assert "tests/system/test_all.py must not be skipped in CI" in out
    assert "tasks left running" in out
    system = [name.startswith("test_system") for name in found]
    assert system == sorted(system), "system tests come last"


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    found, _ = outcomes(tmp_path, ci="")
    assert {name for name, outcome in found.items() if outcome == "SKIPPED"} == {
        "test_model_skips",
        "test_plain_skips",
        "test_system_skips",
        "test_system_is_marked_to_skip",
    }


async def test_tests_run_on_the_loop_of_the_services() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
