"""Schedules that vLLM's own tests pin down, on this scheduler: what is equal, and what is not.

The numbers Snn count the scenarios of vLLM's test_scheduler.py, test_async_scheduler.py and
test_prefix_caching.py that concern features we have. Two things differ throughout: a pool has no
null block, so that ids begin at 0 and "11 blocks, 10 usable" are 10 here; and a block becomes
findable with the result of the step that filled it, not when that step is planned. Where more
differs, the test says what and why.
"""

import itertools

import numpy as np
import pytest

from services.scheduler.core.config import Config, Policy, PriorityClass
from services.scheduler.core.plan import AddRequest, EndReason, Events, Sampling, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from tests.fakes.kv_worker import KvWorker, expected_output

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
VOCAB = 50_000
RANKED = tuple(PriorityClass(name=str(rank), share=100, floor=10) for rank in range(9))
PRIORITY = {
    "policy": Policy.PRIORITY,
    "classes": RANKED,
    "default_class": "8",
    "ageing_us": 1 << 50,
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 1000 + place) % VOCAB for place in range(length)]


class Trace:
    """A scheduler and one worker that notices wrong block tables; what was planned, by handle."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 16,
        max_num_seqs: int = 128,
        budget: int = 1024,
        in_flight: int = 1,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {"prefill_chunk_size": budget, "policy": Policy.FCFS}
        self.core = Scheduler(Config(check_block_tables=True, **(settings | config)), SHA256)
        self.spec = WorkerSpec(
            worker_id="w",
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=4096,
            vocab_size=VOCAB,
            eos_token_ids=(),
            max_in_flight=in_flight,
            model_digest=b"model",
        )
        self.attach()
        self.prompts: dict[int, list[int]] = {}
        self.output: dict[int, list[int]] = {}
        self.ended: dict[int, EndReason] = {}
        self.blocks: dict[int, list[int]] = {}
        self.resent: dict[int, tuple[int, int]] = {}
        """Tokens and prompt length of the last record of a request that was sent again."""

    def attach(self) -> None:
        lowered, epoch, _ = self.core.attach(self.spec, 0)
        self.worker = KvWorker(lowered, epoch)

    def add(self, handle: int, prompt: list[int], max_tokens: int = 50, **fields: object) -> None:
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
        self._take(self.core.add(request, 0))

    def abort(self, *handles: int) -> None:
        for handle in handles:
            self._take(self.core.abort(handle, 0))
            self.core.check_invariants()

    def plan(self) -> dict[int, int]:
        """Tokens of each request in the next step, in batch order; the worker gets it."""
        plan = self.core.plan("w", 0)
        self.core.check_invariants()
        if plan is None:
            return {}
        handles = self.core._workers["w"].rows.handle
        rows = [int(handles[slot]) for slot in plan.slots.tolist()]
        for new in plan.new_rows:
            handle = int(handles[new.slot])
            if handle in self.blocks:
                self.resent[handle] = (new.token_ids.size, new.prompt_len)
            self.blocks[handle] = []
        ends = np.cumsum(plan.num_new_blocks).tolist()
        for handle, start, end in zip(rows, [0, *ends], ends, strict=False):
            self.blocks[handle] += plan.new_block_ids[start:end].tolist()
        self.worker.send(plan)
        return dict(zip(rows, plan.num_tokens.tolist(), strict=True))

    def apply(self) -> None:
        self._take(self.core.apply("w", self.worker.step(), 0))
        self.core.check_invariants()

    def step(self) -> dict[int, int]:
        """One step planned, and the oldest answered."""
        planned = self.plan()
        if self.worker.unanswered:
            self.apply()
        return planned

    def run(self) -> int:
        """Until nothing is left; all output is right. Returns the number of tokens scheduled."""
        tokens = 0
        for _ in range(2000):
            planned = self.step()
            tokens += sum(planned.values())
            if not planned and not self.worker.unanswered and self.core.is_idle:
                break
        assert self.core.is_idle
        for handle, prompt in self.prompts.items():
            output = self.output[handle]
            assert output == expected_output(prompt, len(output), VOCAB) if output else True
        return tokens

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        load = self.core.loads().workers[0]
        return load.blocks_free + load.blocks_evictable

    @property
    def cached(self) -> int:
        """Blocks that hold a prefix and no request."""
        return self.core.loads().workers[0].blocks_evictable

    @property
    def hits(self) -> int:
        return self.core.loads().counters.prefix_hit_tokens

    @property
    def preemptions(self) -> int:
        return self.core.loads().counters.preemptions

    def _take(self, events: Events) -> None:
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            self.output[handle].append(token)
        for end in events.ended:
            assert end.handle not in self.ended
            self.ended[end.handle] = end.reason


# Budget and chunks


def test_s01_all_that_fits_the_budget_goes_in_one_step() -> None:
    trace = Trace()
    for handle in range(10):
        trace.add(handle, prompt_of(10, handle))
    assert trace.plan() == dict.fromkeys(range(10), 10)
    loads = trace.core.loads()
    assert (loads.running, loads.waiting) == (10, 0)
    assert trace.hits == 0
    assert not trace.ended


def test_s05_long_prompts_share_the_budget_by_chunks() -> None:
    trace = Trace(prefill_chunk_size=400)
    for handle in range(3):
        trace.add(handle, prompt_of(800, handle))
    assert trace.step() == {0: 400, 1: 400, 2: 224}
    assert trace.step() == {0: 400, 1: 400, 2: 224}
    assert trace.step() == {0: 1, 1: 1, 2: 352}


def test_s11_the_next_step_is_planned_before_any_result() -> None:
    """Differs: A decodes beside B already, for its sampled token stays on the worker as the next
    step's input; vLLM's step of B alone would leave A idle for one step.
    """
    trace = Trace(max_num_seqs=2, in_flight=2)
    trace.add(1, prompt_of(512, 1))
    assert trace.plan() == {1: 512}
    trace.add(2, prompt_of(512, 2))
    assert trace.plan() == {1: 1, 2: 512}
    assert trace.plan() == {}
    trace.apply()
    assert trace.plan() == {1: 1, 2: 1}


def test_s12_a_chunk_of_the_second_prompt_fills_the_step() -> None:
    trace = Trace(max_num_seqs=3)
    for handle, length in enumerate((800, 800, 10, 10)):
        trace.add(handle, prompt_of(length, handle))
    assert trace.plan() == {0: 800, 1: 224}


# Preemption


def test_s13_a_late_token_of_a_preempted_request_is_kept() -> None:
    """Differs: a request enters only where it and the running ones also have their next block, so
    that two prompts that fill the pool to the last block run one after the other; nobody is
    preempted right after the prefill. With two blocks more both run until they need a third.
    """
    trace = Trace(num_blocks=10, budget=100, in_flight=2, enable_prefix_caching=False)
    trace.add(1, prompt_of(80, 1), 3)
    trace.add(2, prompt_of(80, 2), 3)
    assert trace.plan() == {1: 80}
    assert trace.plan() == {1: 1}
    trace.run()
    assert trace.preemptions == 0

    trace = Trace(num_blocks=12, budget=200, in_flight=2, enable_prefix_caching=False)
    trace.add(1, prompt_of(80, 1), 30)
    trace.add(2, prompt_of(80, 2), 30)
    trace.plan()
    for _ in range(50):
        trace.plan()
        if trace.preemptions:
            break
        trace.apply()
    assert trace.worker.unanswered == 2
    assert trace.core.loads().running == 1
    before = len(trace.output[2])
    while trace.worker.unanswered:
        trace.apply()
    assert len(trace.output[2]) == before + 1
    trace.run()
    assert {handle: len(output) for handle, output in trace.output.items()} == {1: 30, 2: 30}


def test_s14_requests_of_a_lost_worker_wait_in_their_order() -> None:
    """Stands for reset_prefix_cache with reset_running_requests: there is no verb that empties a
    pool under running requests but the loss of its worker.
    """
    trace = Trace(max_num_seqs=16)
    for handle in range(10):
        trace.add(handle, prompt_of(20, handle))
    trace.step()
    trace.core.lost("w", 0)
    trace.core.check_invariants()
    assert (trace.core.loads().running, trace.core.loads().waiting) == (0, 10)
    trace.attach()
    planned = trace.plan()
    assert planned == dict.fromkeys(range(10), 21), "prompt and the token that was delivered"
    assert list(planned) == list(range(10))
    assert trace.hits == 0


# Order and priority


def first_planned(trace: Trace) -> list[int]:
    """Handles in the order in which they first ran."""
    order: list[int] = []
    for _ in range(200):
        planned = trace.step()
        order += [handle for handle in planned if handle not in order]
        if trace.core.is_idle:
            break
    return order


def test_s23_the_most_important_goes_first_and_equals_by_arrival() -> None:
    trace = Trace(max_num_seqs=1, **PRIORITY)
    for rank in (5, 1, 8, 3, 2, 7, 4, 6):
        trace.add(rank, prompt_of(20, rank), 2, priority_class=str(rank))
    assert first_planned(trace) == [1, 2, 3, 4, 5, 6, 7, 8]

    trace = Trace(max_num_seqs=1, **PRIORITY)
    for handle, rank in enumerate((1, 0, 1, 0, 2, 1)):
        trace.add(handle, prompt_of(20, handle), 2, priority_class=str(rank))
    assert first_planned(trace) == [1, 3, 0, 2, 5, 4]


def test_s24_one_seat_is_for_the_most_important_whatever_came_first() -> None:
    trace = Trace(max_num_seqs=1, **PRIORITY)
    for handle, rank in enumerate((3, 2, 0)):
        trace.add(handle, prompt_of(20, handle), 2, priority_class=str(rank))
    assert first_planned(trace) == [2, 1, 0]


def test_s25_the_less_important_gives_its_memory_to_the_more_important() -> None:
    """Differs: it gives way when the other enters, one step earlier, for nobody enters without
    room for its next block.
    """
    trace = Trace(num_blocks=5, **PRIORITY)
    trace.add(1, prompt_of(32, 1), 20, priority_class="5")
    assert trace.step() == {1: 32}
    assert trace.step() == {1: 1}
    trace.add(2, prompt_of(32, 2), 20, priority_class="0")
    assert trace.step() == {2: 32}
    assert trace.preemptions == 1
    assert trace.step() == {2: 1}
    trace.run()
    assert [len(trace.output[handle]) for handle in (1, 2)] == [20, 20]
    assert trace.preemptions == 1


def test_s26_nobody_is_preempted_where_there_is_room() -> None:
    trace = Trace(num_blocks=20, **PRIORITY)
    for handle, rank in ((1, 5), (2, 5)):
        trace.add(handle, prompt_of(32, handle), 10, priority_class=str(rank))
    trace.step()
    trace.add(3, prompt_of(32, 3), 10, priority_class="0")
    assert trace.step() == {1: 1, 2: 1, 3: 32}
    trace.run()
    assert trace.preemptions == 0


def test_s27_a_preempted_request_resumes_with_all_its_tokens() -> None:
    trace = Trace(num_blocks=4, enable_prefix_caching=False, **PRIORITY)
    trace.add(1, prompt_of(30, 1), 20, priority_class="5")
    trace.step()
    trace.step()
    trace.add(2, prompt_of(32, 2), 4, priority_class="0")
    assert trace.step() == {2: 32}
    assert trace.preemptions == 1
    trace.run()
    assert trace.resent == {1: (32, 30)}
    assert [len(trace.output[handle]) for handle in (1, 2)] == [20, 4]


def test_s28_first_come_first_served_ignores_priorities() -> None:
    trace = Trace(max_num_seqs=1, **(PRIORITY | {"policy": Policy.FCFS}))
    for handle, rank in enumerate((5, 1, 8, 0)):
        trace.add(handle, prompt_of(20, handle), 2, priority_class=str(rank))
    assert first_planned(trace) == [0, 1, 2, 3]


# Ends


def test_s32_nothing_is_left_after_all_requests_ended() -> None:
    trace = Trace(num_blocks=40, in_flight=2)
    for handle in range(10):
        trace.add(handle, prompt_of(30 + handle, handle), 10)
    for _ in range(4):
        trace.step()
    trace.abort(3, 7)
    trace.run()
    loads = trace.core.loads()
    assert (loads.running, loads.waiting, loads.accepted, loads.ended) == (0, 0, 10, 10)
    assert set(trace.ended) == set(range(10))
    assert trace.free == 40
    assert not trace.core._by_handle
    assert not trace.core._workers["w"].rows.order.size


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_s34_no_token_is_scheduled_beyond_the_limit(max_tokens: int) -> None:
    trace = Trace(in_flight=2)
    for handle in (1, 2):
        trace.add(handle, prompt_of(20, handle), max_tokens)
    assert trace.run() == 2 * (20 + max_tokens - 1)
    assert [len(trace.output[handle]) for handle in (1, 2)] == [max_tokens] * 2


def test_s35_aborts_with_two_steps_in_flight() -> None:
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    trace = Trace(in_flight=2)
    for handle in range(10):
        trace.add(handle, prompt_of(20, handle))
    trace.plan()
    for handle in order:
        trace.plan()
        trace.abort(handle)
        trace.apply()
    assert trace.ended == dict.fromkeys(order, EndReason.ABORT)
    assert [len(trace.output[handle]) for handle in order] == list(range(10))
    trace.run()


# Prefix cache


def test_s36_an_equal_prompt_computes_only_its_last_block() -> None:
    """Differs: the second waits for the result of the step that fills its blocks, since what a
    step computes may fail; vLLM schedules 100 and 4 in one step.
    """
    trace = Trace()
    trace.add(1, prompt_of(100))
    trace.add(2, prompt_of(100))
    assert trace.step() == {1: 100}
    assert trace.step() == {1: 1, 2: 4}
    trace.add(3, prompt_of(100))
    assert trace.step() == {1: 1, 2: 1, 3: 4}


def test_s37_the_next_turn_computes_only_what_is_new() -> None:
    trace = Trace(in_flight=2)
    for handle in range(5):
        trace.add(handle, [handle, *prompt_of(99, handle)], 200)
    trace.run()
    for handle in range(5):
        turn = trace.prompts[handle] + trace.output[handle]
        trace.add(10 + handle, turn)
    assert trace.plan() == dict.fromkeys(range(10, 15), 300 % 16)


COMMON = prompt_of(48)


def two_sharing() -> Trace:
    """S40: the second request shares three blocks with the first."""
    trace = Trace(num_blocks=10)
    trace.add(1, COMMON + prompt_of(7, 1))
    assert trace.step() == {1: 55}
    assert trace.blocks[1] == [0, 1, 2, 3]
    assert trace.hits == 0
    trace.add(2, COMMON + prompt_of(5, 2))
    assert trace.step() == {1: 1, 2: 5}
    assert trace.blocks[2] == [0, 1, 2, 4]
    return trace


def test_s40_blocks_are_shared_and_the_new_part_gets_its_own() -> None:
    trace = two_sharing()
    assert trace.hits == 48
    assert trace.free == 5
    trace.abort(1)
    assert (trace.free, trace.cached) == (6, 0), "the shared ones are held still"


def test_s41_a_tail_is_given_up_before_its_prefix() -> None:
    """Differs: a block that holds nothing findable is taken before any that does, the last freed
    first, wherever it was in vLLM's one queue. Cached blocks go in the same order.
    """
    trace = two_sharing()
    trace.abort(1, 2)
    assert (trace.free, trace.cached) == (10, 3)
    trace.add(3, COMMON + prompt_of(5, 3))
    assert trace.step() == {3: 5}
    assert trace.blocks[3] == [0, 1, 2, 4]
    assert trace.free == 6
    trace.abort(3)
    trace.add(4, prompt_of(160, 4), 1)
    assert trace.step() == {4: 160}
    assert trace.blocks[4] == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    trace.run()


def test_s42_what_was_freed_first_is_given_up_first() -> None:
    """Differs as S41 does: the blank block 5 is taken before 9, which was never used. Here the
    second request ends first, for both with room for their next blocks do not fit the pool.
    """
    long = prompt_of(87)
    trace = Trace(num_blocks=10)
    trace.add(1, long)
    trace.add(2, prompt_of(48, 2), 1)
    trace.step()
    assert trace.blocks == {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8]}
    assert trace.cached == 3
    trace.abort(1)
    assert (trace.free, trace.cached) == (10, 8)
    trace.add(3, long[:35])
    assert trace.step() == {3: 3}
    assert trace.blocks[3] == [0, 1, 5]
    assert trace.free == 7
    trace.abort(3)
    trace.add(4, prompt_of(160, 4), 1)
    trace.step()
    assert trace.blocks[4] == [5, 9, 8, 7, 6, 4, 3, 2, 1, 0]


def test_what_an_aborted_request_had_in_flight_is_not_findable() -> None:
    """Not one of vLLM's, whose blocks are findable when their step is planned."""
    trace = Trace(num_blocks=10)
    trace.add(1, prompt_of(87))
    trace.plan()
    trace.abort(1)
    trace.apply()
    assert (trace.free, trace.cached) == (10, 0)
    trace.add(2, prompt_of(87))
    assert trace.step() == {2: 87}


