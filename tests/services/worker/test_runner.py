"""Steps on a real model: whatever a schedule does, each request gets the tokens it gets alone."""

import dataclasses
import itertools
import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.plan import LinkProtocolError, NewRow, StepPlan

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}


@dataclass
class Request:
    """A request, as the schedule of a test knows it."""

    tokens: list[int]
    sampling: dict[str, float]
    seed: int = 7
    slot: int = -1
    computed: int = 0
    prompt_len: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.prompt_len = len(self.tokens)

    @property
    def output(self):
        return self.tokens[self.prompt_len :]


class Schedule:
    """Turns "these requests, so many tokens each" into plans, and keeps the books of both ends."""

    def __init__(self, runner, limits, epoch=1):
        self.runner = runner
        self.block_size = limits.block_size
        self.epoch = epoch
        self.step_id = 0
        self.free_blocks = list(range(limits.num_blocks))
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []

    def release(self, request):
        """Ends or preempts a request."""
        self.released.append(request.slot)
        self.free_blocks = request.blocks + self.free_blocks
        request.blocks, request.slot, request.computed = [], -1, 0

    def plan(self, chunks, slots=None):
        """One step; `slots` names those of requests that are new to the worker."""
        new, appended = [], []
        for request, count in chunks:
            held = len(request.blocks)
            needed = -(-(request.computed + count) // self.block_size)
            request.blocks += [self.free_blocks.pop() for _ in range(needed - held)]
            if request.slot < 0:
                request.slot = (slots or {})[id(request)]
                new.append(self._record(request))
                held = 0  # the worker is told of a found prefix too
            appended.append(request.blocks[held:])
        self.step_id += 1
        released, self.released = self.released, []
        copies, self.copies = self.copies, []
        return StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            released_slots=np.array(released, np.int64),
            new_rows=tuple(new),
            slots=np.array([request.slot for request, _ in chunks], np.int64),
            num_tokens=np.array([count for _, count in chunks], np.int64),
            num_new_blocks=np.array([len(blocks) for blocks in appended], np.int64),
            new_block_ids=np.array([b for blocks in appended for b in blocks], np.int64),
            block_table_digest=None,
            copied_from=np.array([source for source, _ in copies], np.int64),
            copied_to=np.array([target for _, target in copies], np.int64),
        )

    def step(self, *chunks, slots=None):
        """Runs one step and takes its tokens; returns the result."""
        plan = self.plan(chunks, slots)
        result = self.runner.execute(plan)
        tokens = iter(result.token_ids.tolist())
        for (request, count), sampled in zip(chunks, result.counts.tolist(), strict=True):
            request.computed += count
            request.tokens += itertools.islice(tokens, sampled)
        assert next(tokens, None) is None
        assert (result.epoch, result.step_id) == (self.epoch, self.step_id)
        return result

    @staticmethod
    def _record(request):
        return NewRow(
            slot=request.slot,
            token_ids=np.array(request.tokens, np.uint32),
            prompt_len=request.prompt_len,
            num_computed=request.computed,
            seed=request.seed,
            traceparent="",
            **request.sampling,
        )


@pytest.fixture
def alone(bench, limits):
    """What a request gives by itself: its prompt in one step, then a token a step."""

    def run(prompt, sampling, length, seed=7):
        request = Request(list(prompt), sampling, seed)
        schedule = Schedule(bench.runner(), limits)
        schedule.step((request, len(prompt)), slots={id(request): 0})
        for _ in range(length - 1):
            schedule.step((request, 1))
        return request.output

    return run


def prompt(seed, length):
    return random.Random(seed).choices(range(10, 250), k=length)


def test_decoding_continues_what_a_longer_prompt_would_give(bench, limits, alone):
    """The oracle is the model itself without any cached step: all tokens as one prompt."""
    output = alone(prompt(1, 9), GREEDY, 12)
    for known in range(len(output)):
        assert alone(prompt(1, 9) + output[:known], GREEDY, 1) == output[known : known + 1]
    assert len(set(output)) > 3


