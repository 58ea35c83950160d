"""The arithmetic of the comparison."""

import pytest

from benchmarks.telemetry import Run, compare


def run(*, telemetry: bool, tokens_per_s: float, itl: float, front_us: float) -> Run:
    return Run(telemetry=telemetry, tokens_per_s=tokens_per_s, itl_p50_ms=itl, front_us=front_us)


def test_ratios_are_taken_within_pairs_whatever_their_order() -> None:
    runs = [
        run(telemetry=False, tokens_per_s=100, itl=10, front_us=50),
        run(telemetry=True, tokens_per_s=99, itl=11, front_us=52),
        run(telemetry=True, tokens_per_s=49, itl=22, front_us=54),
        run(telemetry=False, tokens_per_s=50, itl=20, front_us=51),
    ]
    found = compare(runs, 7, 2)
    assert found.pairs == 2
    assert found.throughput == pytest.approx((0.985, 0.9825, 0.9875))
    assert found.itl == pytest.approx((1.1, 1.1, 1.1))
    assert found.front_us == (50.5, 53)
    assert (found.spans, found.pushes) == (7, 2)