def test_s43_a_block_given_anew_is_no_longer_found() -> None:
    trace = Trace(num_blocks=1)
    trace.add(1, prompt_of(16), 1)
    trace.run()
    assert (trace.cached, trace.blocks[1]) == (1, [0])
    trace.add(2, prompt_of(15, 2), 1)
    trace.step()
    assert (trace.cached, trace.blocks[2]) == (0, [0])
    trace.run()
    trace.add(3, prompt_of(16), 1)
    assert trace.step() == {3: 16}
    assert trace.hits == 0


def test_s44_a_hit_is_not_evicted_for_the_rest_of_its_own_request() -> None:
    a, b = prompt_of(16, 1), prompt_of(16, 2)
    trace = Trace(num_blocks=2)
    for handle, prompt in ((1, a), (2, b)):
        trace.add(handle, prompt, 1)
        trace.run()
    assert trace.cached == 2
    trace.add(3, a + prompt_of(16, 3), 1)
    assert trace.step() == {3: 16}
    assert trace.blocks[3] == trace.blocks[1] + trace.blocks[2]
    trace.run()


def test_s45_who_must_not_read_the_cache_still_fills_it() -> None:
    trace = Trace(num_blocks=20)
    trace.add(1, [*COMMON, 1], read_prefix_cache=False)
    assert trace.step() == {1: 49}
    trace.add(2, [*COMMON, 2])
    assert trace.step() == {1: 1, 2: 1}
    assert trace.blocks[2][:3] == trace.blocks[1][:3]
    trace.add(3, [*COMMON, 3], read_prefix_cache=False)
    assert trace.step() == {1: 1, 2: 1, 3: 49}
    assert not set(trace.blocks[3]) & set(trace.blocks[1])


