"""Exit codes, messages and signals of a service process, seen from outside."""

import gc
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from services.chassis.process import settle_memory

PREAMBLE = """
import asyncio, dataclasses, sys
from services.chassis.process import StartupError, run_process
from services.chassis.settings import parse, setting

@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = setting(help="size", default=1, check=lambda n: n >= 1, rule="must be >= 1")

def say(word):
    print(word, flush=True)

"""


def start(main: str, *argv: str) -> subprocess.Popen[str]:
    """A process that runs the body `main` of a coroutine with the argument `stopping`."""
    code = PREAMBLE + "async def main(stopping):\n" + textwrap.indent(textwrap.dedent(main), "    ")
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}\nsys.exit(run_process(main))", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(main: str, *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = start(main, *argv)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


PARSE = 'say(parse(Settings, prog="p", argv=sys.argv[1:], env={}).size)'


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    process = start("""
        say("up")
        await stopping.wait()
        say("draining")
        say("drained")
        """)
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_an_orderly_end_is_code_0() -> None:
    assert run(PARSE, "--size", "3") == (0, "3\n", "")


def test_wrong_settings_are_code_2_and_one_line_each() -> None:
    assert run(PARSE, "--size", "0", "--colour", "red") == (
        2,
        "",
        "p: unknown flag --colour\np: --size must be >= 1, got 0\n",
    )


def test_help_is_code_0_without_noise() -> None:
    code, out, err = run(PARSE, "--help")
    assert (code, err) == (0, "")
    assert "--size" in out


def test_a_startup_error_is_code_2_and_one_line() -> None:
    assert run('raise StartupError("model: not found")') == (2, "", "model: not found\n")


def test_a_startup_error_in_a_task_group_is_the_same() -> None:
    main = """
        async def fails(): raise StartupError("listen: in use")
        async with asyncio.TaskGroup() as outer:
            outer.create_task(asyncio.sleep(60))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(fails())
        """
    assert run(main) == (2, "", "listen: in use\n")


def test_a_crash_is_code_1_with_a_traceback() -> None:
    code, _, err = run("raise ZeroDivisionError('cause')")
    assert code == 1
    assert "ZeroDivisionError: cause" in err
    assert "Traceback" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_for_an_orderly_end(
    waiting: subprocess.Popen[str], number: int
) -> None:
    waiting.send_signal(number)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out, err) == (0, "draining\ndrained\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_process_at_once(number: int) -> None:
    process = start("""
        say("up")
        await stopping.wait()
        say("draining")
        await asyncio.Event().wait()
        """)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number


def test_settled_memory_is_left_alone_by_the_collector() -> None:
    thresholds = gc.get_threshold()
    try:
        settle_memory()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (50_000, 20, 100)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