def test_the_seed_and_the_position_decide_a_draw(alone):
    output = alone(prompt(1, 9), DRAWN, 12)
    assert output == alone(prompt(1, 9), DRAWN, 12)
    assert output != alone(prompt(1, 9), DRAWN, 12, seed=8)
    assert output != alone(prompt(1, 9), GREEDY, 12)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_chunks_and_neighbours_change_nothing(bench, limits, alone, sampling):
    """Prefill in chunks beside decoding rows: a mixed batch in every step."""
    schedule = Schedule(bench.runner(), limits)
    first = Request(prompt(1, 9), sampling)
    long = Request(prompt(2, 30), sampling)
    late = Request(prompt(3, 1), sampling)
    result = schedule.step((first, 9), (long, 7), slots={id(first): 4, id(long): 0})
    assert result.counts.tolist() == [1, 0]
    result = schedule.step((long, 20), (first, 1))
    assert result.counts.tolist() == [0, 1]
    schedule.step((late, 1), (long, 3), (first, 1), slots={id(late): 17})
    for _ in range(9):
        schedule.step((first, 1), (late, 1), (long, 1))
    assert first.output == alone(prompt(1, 9), sampling, 12)
    assert long.output == alone(prompt(2, 30), sampling, 10)
    assert late.output == alone(prompt(3, 1), sampling, 10)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_preempted_request_goes_on_in_another_slot_as_if_nothing_had_been(
    bench, limits, alone, sampling
):
    schedule = Schedule(bench.runner(), limits)
    request, other = Request(prompt(1, 9), sampling), Request(prompt(4, 6), sampling)
    schedule.step((request, 9), (other, 6), slots={id(request): 0, id(other): 1})
    for _ in range(4):
        schedule.step((other, 1), (request, 1))
    schedule.release(request)
    schedule.step((other, 1))
    schedule.step((other, 1), (request, 10), slots={id(request): 9})
    schedule.step((request, 4), (other, 1))
    for _ in range(6):
        schedule.step((request, 1), (other, 1))
    assert request.output == alone(prompt(1, 9), sampling, 12)
    assert other.output == alone(prompt(4, 6), sampling, 14)


def test_a_found_prefix_is_not_computed_again(bench, limits, alone):
    """The second request takes the first one's full blocks, and computes the rest alone."""
    schedule = Schedule(bench.runner(), limits)
    shared = prompt(5, 10)
    first = Request(shared + prompt(6, 3), GREEDY)
    second = Request(shared + prompt(7, 5), GREEDY)
    schedule.step((first, 13), slots={id(first): 0})
    second.blocks, second.computed = first.blocks[:2], 8
    schedule.step((first, 1), (second, 7), slots={id(second): 1})
    for _ in range(5):
        schedule.step((first, 1), (second, 1))
    assert first.output == alone(shared + prompt(6, 3), GREEDY, 7)
    assert second.output == alone(shared + prompt(7, 5), GREEDY, 6)


def test_the_equal_beginning_of_a_block_is_not_computed_again(bench, limits, alone):
    """The second request gets a copy of the first one's second block, of which it uses a part."""
    schedule = Schedule(bench.runner(), limits)
    shared = prompt(5, 6)
    first = Request(shared + prompt(6, 3), GREEDY)
    second = Request(shared + prompt(7, 5), GREEDY)
    schedule.step((first, 9), slots={id(first): 0})
    own = schedule.free_blocks.pop()
    second.blocks, second.computed = [first.blocks[0], own], 6
    schedule.copies = [(first.blocks[1], own)]
    schedule.step((first, 1), (second, 5), slots={id(second): 1})
    for _ in range(5):
        schedule.step((first, 1), (second, 1))
    assert first.output == alone(shared + prompt(6, 3), GREEDY, 7)
    assert second.output == alone(shared + prompt(7, 5), GREEDY, 6)


def test_random_schedules_give_what_each_request_gives_alone(bench, limits, alone):
    """Arrivals, chunks, pauses, preemptions, ends in random order; blocks go from hand to hand."""
    rng = random.Random(3)
    schedule = Schedule(bench.runner(), limits)
    cases = [(prompt(seed, rng.randint(1, 20)), rng.choice([GREEDY, DRAWN])) for seed in range(14)]
    waiting = [Request(list(tokens), sampling) for tokens, sampling in cases]
    requests, running, slot_of = list(waiting), [], {}
    slots = itertools.cycle(range(18))
    while waiting or running:
        for request in [r for r in running if len(r.output) >= 8]:
            running.remove(request)
            schedule.release(request)
        if len(running) > 2 and rng.random() < 0.2:
            victim = running.pop(rng.randrange(len(running)))
            schedule.release(victim)
            waiting.append(victim)
        while waiting and len(running) < limits.max_num_seqs and rng.random() < 0.5:
            running.append(waiting.pop(0))
            taken = {r.slot for r in running} | set(schedule.released)
            slot_of[id(running[-1])] = next(slot for slot in slots if slot not in taken)
        chunks, budget = [], limits.max_num_batched_tokens - len(running)
        for request in rng.sample(running, len(running)):
            if request.slot >= 0 and rng.random() < 0.1:
                continue
            left = len(request.tokens) - request.computed
            count = min(left, 1 + rng.randint(0, budget))
            budget -= count - 1
            chunks.append((request, count))
        assert schedule.step(*chunks, slots=slot_of).failures == ()
    for request, (tokens, sampling) in zip(requests, cases, strict=True):
        assert request.output == alone(tokens, sampling, 8)