def test_s46_decoding_takes_a_block_only_when_one_is_full() -> None:
    trace = Trace(num_blocks=20)
    trace.add(1, prompt_of(55))
    trace.step()
    for _ in range(4):
        assert trace.step() == {1: 1}
    assert len(trace.blocks[1]) == 4
    for _ in range(15):
        trace.step()
    assert len(trace.blocks[1]) == 5
    filled = (trace.prompts[1] + trace.output[1])[:64]
    trace.add(2, [*filled, 7])
    assert trace.step() == {1: 1, 2: 1}
    assert trace.blocks[2][:4] == trace.blocks[1][:4]


def test_s47_without_the_cache_blocks_come_and_go() -> None:
    trace = Trace(num_blocks=4, block_size=4, enable_prefix_caching=False)
    trace.add(1, prompt_of(10, 1), 1)
    trace.step()
    assert len(trace.blocks[1]) == 3
    trace.run()
    assert (trace.free, trace.cached) == (4, 0)
    trace.add(2, prompt_of(16, 2), 1)
    trace.add(3, prompt_of(4, 3), 1)
    assert trace.step() == {2: 16}
    assert len(trace.blocks[2]) == 4
    assert trace.step() == {3: 4}


def test_s49_only_the_same_salt_shares() -> None:
    trace = Trace(num_blocks=30)
    trace.add(1, COMMON + prompt_of(7, 1), salt=b"tone")
    trace.step()
    trace.add(2, COMMON + prompt_of(7, 2), salt=b"tone")
    trace.add(3, COMMON + prompt_of(7, 3), salt=b"ttwo")
    assert trace.step() == {1: 1, 2: 7, 3: 55}
    assert trace.hits == 48


