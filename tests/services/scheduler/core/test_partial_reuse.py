"""Steps that copy the equal beginnings of blocks, on a worker that knows what its blocks hold."""

import random

import numpy as np
import pytest

from services.scheduler.core.config import Config, Eviction
from services.scheduler.core.plan import AddRequest, EndReason, Sampling, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker, expected_output

VOCAB = 13


class Course:
    """A core, its worker, and what came of the requests."""

    def __init__(self, config: Config, num_blocks: int) -> None:
        self.core = Scheduler(config, SHA256)
        spec, epoch, _ = self.core.attach(
            WorkerSpec(
                worker_id="w",
                num_blocks=num_blocks,
                block_size=4,
                max_num_seqs=4,
                max_num_batched_tokens=12,
                max_model_len=40,
                vocab_size=VOCAB,
                eos_token_ids=(),
                max_in_flight=2,
                model_digest=b"m",
            ),
            0,
        )
        self.worker = KvWorker(spec, epoch)
        self.wanted: dict[int, list[int]] = {}
        self.output: dict[int, list[int]] = {}
        self.now = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        handle = len(self.wanted)
        self.wanted[handle] = expected_output(prompt, max_tokens, VOCAB)
        self.output[handle] = []
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.array(prompt, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        )
        self.core.add(request, self.now)

    def turn(self) -> int:
        """Plans what can be planned and answers one step; returns how many ended."""
        self.now += 1000
        while self.worker.unanswered < 2:
            plan = self.core.plan("w", self.now)
            if plan is None:
                break
            self.worker.send(plan)
        ended = 0
        if self.worker.unanswered:
            events = self.core.apply("w", self.worker.step(), self.now)
            tokens = zip(events.handles.tolist(), events.token_ids.tolist(), strict=True)
            for handle, token in tokens:
                self.output[handle].append(token)
            for end in events.ended:
                assert end.reason is EndReason.LENGTH
                assert self.output[end.handle] == self.wanted[end.handle]
            ended = len(events.ended)
        self.core.check_invariants()
        return ended

    def finish(self) -> None:
        for _ in range(100):
            if self.turn():
                return
        raise AssertionError("nothing ended")

    def copies(self) -> list[tuple[int, int]]:
        return [
            pair
            for plan in self.worker.sent
            for pair in zip(plan.copied_from.tolist(), plan.copied_to.tolist(), strict=True)
        ]


def config(**changes: object) -> Config:
    return Config(check_block_tables=True, prefill_chunk_size=6, **changes)  # type: ignore[arg-type]


def test_the_equal_beginning_of_a_block_is_copied() -> None:
    course = Course(config(partial_block_reuse=True), 16)
    course.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    course.finish()
    course.add([1, 2, 3, 4, 5, 6, 0, 0], 3)
    course.finish()
    second = course.worker.sent[0].new_block_ids[1]
    ((source, _),) = course.copies()
    assert source == second
    assert course.core.loads().counters.partial_hit_tokens == 2
    assert course.core.loads().counters.prefix_hit_tokens == 6


def test_a_prompt_that_is_cached_whole_computes_one_token() -> None:
    course = Course(config(partial_block_reuse=True), 16)
    for _ in range(2):
        course.add([1, 2, 3, 4, 5, 6, 7, 8], 3)
        course.finish()
    assert course.core.loads().counters.partial_hit_tokens == 3


def test_without_the_option_nothing_is_copied() -> None:
    course = Course(config(), 16)
    for _ in range(2):
        course.add([1, 2, 3, 4, 5, 6, 7, 8], 3)
        course.finish()
    assert not course.copies()


def test_a_request_that_fills_the_pool_needs_no_room_for_a_source() -> None:
    course = Course(config(partial_block_reuse=True), 4)
    course.add([1, 2, 3, 4, 5], 11)
    course.finish()
    course.add([1, 2, 3, 0, 0], 11)
    course.finish()


@pytest.mark.parametrize("eviction", list(Eviction))
@pytest.mark.parametrize("num_blocks", [12, 16, 24])
def test_small_pools_under_load_give_what_each_request_gives(
    eviction: Eviction, num_blocks: int
) -> None:
    rng = random.Random(num_blocks)
    course = Course(config(partial_block_reuse=True, eviction=eviction), num_blocks)
    ended = 0
    for turn in range(400):
        if turn < 250 and rng.random() < 0.2:
            shared = [token % VOCAB for token in range(rng.randint(0, 14))]
            own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            course.add(shared + own, rng.randint(1, 12))
        ended += course.turn()
    assert ended == len(course.wanted)
    assert course.copies()
