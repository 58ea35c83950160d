"""Only a valid W3C traceparent is passed on; spans arrive, or are counted."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import INVALID_SPAN

from services.chassis.tracing import (
    Tracing,
    below,
    child_of,
    context_of,
    is_sampled,
    traceparent_of,
    valid_traceparent,
    written,
)
from tests.fakes.otlp_receiver import dead_url, receiving, silent_url

RESOURCE = Resource.create({"service.name": "quire-test"})
GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        GOOD.upper(),
        GOOD + "-more",
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        "ff" + GOOD[2:],
        GOOD[:-1],
        GOOD + "\n",
    ],
)
def test_an_invalid_traceparent_is_dropped(value: str) -> None:
    assert valid_traceparent(value) == ""


def test_a_valid_traceparent_stays_as_it_is() -> None:
    assert valid_traceparent(GOOD) == GOOD


def test_the_header_is_found_among_others() -> None:
    metadata = (("user-agent", "x"), ("traceparent-bin", b"y"), ("traceparent", GOOD))
    assert traceparent_of(metadata) == GOOD


@pytest.mark.parametrize("metadata", [None, (), (("traceparent", b"bytes"),), (("other", GOOD),)])
def test_without_the_header_there_is_no_trace(metadata: object) -> None:
    assert traceparent_of(metadata) == ""


def test_what_is_written_is_what_was_read() -> None:
    context = context_of(GOOD)
    assert context is not None
    assert written(context) == GOOD
    assert written(INVALID_SPAN.get_span_context()) == ""
    assert is_sampled(GOOD)
    assert not is_sampled(GOOD[:-2] + "00")
    assert not is_sampled("")


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    assert valid_traceparent("cc" + GOOD[2:]) == "cc" + GOOD[2:]


def spans_of(tracing: Tracing, count: int) -> None:
    for number in range(count):
        tracing.tracer.start_span(f"s{number}").end()


async def test_spans_arrive_with_their_parents() -> None:
    async with receiving() as receiver:
        tracing = Tracing(RESOURCE, url=receiver.url, ratio=None)
        outer = tracing.tracer.start_span("outer", child_of(GOOD))
        inner = tracing.tracer.start_span("inner", below(outer))
        inner.end()
        outer.end()
        root = tracing.tracer.start_span("root", child_of(""))
        root.end()
        await asyncio.to_thread(tracing.close)
        assert receiver.tree(GOOD.split("-")[1], lambda span: span.name) == "\n".join(
            (f"(parent {GOOD.split('-')[2]} is elsewhere)", "  outer", "    inner")
        )
        (alone,) = receiver.named("root")
        assert alone.parent_id == ""
        assert tracing.counts()[0] == (3.0, {"outcome": "sent"})


async def test_the_caller_s_decision_counts_before_our_share() -> None:
    async with receiving() as receiver:
        tracing = Tracing(RESOURCE, url=receiver.url, ratio=0.0)
        tracing.tracer.start_span("wanted", child_of(GOOD)).end()
        unwanted = tracing.tracer.start_span("unwanted", child_of(GOOD[:-2] + "00"))
        assert written(unwanted.get_span_context()).endswith("-00")
        unwanted.end()
        tracing.tracer.start_span("ours", child_of("")).end()
        await asyncio.to_thread(tracing.close)
        assert [span.name for span in receiver.spans] == ["wanted"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("url", [dead_url, silent_url])
def test_a_receiver_that_is_away_costs_its_spans_and_nothing_else(url: Any) -> None:
    with url() as address:
        tracing = Tracing(RESOURCE, url=address, ratio=None)
        spans_of(tracing, 6_000)  # batches that would each wait for the receiver
        tracing.close()
        assert tracing.counts()[0] == (0.0, {"outcome": "sent"})


@pytest.mark.timeout(60)
def test_what_finds_no_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.chassis.tracing._QUEUED_SPANS", 512)
    with silent_url() as address:
        tracing = Tracing(RESOURCE, url=address, ratio=None)
        spans_of(tracing, 2_000)
        counts = {labels["outcome"]: count for count, labels in tracing.counts()}
        tracing.close()
    # One batch may have left the queue for the receiver.
    assert counts["dropped"] in (2_000 - 512, 2_000 - 2 * 512)
    assert counts["sent"] == 0
