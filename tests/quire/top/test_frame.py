"""Frames as text, letter for letter: what fits, what gives way, and that nothing misleads.

The expected frames are in `frames/`; `python -m tests.quire.top.test_frame` writes them anew, to be
looked at before they are committed.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from quire.top.frame import Look, Order, View, frame
from quire.top.history import History, Seen
from quire.top.marks import ASCII
from quire.top.sample import Sample, Stall
from tests.quire.top.samples import (
    latencies,
    priority_class,
    sample,
    tenant,
    timings,
    worker,
)

FRAMES = Path(__file__).with_name("frames")

PLAIN = Look()


def text(fleet: Sequence[Seen], look: Look, width: int, height: int | None) -> str:
    """The frame as a terminal of that size shows it, without colours."""
    out = io.StringIO()
    # One more column, so that a line that is too long shows.
    console = Console(file=out, width=width + 1, color_system=None, legacy_windows=False)
    console.print(frame(fleet, look, width, height))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def seen(target: str, *samples: Sample, problem: str = "") -> Seen:
    history = History(target)
    for one in samples:
        history.answered(one)
    if problem:
        history.failed(problem, 100.0)
    return history.seen(107.4)


def busy_sample(second: int, *, started: int = 3600) -> Sample:
    """One second of a set under load."""
    some = latencies(
        requests=120,
        ttft_us_p50=80_000 + 6_000 * (second % 7),
        ttft_us_p95=450_000,
        tpot_requests=118,
        tpot_us_p50=21_000 + 500 * (second % 5),
        tpot_us_p95=34_500,
    )
    first = worker(
        "gpu-a-worker-0",
        running=8,
        blocks_free=250,
        blocks_evictable=300,
        blocks_pinned=50,
        steps=1000 + 30 * second,
        steps_in_flight=2,
        computed_tokens=90_000 + 1400 * second,
        execute_us=30_000_000 + 930_000 * second,
        attached_us=3_590_000_000,
        timings=timings(
            steps=1024,
            link_us_p50=640,
            link_us_p99=2_100,
            execute_us_p50=31_000,
            execute_us_p99=58_000,
            idle_us_p50=0,
        ),
    )
    second_worker = replace(
        first,
        worker_id="gpu-b-worker-1-with-a-very-long-name-that-goes-on",
        running=4,
        blocks_free=999,
        blocks_evictable=0,
        blocks_pinned=0,
        device="cuda",
        dtype="bfloat16",
    )
    return sample(
        started + second,
        model="smollm2-135m-instruct",
        running=12,
        waiting=3,
        waiting_tokens=1234,
        accepted=1234 + 3 * second,
        ended=1219 + 3 * second,
        workers=(first, second_worker),
        classes=(
            priority_class(
                "interactive", running=2, weight=700, ttft_met=97, ttft_missed=3, latencies=some
            ),
            priority_class("standard", weight=250),
            priority_class("batch", running=10, waiting=3, weight=50, latencies=some),
        ),
        tenants=(
            tenant("acme", running=10, waiting=3, served_tokens=845_000),
            tenant("", running=1, served_tokens=120),
            tenant("模型研究", running=1, served_tokens=3_400),
        ),
        counters={
            "prompt_tokens": 50_000 + 1000 * second + 37 * (second % 5) ** 3,
            "generation_tokens": 40_000 + 340 * second,
            "prefix_query_tokens": 2_000 * second,
            "prefix_hit_tokens": 900 * second,
            "preemptions": second,
        },
        latencies=some,
    )


def busy(target: str = "127.0.0.1:50052") -> Seen:
    return seen(target, *(busy_sample(second) for second in range(60)))


def crowded() -> Seen:
    tenants = tuple(
        tenant(f"tenant-{number:02d}", running=number % 3, waiting=number, served_tokens=number)
        for number in range(64)
    )
    return seen("127.0.0.1:50052", *(replace(busy_sample(s), tenants=tenants) for s in range(9)))


def stalled() -> Seen:
    stall = Stall(
        request_id="4f1c",
        reason="worker gpu-a-worker-0 owes the answer to step 12 of 8 requests",
        stalled_us=31_000_000,
    )
    return seen("127.0.0.1:50052", replace(busy_sample(9), stall=stall))


def down() -> Seen:
    problem = "cannot reach 10.0.0.2:50052 (Connection refused)"
    return seen("10.0.0.2:50052", *(busy_sample(s) for s in range(9)), problem=problem)


def never_there() -> Seen:
    return seen("10.0.0.2:50052", problem="cannot reach 10.0.0.2:50052 (Connection refused)")


def without_workers() -> Seen:
    return seen("127.0.0.1:50052", *(sample(s, workers=(), model="", waiting=2) for s in (1, 2)))


CASES: dict[str, Callable[[], str]] = {
    "busy_80x24": lambda: text([busy()], PLAIN, 80, 24),
    "busy_120x40": lambda: text([busy()], PLAIN, 120, 40),
    "busy_ascii_80x24": lambda: text([busy()], replace(PLAIN, marks=ASCII), 80, 24),
    "busy_40x16": lambda: text([busy()], PLAIN, 40, 16),
    "paused_20x5": lambda: text([busy()], replace(PLAIN, paused=True), 20, 5),
    "workers_120x24": lambda: text([busy()], replace(PLAIN, view=View.WORKERS), 120, 24),
    "workers_160x24": lambda: text([busy()], replace(PLAIN, view=View.WORKERS), 160, 24),
    "requests_80x24": lambda: text([busy()], replace(PLAIN, view=View.REQUESTS), 80, 24),
    "crowded_80x24": lambda: text([crowded()], PLAIN, 80, 24),
    "crowded_by_load_80x24": lambda: text(
        [crowded()], replace(PLAIN, view=View.REQUESTS, order=Order.LOAD), 80, 24
    ),
    "stalled_80x24": lambda: text([stalled()], PLAIN, 80, 24),
    "down_80x24": lambda: text([down()], PLAIN, 80, 24),
    "never_there_80x24": lambda: text([never_there()], PLAIN, 80, 24),
    "without_workers_80x24": lambda: text([without_workers()], PLAIN, 80, 24),
    "fleet_120x40": lambda: text([busy(), down(), busy("10.0.0.3:50052")], PLAIN, 120, 40),
    "once_100": lambda: text([busy()], replace(PLAIN, keys=False), 100, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_frame_is_as_expected(name: str) -> None:
    assert CASES[name]() == (FRAMES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_a_frame_has_the_size_of_the_screen(name: str) -> None:
    size = re.search(r"(\d+)(?:x(\d+))?$", name)
    assert size is not None
    lines = CASES[name]().splitlines()
    assert max(map(cell_len, lines)) <= int(size[1])
    if size[2]:
        assert len(lines) == int(size[2])


@pytest.mark.parametrize("width", range(1, 200, 7))
@pytest.mark.parametrize("height", [1, 2, 3, 5, 10, 24, 60])
def test_every_size_can_be_drawn(width: int, height: int) -> None:
    for look in (PLAIN, replace(PLAIN, view=View.WORKERS), replace(PLAIN, view=View.REQUESTS)):
        lines = text([busy(), down()], look, width, height).splitlines()
        assert len(lines) == height
        assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", range(30, 130))
def test_no_number_is_cut(width: int) -> None:
    """Whatever is shown of a narrow frame stands in the wide one in the same words."""
    wide = set(text([busy()], PLAIN, 400, None).split())
    drawn = set("▁▂▃▄▅▆▇█▒▞·")
    for word in text([busy()], replace(PLAIN, keys=False), width, None).split():
        if "…" not in word and not set(word) <= drawn:
            assert word in wide


def test_without_unicode_all_is_ascii() -> None:
    ascii_names = replace(busy_sample(1), tenants=())
    look = replace(PLAIN, marks=ASCII)
    text([seen("a:1", ascii_names, replace(busy_sample(3), tenants=()))], look, 120, 40).encode(
        "ascii"
    )


def test_the_keys_go_round() -> None:
    assert [View.ALL.next, View.WORKERS.next, View.REQUESTS.next] == [
        View.WORKERS,
        View.REQUESTS,
        View.ALL,
    ]
    assert (Order.NAME.next, Order.LOAD.next) == (Order.LOAD, Order.NAME)


if __name__ == "__main__":
    FRAMES.mkdir(exist_ok=True)
    for case, draw in CASES.items():
        (FRAMES / f"{case}.txt").write_text(draw(), encoding="utf-8")
