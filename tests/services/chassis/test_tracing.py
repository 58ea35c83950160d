"""Only a valid W3C traceparent is passed on."""

import pytest

from services.chassis.tracing import traceparent_of, valid_traceparent

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