def test_one_request_that_cannot_be_computed_leaves_the_others_good(bench, limits, alone, poison):
    schedule = Schedule(bench.runner(), limits)
    good, bad = Request(prompt(1, 9), GREEDY), Request([11, poison, 12], GREEDY)
    slots = {id(good): 0, id(bad): 1}
    result = schedule.step((bad, 2), (good, 9), slots=slots)
    assert (result.counts.tolist(), result.failures) == ([0, 1], ())
    result = schedule.step((bad, 1), (good, 1))
    assert result.counts.tolist() == [0, 1]
    (failure,) = result.failures
    assert (failure.slot, failure.message) == (1, "the model gave logits that are not finite")
    # The step planned before that was known: one token more than the row has.
    result = schedule.step((bad, 1), (good, 1))
    assert result.counts.tolist() == [0, 1]
    assert [failure.slot for failure in result.failures] == [1]
    schedule.release(bad)
    # Its blocks and its slot serve the next one.
    late = Request(prompt(3, 7), GREEDY)
    schedule.step((good, 1))
    result = schedule.step((late, 7), (good, 1), slots={id(late): 1})
    assert result.failures == ()
    for _ in range(4):
        schedule.step((good, 1), (late, 1))
    assert good.output == alone(prompt(1, 9), GREEDY, 9)
    assert late.output == alone(prompt(3, 7), GREEDY, 5)


def test_a_request_with_a_token_that_does_not_exist_fails_alone(bench, limits, alone):
    schedule = Schedule(bench.runner(), limits)
    good, bad = Request(prompt(1, 9), GREEDY), Request([11, limits.vocab_size], GREEDY)
    result = schedule.step((bad, 2), (good, 9), slots={id(good): 0, id(bad): 1})
    assert result.counts.tolist() == [0, 1]
    assert f"ids are below {limits.vocab_size}" in result.failures[0].message
    for _ in range(3):
        schedule.step((good, 1))
    assert good.output == alone(prompt(1, 9), GREEDY, 4)


def test_steps_that_compute_nothing(bench, limits):
    schedule = Schedule(bench.runner(), limits)
    result = schedule.step()
    assert (result.counts.size, result.token_ids.size, result.failures) == (0, 0, ())
    bad = Request([limits.vocab_size], GREEDY)
    result = schedule.step((bad, 1), slots={id(bad): 3})
    assert (result.counts.tolist(), len(result.failures)) == ([0], 1)
    schedule.release(bad)
    assert schedule.step().failures == ()


def test_a_violation_is_passed_on(bench, limits):
    runner = bench.runner()
    schedule = Schedule(runner, limits)
    request = Request(prompt(1, 9), GREEDY)
    schedule.step((request, 9), slots={id(request): 0})
    plan = schedule.plan([(request, 1)])
    wrong = dataclasses.replace(
        plan, num_new_blocks=np.array([1]), new_block_ids=np.array([limits.num_blocks])
    )
    with pytest.raises(LinkProtocolError, match="block ids are below 48"):
        runner.execute(wrong)


def test_what_the_forward_raises_is_passed_on(bench, limits):
    """The cache holds fewer blocks than was registered, so the kernels fail."""
    schedule = Schedule(bench.runner(num_blocks=2), limits)
    request = Request(prompt(1, 9), GREEDY)
    with pytest.raises((IndexError, RuntimeError)):
        schedule.step((request, 9), slots={id(request): 0})


def test_only_traced_steps_of_a_runner_that_traces_are_measured(bench, limits):
    for traced in (True, False):
        runner = bench.runner(traced=traced)
        schedule = Schedule(runner, limits)
        request = Request(prompt(1, 9), GREEDY)
        plan = schedule.plan([(request, 9)], {id(request): 0})
        began = time.monotonic_ns()
        phases = runner.execute(dataclasses.replace(plan, traceparent="00-1-1-01")).phases
        took_us = (time.monotonic_ns() - began) // 1000
        if traced:
            assert phases.forward_us > 0
            assert phases.batch_us + phases.forward_us + phases.sample_us <= took_us
        else:
            assert phases is None
        request.computed += 9
        request.tokens.append(1)
        assert runner.execute(schedule.plan([(request, 1)], None)).phases is None
