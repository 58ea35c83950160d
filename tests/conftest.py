"""What holds for every test: seeds, one uvloop, no hub, no leaked tasks, no skips in CI."""

import asyncio
import os
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

# Read once, when the libraries are imported, so before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import numpy as np
import pytest
import uvloop

hypothesis.settings.register_profile("quire", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("quire")

_NEEDED_IN_CI = ("system", "demo_model")


class Loop(uvloop.Loop):
    """The loop that the services run on, but for the start of programs, which is asyncio's.

    uvloop forks and runs Python in the child. Beside the threads of gRPC and OpenTelemetry, which a
    service has and does not start programs, that crashes or hangs once in some thousand times.
    """

    async def subprocess_exec(self, protocol_factory, program, *args, **options):
        """See asyncio.loop.subprocess_exec."""
        protocol = protocol_factory()
        pipes = [options.pop(name, subprocess.PIPE) for name in ("stdin", "stdout", "stderr")]
        make = asyncio.SelectorEventLoop._make_subprocess_transport
        return await make(self, protocol, (program, *args), False, *pipes, 0, **options), protocol

    def _child_watcher_callback(self, pid, returncode, transport):
        self.call_soon_threadsafe(transport._process_exited, returncode)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that the services run on."""
    return {"uvloop": Loop}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what starts processes last, so that a broken part is reported by its own tests first."""
    items.sort(key=lambda item: item.get_closest_marker("system") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Where CI=true, a skipped test that proves the whole is a failure."""
    report = yield
    needed = any(item.get_closest_marker(name) for name in _NEEDED_IN_CI)
    expected = hasattr(report, "wasxfail")
    if _in_ci() and needed and report.skipped and not expected:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} must not be skipped in CI: {call.excinfo.value}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """The same for a module of tests/system that skips itself as a whole."""
    report = yield
    if _in_ci() and report.skipped and "system" in collector.path.parts:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} must not be skipped in CI"
    return report


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run, whatever ran before."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fails a test that leaves a task of its own on the loop."""
    before = asyncio.all_tasks()
    yield
    for _ in range(100):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)  # calls that were cut need a moment to unwind
    pytest.fail(f"tasks left running: {sorted(map(repr, left))}")
