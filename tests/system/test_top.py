"""`quire top` at a real terminal, in front of a real set under load."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.v1 import generation_pb2
from tests.quire.cli.running_quire import quire
from tests.system.raw_requests import text_request
from tests.system.service_set import ServiceSet, serving
from tests.system.terminal import Terminal

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

STREAMS = 4
WORKER = ("--max-num-seqs=8", "--max-num-batched-tokens=64", "--kv-cache-memory=16MiB")


@pytest.fixture(scope="module")
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    async with serving(successor_model, {"worker": WORKER}) as running:
        yield running


@contextlib.asynccontextmanager
async def load(services: ServiceSet) -> AsyncIterator[None]:
    """Streams of two tenants, each with one request after another."""
    stopping = False

    async def stream(number: int) -> None:
        scheduling = generation_pb2.SchedulingOptions(
            tenant=f"tenant-{number % 2}", priority_class="interactive"
        )
        while not stopping:
            request = text_request([5 + number] * 20, 40, scheduling=scheduling)
            async for _ in services.text.Generate(request):
                pass

    async with asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(stream(number))
        try:
            yield
        finally:
            stopping = True


def shows_work(text: str) -> bool:
    """A rate, a worker's steps and latencies."""
    rate = re.search(r"^generation +([\d.]+k?) tok/s +\S*[▁▂▃▄▅▆▇█]", text, re.MULTILINE)
    row = re.search(r"^worker-0 +\d/8 +[\d.]+/64 .* \d+%", text, re.MULTILINE)
    ttft = re.search(r"^ttft +[\d.]+m?s p50 +[\d.]+m?s p95", text, re.MULTILINE)
    return bool(rate and rate[1] != "0" and row and ttft)


async def some_ended(services: ServiceSet) -> bool:
    return (await services.loads()).latencies.requests > 0


def is_whole(terminal: Terminal) -> bool:
    """The line of keys is the last one of the screen."""
    return terminal.lines[-1].startswith(" q  quit")


async def test_what_a_person_sees_and_presses(services: ServiceSet) -> None:
    terminal = Terminal(80, 24)
    flags = ("--target", services.address("scheduler"), "--interval", "0.2")
    async with load(services), terminal.running("top", *flags) as process:
        await terminal.until(shows_work)
        await terminal.until(lambda text: "tenant-0" in text and "tenant-1" in text)
        assert terminal.shows_own_screen
        assert not terminal.shows_cursor
        assert "tiny" in terminal.lines[0]
        await terminal.until(lambda _: is_whole(terminal))

        terminal.press("\t")
        await terminal.until(lambda text: "WORKER" in text and "CLASS" not in text)
        terminal.press("\t")
        await terminal.until(lambda text: "TENANT" in text and "WORKER" not in text)
        terminal.press("\t")
        await terminal.until(lambda text: "TENANT" in text and "WORKER" in text)
        terminal.press("s")
        await terminal.until(lambda text: "sort by name" in text)
        terminal.press("\x1b[A")  # an arrow is no key of it

        terminal.resize(120, 40)
        await terminal.until(lambda text: "BUDGET" in text and is_whole(terminal))

        terminal.press("p")
        await terminal.until(lambda text: "PAUSED" in text and "go on" in terminal.lines[-1])
        paused = terminal.text
        await asyncio.sleep(0.6)
        assert terminal.text == paused
        terminal.press("p")
        await terminal.until(lambda text: "PAUSED" not in text and text != paused)

        terminal.press("q")
        assert await process.wait() == 0
        await terminal.until(lambda _: terminal.is_as_before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_terminal_is_put_back(
    services: ServiceSet, number: signal.Signals, code: int
) -> None:
    terminal = Terminal(80, 24)
    async with terminal.running("top", "--target", services.address("scheduler")) as process:
        await terminal.until(lambda text: "worker-0" in text)
        assert not terminal.is_as_before
        if number is signal.SIGINT:
            terminal.press("\x03")
        else:
            process.send_signal(number)
        assert await process.wait() == code
        await terminal.until(lambda _: terminal.is_as_before)
        assert "Traceback" not in terminal.text


async def test_keys_and_a_new_size_do_not_wait_for_the_next_sample(services: ServiceSet) -> None:
    terminal = Terminal(80, 24)
    flags = ("--target", services.address("scheduler"), "--interval", "3600")
    async with terminal.running("top", *flags) as process:
        await terminal.until(lambda text: "worker-0" in text and is_whole(terminal))
        terminal.resize(120, 40)
        await terminal.until(lambda text: "BUDGET" in text and is_whole(terminal))
        terminal.press("\t")
        await terminal.until(lambda text: "VERSION" in text or "STEP p99" in text)
        terminal.press("q")
        assert await process.wait() == 0


async def test_it_says_that_nobody_answers_and_goes_on_by_itself(services: ServiceSet) -> None:
    terminal = Terminal(100, 30)
    flags = ("--target", services.address("scheduler"), "--interval", "0.2")
    async with load(services), terminal.running("top", *flags) as process:
        await terminal.until(shows_work)
        await services.programs["scheduler"].kill()
        await terminal.until(lambda text: "NO ANSWER" in text)
        assert "worker-0" in terminal.text, "what was known last still stands there"
        await services.start("scheduler")
        await terminal.until(lambda text: "NO ANSWER" not in text and shows_work(text))
        terminal.press("q")
        assert await process.wait() == 0


async def test_several_are_one_fleet(services: ServiceSet, tmp_path: Path) -> None:
    terminal = Terminal(120, 40)
    gone = f"unix://{tmp_path}/gone.sock"
    target = f"{services.address('scheduler')},{gone}"
    async with terminal.running("top", "--target", target) as process:
        await terminal.until(lambda text: "1 of 2 schedulers" in text)
        await terminal.until(lambda text: re.search(r"^\S+gone\.sock +down", text, re.MULTILINE))
        await terminal.until(lambda text: re.search(r"^unix\S+ +up", text, re.MULTILINE))
        terminal.press("q")
        assert await process.wait() == 0


async def test_for_scripts(services: ServiceSet) -> None:
    target = ("--target", services.address("scheduler"))
    async with load(services):
        await services.until(lambda: some_ended(services))
        async with asyncio.timeout(60):
            once = await quire("top", *target, "--interval", "0.2", "--samples", "12")
            told = await quire("top", *target, "--json")
    assert (once.code, once.err) == (0, "")
    assert shows_work(once.out), once.out
    assert "quit" not in once.out
    assert "\x1b" not in once.out
    assert (told.code, told.err) == (0, "")
    (scheduler,) = json.loads(told.out)["schedulers"]
    assert (scheduler["target"], scheduler["problem"]) == (target[1], None)
    sample = scheduler["sample"]
    assert (sample["model"], sample["running"] + sample["waiting"] >= 0) == ("tiny", True)
    (worker,) = sample["workers"]
    assert (worker["worker_id"], worker["max_num_batched_tokens"]) == ("worker-0", 64)
    assert worker["device"] == "cpu"
    assert 0 < worker["execute_us"] < worker["attached_us"]
    assert sample["latencies"]["requests"] > 0
    assert sample["latencies"]["ttft_us_p50"] <= sample["latencies"]["ttft_us_p95"]
    named = {one["name"]: one for one in sample["classes"]}
    assert named["interactive"]["latencies"]["requests"] == sample["latencies"]["requests"]
    assert named["batch"]["latencies"] is None
