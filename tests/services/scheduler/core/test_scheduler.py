"""Whole schedules as golden lists: one line per step, paste-ready when one changes."""

import numpy as np
import pytest

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    EndReason,
    Events,
    Refused,
    Sampling,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker, expected_output

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 1000


class Bench:
    """A scheduler, one checking worker, and a log of steps."""

    def __init__(self, *, num_blocks: int = 16, in_flight: int = 1, **config: object) -> None:
        self.core = Scheduler(Config(check_block_tables=True, **config), SHA256)
        spec = WorkerSpec(
            worker_id="w",
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            max_model_len=64,
            vocab_size=VOCAB,
            eos_token_ids=(),
            max_in_flight=in_flight,
            model_digest=b"model",
        )
        lowered, epoch, _ = self.core.attach(spec, 0)
        self.worker = KvWorker(lowered, epoch)
        self.log: list[str] = []
        self.output: dict[int, list[int]] = {}
        self.ended: dict[int, EndReason] = {}
        self.stops: dict[int, int | None] = {}
        self.prompts: dict[int, list[int]] = {}
        self._names: dict[int, int] = {}

    def add(self, handle: int, prompt: list[int], max_tokens: int, **fields: object) -> None:
        self.prompts[handle] = prompt
        self.output[handle] = []
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.array(prompt, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=GREEDY,
            **fields,
        )
        self.take(self.core.add(request, 0))

    def take(self, events: Events) -> None:
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            self.output[handle].append(token)
        for end in events.ended:
            self.ended[end.handle] = end.reason
            self.stops[end.handle] = end.stop_token_id

    def step(self) -> bool:
        plan = self.core.plan("w", 0)
        if plan is not None:
            self.worker.send(plan)
            handles = self.core._workers["w"].rows.handle
            rows = [
                f"{handles[slot]}:{count}"
                for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
            ]
            self.log.append(" ".join(rows) + (" -" * plan.released_slots.size))
        if self.worker.unanswered:
            self.take(self.core.apply("w", self.worker.step(), 0))
        self.core.check_invariants()
        return plan is not None

    def run(self) -> list[str]:
        for _ in range(500):
            if not self.step() and not self.worker.unanswered:
                break
        for handle, prompt in self.prompts.items():
            wanted = expected_output(prompt, len(self.output[handle]), VOCAB)
            assert self.output[handle] == wanted
        return self.log


def test_decodes_go_before_prefills_and_prefills_are_chunked() -> None:
    bench = Bench(num_blocks=32)
    bench.add(1, [1, 2, 3], 3)
    bench.step()
    bench.add(2, list(range(10, 30)), 2)
    assert bench.run() == ["1:3", "1:1 2:7", "1:1 2:7", "2:6 -", "2:1", " -"]
    assert bench.core.loads().counters.mixed_steps == 2
    assert bench.core.loads().counters.chunked_prefills == 2


def test_one_request_never_gets_more_than_its_chunk() -> None:
    bench = Bench(num_blocks=32, prefill_chunk_size=5)
    bench.add(1, list(range(12)), 1)
    bench.add(2, list(range(50, 54)), 1)
    assert bench.run() == ["1:5 2:3", "2:1 1:5", "1:2 -", " -"]


def test_an_equal_prompt_waits_for_the_block_being_filled_and_hits() -> None:
    bench = Bench(in_flight=2)
    bench.add(1, [1, 2, 3, 4, 5, 6], 2)
    bench.add(2, [1, 2, 3, 4, 5, 6], 2)
    bench.run()
    counters = bench.core.loads().counters
    assert counters.prefix_hit_tokens == 4
    assert counters.prompt_tokens == 6 + 2
    assert bench.output[1] == bench.output[2]


@pytest.mark.parametrize(("length", "hit"), [(7, 4), (8, 4), (9, 8)])
def test_a_prompt_that_is_cached_whole_computes_at_least_one_token(length: int, hit: int) -> None:
    bench = Bench()
    for handle in (1, 2, 3):
        bench.add(handle, list(range(length)), 2)
        bench.run()
        assert bench.core.loads().counters.prefix_hit_tokens == hit * (handle - 1)


def test_the_latest_arrival_is_preempted_and_finishes_later() -> None:
    bench = Bench(num_blocks=6, enable_prefix_caching=False)
    for handle in (1, 2):
        bench.add(handle, [handle, handle, handle, handle], 13)
    bench.run()
    counters = bench.core.loads().counters
    assert counters.preemptions == 1
    assert counters.recomputed_tokens > 0
    assert bench.ended == {1: EndReason.LENGTH, 2: EndReason.LENGTH}
    assert [len(bench.output[handle]) for handle in (1, 2)] == [13, 13]


def test_equals_do_not_push_each_other_out_in_turns() -> None:
    """Eight long requests on a pool for two: each is preempted a bounded number of times."""
    bench = Bench(num_blocks=12, in_flight=2)
    for handle in range(8):
        bench.add(handle, [handle] * 9, 24)
    bench.run()
    assert bench.core.loads().counters.preemptions <= 2 * 8
    assert set(bench.ended.values()) == {EndReason.LENGTH}


def test_a_request_of_the_whole_pool_runs_alone_to_its_end() -> None:
    bench = Bench(num_blocks=8)
    bench.add(1, [1] * 9, 3)
    bench.add(2, list(range(20)), 13)
    bench.add(3, [3], 3)
    bench.run()
    assert len(bench.output[2]) == 13
    assert set(bench.ended) == {1, 2, 3}