def test_s50_hits_are_not_held_by_who_cannot_enter() -> None:
    trace = Trace(num_blocks=10)
    trace.add(1, COMMON, 1)
    trace.run()
    assert trace.cached == 3
    trace.add(2, prompt_of(70, 2), 8)
    trace.step()
    assert trace.free == 5
    trace.add(3, COMMON + prompt_of(40, 3), 5)
    for _ in range(5):
        assert trace.step() == {2: 1}
        assert (trace.free, trace.cached) == (5, 3), "as before"
    trace.run()
    assert trace.hits == 48
    assert trace.preemptions == 0


def test_s51_a_pool_that_begins_anew_has_no_prefixes() -> None:
    """Stands for reset_prefix_cache: a pool is emptied by attaching its worker anew only."""
    trace = Trace()
    trace.add(1, COMMON, 1)
    trace.run()
    assert trace.cached == 3
    trace.core.lost("w", 0)
    trace.attach()
    assert trace.cached == 0
    trace.add(2, [*COMMON, 1], 1)
    assert trace.step() == {2: 49}


def test_a_trace_does_not_depend_on_when_results_arrive() -> None:
    """Not one of vLLM's: output is the same whether one step or two are in flight."""
    outputs = []
    for in_flight, num_blocks in itertools.product((1, 2, 3), (14, 400)):
        trace = Trace(in_flight=in_flight, num_blocks=num_blocks, budget=64)
        for handle in range(6):
            trace.add(handle, prompt_of(40 + handle, handle), 30)
        trace.run()
        outputs.append(trace.output)
    assert all(output == outputs[0] for output in outputs)
