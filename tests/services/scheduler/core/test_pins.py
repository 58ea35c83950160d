"""Pinned prefixes: they outlive pressure from others, and give way to who needs the whole pool."""

from services.scheduler.core.plan import Pin
from services.scheduler.hashing import SHA256, tenant_salt
from tests.fakes.simulated_run import SimulatedRun

PREFIX = list(range(1000, 1064))
"""Four blocks."""


def pin(run: SimulatedRun, expires: int | None = None) -> bytes:
    """Pins PREFIX for the tenant without a name; its hashes."""
    parent, hashes = SHA256.root(b"model", tenant_salt("")), b""
    for start in range(0, len(PREFIX), 16):
        tokens = b"".join(token.to_bytes(4, "little") for token in PREFIX[start : start + 16])
        parent = SHA256.block(parent, tokens)
        hashes += parent
    run.core.pin(Pin(name="system", hashes=hashes, expires=expires), run.now)
    return hashes


def small_run() -> SimulatedRun:
    run = SimulatedRun(num_blocks=20, max_num_seqs=4, check=True)
    run.add([*PREFIX, 1], 2)
    run.drain(20)
    return run


def flood(run: SimulatedRun) -> None:
    """Many times the pool, of others' tokens."""
    for _ in range(20):
        run.add(100, 20, tenant="other")
    run.drain(2000)


def test_a_pinned_prefix_survives_pressure_from_others() -> None:
    run = small_run()
    hashes = pin(run)
    flood(run)
    assert run.core.cached_blocks(hashes) == 4
    again = run.add([*PREFIX, 2], 2)
    run.drain(20)
    assert again.end is not None
    assert again.end.cached_tokens == 64


def test_a_prefix_that_is_not_pinned_does_not() -> None:
    run = small_run()
    flood(run)
    again = run.add([*PREFIX, 2], 2)
    run.drain(20)
    assert again.end is not None
    assert again.end.cached_tokens == 0


def test_it_is_evicted_once_the_pin_has_expired() -> None:
    run = small_run()
    hashes = pin(run, expires=run.now + 5_000)
    assert run.core.next_wakeup(run.now) == run.now + 5_000
    flood(run)
    assert run.core.pins() == ()
    assert run.core.cached_blocks(hashes) == 0


def test_it_yields_to_the_lone_request_that_needs_the_pool() -> None:
    run = small_run()
    hashes = pin(run)
    whole = run.add(16 * 19, 16, tenant="other")
    run.drain(100)
    assert whole.finished
    assert whole.end is not None
    assert whole.end.preemptions == 0
    assert run.core.cached_blocks(hashes) == 0
    # The pin still stands: what is cached again is kept again.
    run.add([*PREFIX, 3], 2)
    run.drain(20)
    flood(run)
    assert run.core.cached_blocks(hashes) == 4


def test_it_yields_to_the_lone_request_that_grows_into_it() -> None:
    run = small_run()
    pin(run)
    grown = run.add(16, 16 * 19, tenant="other")
    run.drain(400)
    assert grown.finished
    assert grown.end is not None
    assert grown.end.preemptions == 0
