"""Cached blocks given up on demand: all that nobody uses, and nothing else."""

from services.scheduler.core.plan import Pin
from tests.fakes.simulated_run import SimulatedRun

PROMPT = list(range(1000, 1064))
"""Four blocks."""


def cached_after(run: SimulatedRun, last: int, *, tenant: str = "") -> int:
    """Tokens of the prompt that one more request finds cached."""
    one = run.add([*PROMPT, last], 2, tenant=tenant)
    run.drain(50)
    assert one.end is not None
    return one.end.cached_tokens


def small_run() -> SimulatedRun:
    return SimulatedRun(num_blocks=20, max_num_seqs=4, check=True)


def test_what_was_cached_is_computed_again() -> None:
    run = small_run()
    cached_after(run, 1)
    assert cached_after(run, 2) == 64
    evictable = run.core.loads().workers[0].blocks_evictable
    assert evictable >= 4
    assert run.core.flush(run.now) == evictable
    assert run.core.flush(run.now) == 0
    run.core.check_invariants()
    assert run.core.loads().workers[0].blocks_free == 20
    assert run.core.loads().counters.evicted_blocks == evictable
    assert cached_after(run, 3) == 0
    assert cached_after(run, 4) == 64


def test_a_pinned_prefix_stays() -> None:
    run = small_run()
    cached_after(run, 1)
    cached_after(run, 1, tenant="other")
    kept = run.core.cached_hashes()[:128]
    run.core.pin(Pin(name="kept", hashes=kept, expires=None), run.now)
    assert run.core.flush(run.now) == 4
    run.core.check_invariants()
    assert run.core.cached_hashes() == kept


def test_running_requests_go_on_and_stay_cached() -> None:
    run = small_run()
    cached_after(run, 1)
    long = run.add([*PROMPT, 2], 30)
    run.run(8)
    assert not long.finished
    run.core.flush(run.now)
    run.core.check_invariants()
    assert cached_after(run, 3) == 64
    assert long.end is not None
    assert long.end.completion_tokens == 30
    assert long.end.preemptions == 0
