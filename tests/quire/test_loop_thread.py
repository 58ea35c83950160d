"""A loop in a thread of its own: every job ends, whatever ends the loop."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from quire import loop_thread
from quire.errors import QuireError
from quire.loop_thread import LoopThread

CLOSED = "it is closed"


class Thing:
    """A resource that is lost when the test says so."""

    def __init__(self) -> None:
        self.is_open = False
        self.lost = asyncio.Event()

    async def watch(self) -> NoReturn:
        await self.lost.wait()
        raise QuireError("the thing is lost")


@contextlib.asynccontextmanager
async def opening() -> AsyncIterator[Thing]:
    thing = Thing()
    thing.is_open = True
    try:
        yield thing
    finally:
        thing.is_open = False


@pytest.fixture
def thread() -> Any:
    thread: LoopThread[Thing] = LoopThread(opening, hurry=lambda: None, closed=CLOSED)
    yield thread
    thread.stop()


async def wait_for_ever(_: Thing) -> None:
    await asyncio.Event().wait()


def test_jobs_run_beside_one_another(thread: Any) -> None:
    thing = thread.start()
    assert thing.is_open
    seen = []

    async def note(opened: Thing) -> None:
        seen.append((opened, threading.current_thread()))

    first = thread.run(wait_for_ever)
    thread.run(note).outcome.result(10)
    assert not first.outcome.done()
    assert seen[0][0] is thing
    assert seen[0][1] is not threading.current_thread()


def test_a_job_that_fails_hurts_no_other(thread: Any) -> None:
    thread.start()

    async def fail(_: Thing) -> None:
        raise ZeroDivisionError("mine")

    other = thread.run(wait_for_ever)
    with pytest.raises(ZeroDivisionError, match="mine"):
        thread.run(fail).outcome.result(10)
    assert not other.outcome.done()


def test_a_job_may_be_cancelled_before_its_first_step(thread: Any) -> None:
    thread.start()
    for _ in range(20):
        job = thread.run(wait_for_ever)
        job.cancel()
        with pytest.raises(QuireError, match=CLOSED):
            job.outcome.result(10)
        job.cancel()


def test_stopping_ends_jobs_and_closes_what_was_opened(thread: Any) -> None:
    thing = thread.start()
    job = thread.run(wait_for_ever)
    thread.stop()
    assert not thing.is_open
    with pytest.raises(QuireError, match=CLOSED):
        job.outcome.result(10)
    with pytest.raises(QuireError, match=CLOSED):
        thread.run(wait_for_ever)
    thread.stop()
    job.cancel()


def test_a_lost_resource_ends_all_jobs_with_its_reason(thread: Any) -> None:
    thing = thread.start()
    job = thread.run(wait_for_ever)
    job.call(thing.lost.set)
    with pytest.raises(QuireError, match="the thing is lost"):
        job.outcome.result(10)
    with pytest.raises(QuireError, match="the thing is lost"):
        thread.run(wait_for_ever).outcome.result(10)


def test_what_cannot_be_opened_is_an_error_of_start() -> None:
    @contextlib.asynccontextmanager
    async def fail() -> AsyncIterator[Thing]:
        raise QuireError("cannot open")
        yield Thing()

    thread: LoopThread[Thing] = LoopThread(fail, hurry=lambda: None, closed=CLOSED)
    with pytest.raises(QuireError, match="cannot open"):
        thread.start()
    thread.stop()
    with pytest.raises(QuireError, match=CLOSED):
        thread.run(wait_for_ever)


def test_stopping_while_it_opens() -> None:
    entered = threading.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[Thing]:
        entered.set()
        await asyncio.Event().wait()
        yield Thing()

    thread: LoopThread[Thing] = LoopThread(slow, hurry=lambda: None, closed=CLOSED)
    stopper = threading.Thread(target=lambda: (entered.wait(), thread.stop()))
    stopper.start()
    with pytest.raises(QuireError, match=CLOSED):
        thread.start()
    stopper.join()


def test_a_thread_that_never_started_can_be_stopped() -> None:
    LoopThread(opening, hurry=lambda: None, closed=CLOSED).stop()


def test_a_job_may_be_cancelled_on_the_loop(thread: Any) -> None:
    thread.start()
    other = thread.run(wait_for_ever)

    async def cancel_it(_: Thing) -> None:
        other.cancel()

    thread.run(cancel_it).outcome.result(10)
    with pytest.raises(QuireError, match=CLOSED):
        other.outcome.result(10)


def test_a_loop_that_hangs_is_left_behind(thread: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_HANGS_AFTER_S", 0.1)
    thread.start()
    go_on = threading.Event()

    async def hang(_: Thing) -> None:
        go_on.wait()

    thread.run(hang)
    with pytest.raises(QuireError, match="its background thread hangs"):
        thread.stop()
    go_on.set()
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_so(thread: Any) -> None:
    thread.start()
    child = os.fork()
    if child == 0:
        try:
            thread.run(wait_for_ever)
        except QuireError as error:
            os._exit(0 if "works only in process" in error.message else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
