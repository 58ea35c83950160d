"""Arrivals: sources, prompts as views, synthetic loads."""

import tracemalloc

import numpy as np
import pytest

from services.scheduler.simulate.load import (
    Arrival,
    ClosedLoop,
    OpenLoop,
    Prompts,
    RequestMaker,
)
from services.scheduler.simulate.synthetic import Lengths, Load, arrivals


def of(prompt: int = 32, output: int = 4, **fields: object) -> Arrival:
    return Arrival(prompt_tokens=prompt, output_tokens=output, **fields)


def test_an_open_loop_gives_arrivals_at_their_times() -> None:
    source = OpenLoop([of(at_us=5), of(at_us=9)])
    assert source.next_at() == 5
    source.take(5)
    assert source.next_at() == 9
    source.take(9)
    assert source.next_at() is None


def test_a_closed_loop_sends_the_next_when_one_ended() -> None:
    source = ClosedLoop((of() for _ in range(4)), 2)
    assert source.next_at() == 0
    source.take(0)
    source.take(0)
    assert source.next_at() is None
    source.ended(70)
    assert source.next_at() == 70
    source.take(70)
    assert source.next_at() is None
    source.ended(80)
    source.take(80)
    source.ended(90)
    assert source.next_at() is None, "all four have been sent"


def test_a_client_of_a_closed_loop_waits_for_its_arrivals_time() -> None:
    source = ClosedLoop([of(), of(at_us=100)], 1)
    source.take(0)
    source.ended(30)
    assert source.next_at() == 100


def test_prompts_are_views_and_no_two_begin_alike() -> None:
    prompts = Prompts(0, 1024)
    made = [prompts.of(of(16)) for _ in range(2000)]
    assert all(prompt.base is made[0].base for prompt in made)
    assert len({prompt.tobytes() for prompt in made}) == 2000


def test_requests_of_a_session_share_their_beginning() -> None:
    prompts = Prompts(0, 1024)
    first, longer = (prompts.of(of(size, session="s")) for size in (40, 64))
    assert np.array_equal(longer[:40], first)
    one, other = (prompts.of(of(64, session="t", shared_tokens=48)) for _ in range(2))
    assert np.array_equal(one[:48], other[:48])
    assert not np.array_equal(one[48:], other[48:])
    assert one.size == 64
    assert not np.array_equal(one[:40], first)


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, again, other = (Prompts(seed, 64).of(of()) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_queued_request_is_small() -> None:
    maker = RequestMaker(Prompts(0, 8192))
    maker.make(of(8192), 0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    requests = [maker.make(of(8192, 128), handle) for handle in range(1000)]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(requests) < 700, "whatever the length of the prompt"


def test_a_request_with_a_longer_bound_ends_by_what_is_said() -> None:
    maker = RequestMaker(Prompts(0, 64))
    exact, bounded = maker.make(of(output=4), 0), maker.make(of(output=4, max_tokens=9), 1)
    assert (exact.max_tokens, exact.ignore_eos) == (4, True)
    assert (bounded.max_tokens, bounded.ignore_eos, bounded.sampling.seed) == (9, False, 4)


def test_tenants_do_not_share_cached_prefixes() -> None:
    maker = RequestMaker(Prompts(0, 64))
    assert maker.make(of(tenant="a"), 0).salt != maker.make(of(tenant="b"), 1).salt


def test_a_load_is_decided_by_its_seed() -> None:
    load = Load(
        requests=3000,
        prompt=Lengths(mean=100, sigma=0.6),
        output=Lengths(mean=50, sigma=0.6),
        rate=20.0,
        shared=0.5,
        shared_tokens=32,
        prefixes=3,
        classes=("x", "y"),
        tenants=("a", "b", "c"),
        cancelled=0.1,
        seed=5,
    )
    drawn = list(arrivals(load))
    assert drawn == list(arrivals(load))
    assert len(drawn) == 3000
    assert drawn[-1].at_us == pytest.approx(3000 / 20 * 1e6, rel=0.1)
    assert [one.at_us for one in drawn] == sorted(one.at_us for one in drawn)
    assert np.mean([one.prompt_tokens for one in drawn]) == pytest.approx(100, rel=0.06)
    assert max(one.prompt_tokens + one.output_tokens for one in drawn) <= load.longest
    assert sum(bool(one.session) for one in drawn) == pytest.approx(1500, rel=0.1)
    assert {one.session for one in drawn} == {"", "prefix 0", "prefix 1", "prefix 2"}
    assert sum(one.cancel_after_us is not None for one in drawn) == pytest.approx(300, rel=0.2)
    assert {(one.priority_class, one.tenant) for one in drawn} == {
        (name, tenant) for name in "xy" for tenant in "abc"
    }


def test_lengths_that_do_not_vary_are_exact() -> None:
    load = Load(requests=5, prompt=Lengths(mean=7), output=Lengths(mean=3))
    assert [(one.at_us, one.prompt_tokens, one.output_tokens) for one in arrivals(load)] == [
        (0, 7, 3)
    ] * 5