def test_a_stop_token_of_its_own_ends_a_request_and_no_other() -> None:
    prompts = {1: [1, 2, 3], 2: [4, 5], 3: [6]}
    wanted = {handle: expected_output(prompt, 12, VOCAB) for handle, prompt in prompts.items()}
    bench = Bench(in_flight=2, num_blocks=32)
    bench.add(1, prompts[1], 12, stop_token_ids=(999, wanted[1][5], wanted[2][2]))
    bench.add(2, prompts[2], 12)
    bench.add(3, prompts[3], 12, stop_token_ids=(wanted[3][0],))
    rows = bench.core._workers["w"].rows
    bench.step()
    assert 3 in bench.ended
    assert rows.stops.size == 3
    bench.run()
    assert bench.output == {1: wanted[1][:6], 2: wanted[2], 3: wanted[3][:1]}
    assert bench.ended == {1: EndReason.STOP, 2: EndReason.LENGTH, 3: EndReason.STOP}
    assert bench.stops == {1: wanted[1][5], 2: None, 3: wanted[3][0]}
    assert rows.stops.size == 0, "a row that is vacated takes its stop tokens along"


def test_a_slot_does_not_inherit_the_stop_tokens_of_its_last_request() -> None:
    wanted = expected_output([1, 2], 6, VOCAB)
    bench = Bench()
    for handle in range(20):
        stops = (wanted[3],) if handle % 2 else ()
        bench.add(handle, [1, 2], 6, stop_token_ids=stops)
        bench.run()
        assert bench.output[handle] == (wanted[:4] if stops else wanted)


def test_a_preempted_request_ends_at_its_stop_token() -> None:
    bench = Bench(num_blocks=6, enable_prefix_caching=False, in_flight=2)
    wanted = expected_output([2, 2, 2, 2], 13, VOCAB)
    bench.add(1, [1, 1, 1, 1], 13)
    bench.add(2, [2, 2, 2, 2], 13, stop_token_ids=(wanted[11],))
    bench.run()
    assert bench.core.loads().counters.preemptions >= 1
    assert (bench.output[2], bench.stops[2]) == (wanted[:12], wanted[11])


def test_what_is_resumed_after_its_stop_token_ends_at_once() -> None:
    bench = Bench()
    resumed = np.array([7, 8], np.uint32)
    bench.add(1, [1, 2], 6, resumed=resumed, stop_token_ids=(8,))
    assert (bench.ended, bench.stops) == ({1: EndReason.STOP}, {1: 8})
    bench.add(2, [1, 2], 2, resumed=resumed, stop_token_ids=(7,))
    assert (bench.ended[2], bench.stops[2]) == (EndReason.LENGTH, None)


def test_every_field_that_is_outside_a_limit_is_named() -> None:
    bench = Bench()
    with pytest.raises(Refused) as caught:
        bench.add(1, [VOCAB] * 3, 62, stop_token_ids=(5, VOCAB, VOCAB + 1))
    refusal = caught.value.refusal
    found = [(r.field, r.reason, r.limit, r.got) for r in (refusal, *refusal.others)]
    assert found == [
        ("request.prompt", "VOCABULARY", 999, 1000),
        ("request.stopping.stop_token_ids[1]", "VOCABULARY", 999, 1000),
        ("request.stopping.stop_token_ids[2]", "VOCABULARY", 999, 1001),
        ("request.stopping.max_tokens", "CONTEXT_LENGTH", 61, 62),
    ]


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "max_tokens", "reason", "limit"),
    [
        (16, 64, 1, "CONTEXT_LENGTH", 63),
        (16, 60, 10, "CONTEXT_LENGTH", 4),
        (8, 40, 1, "EXCEEDS_KV_CAPACITY", 32),
        (8, 30, 9, "EXCEEDS_KV_CAPACITY", 3),
    ],
)
def test_what_can_never_fit_is_refused_with_the_true_limit(
    num_blocks: int, prompt: int, max_tokens: int, reason: str, limit: int
) -> None:
    bench = Bench(num_blocks=num_blocks)
    with pytest.raises(Refused) as refused:
        bench.add(1, [1] * prompt, max_tokens)
    assert refused.value.refusal.reason == reason
    assert refused.value.refusal.limit == limit
    del bench.prompts[1]
    bench.add(2, [2], 2)
    bench.run()
    assert bench.ended == {2: EndReason.LENGTH}


def test_the_largest_request_that_fits_runs() -> None:
    bench = Bench(num_blocks=8)
    bench.add(1, [1] * 30, 3)
    bench.run()
    assert len(bench.output[1]) == 3


def test_decisions_are_the_same_for_the_same_inputs() -> None:
    logs = []
    for _ in range(2):
        bench = Bench(num_blocks=10, in_flight=2)
        for handle in range(12):
            bench.add(handle, [handle % 3] * (handle + 1), 5 + handle)
        logs.append(bench.run())
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("length", "log"), [(5, "1:1 2:5"), (9, "1:1")])
def test_who_comes_in_leaves_room_for_the_next_blocks_of_those_that_run(
    length: int, log: str
) -> None:
    """Of five blocks the first request holds two and is to get one: two are left for others."""
    bench = Bench(num_blocks=5)
    bench.add(1, [1, 2, 3, 4, 5, 6], 10)
    bench.step()
    bench.add(2, list(range(50, 50 + length)), 4)
    bench.step()
    assert bench.log[-1] == log
    bench.run()
    assert bench.ended == {1: EndReason.LENGTH, 2: EndReason.LENGTH}
    assert bench.core.loads().counters.preemptions == 0
