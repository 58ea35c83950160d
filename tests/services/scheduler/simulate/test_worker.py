"""The simulated worker: order, times, what rows say."""

from dataclasses import replace

import numpy as np

from services.scheduler.core.plan import NewRow, Sampling, StepPlan
from services.scheduler.simulate.step_model import EOS_TOKEN, StepModel
from services.scheduler.simulate.worker import SAID_TOKEN, SimulatedWorker

MODEL = StepModel(
    name="plain",
    base_us=1000.0,
    per_token_us=10.0,
    per_row_us=1.0,
    per_context_us=0.5,
    blocks=64,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
)


def row(slot: int, prompt: int, said: int, computed: int = 0) -> NewRow:
    return NewRow(
        slot=slot,
        handle=slot,
        token_ids=np.zeros(prompt, np.uint32),
        prompt_len=prompt,
        num_computed=computed,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=said),
        traceparent="",
    )


def plan(
    step: int, work: dict[int, int], *rows: NewRow, released: tuple[int, ...] = ()
) -> StepPlan:
    none = np.empty(0, np.int64)
    return StepPlan(
        epoch=1,
        step_id=step,
        released_slots=np.array(released, np.int64),
        new_rows=rows,
        slots=np.array(list(work), np.int64),
        num_tokens=np.array(list(work.values()), np.int64),
        num_new_blocks=none,
        new_block_ids=none,
        copied_from=none,
        copied_to=none,
        block_table_digest=None,
    )


def test_steps_are_answered_in_order_after_their_own_times() -> None:
    worker = SimulatedWorker(MODEL.spec("w"), MODEL)
    first = worker.submit(plan(1, {0: 20}, row(0, 20, 9)), now=100)
    second = worker.submit(plan(2, {0: 1}), now=100)
    assert first.result.execute_us == 1000 + 200 + 1 + 10
    assert first.done_at == 100 + 1211
    assert second.result.execute_us == round(1000 + 10 + 1 + 21 * 0.5)
    assert second.done_at == first.done_at + second.result.execute_us
    late = worker.submit(plan(3, {0: 1}), now=9000)
    assert late.done_at == 9000 + late.result.execute_us


def test_a_row_samples_once_all_it_knows_is_computed() -> None:
    worker = SimulatedWorker(MODEL.spec("w"), MODEL)
    chunk = worker.submit(plan(1, {0: 16}, row(0, 40, 9)), now=0).result
    assert chunk.counts.tolist() == [0]
    assert chunk.token_ids.size == 0
    last = worker.submit(plan(2, {0: 24}), now=0).result
    assert last.counts.tolist() == [1]
    assert last.token_ids.tolist() == [SAID_TOKEN]


def test_a_row_ends_with_an_end_of_sequence() -> None:
    worker = SimulatedWorker(MODEL.spec("w"), MODEL)
    worker.submit(plan(1, {0: 8, 1: 8}, row(0, 8, 2), row(1, 8, 5)), now=0)
    assert worker.submit(plan(2, {0: 1, 1: 1}), now=0).result.token_ids.tolist() == [
        EOS_TOKEN,
        SAID_TOKEN,
    ]


def test_a_resumed_row_goes_on_where_it_was() -> None:
    worker = SimulatedWorker(MODEL.spec("w"), MODEL)
    resumed = replace(row(0, 8, 3), token_ids=np.zeros(10, np.uint32))
    assert worker.submit(plan(1, {0: 10}, resumed), now=0).result.token_ids.tolist() == [EOS_TOKEN]


def test_filled_tokens_are_those_of_rows_that_are_not_released() -> None:
    worker = SimulatedWorker(MODEL.spec("w"), MODEL)
    worker.submit(plan(1, {0: 4, 1: 8}, row(0, 20, 9, computed=16), row(1, 8, 9)), now=0)
    assert worker.filled_tokens == 20 + 8
    worker.submit(plan(2, {1: 1}, released=(0,)), now=0)
    assert worker.filled_tokens == 9
    # A slot that is released and given again in one step, as at the change of static batches.
    worker.submit(plan(3, {1: 5}, row(1, 5, 9), released=(1,)), now=0)
    assert worker.filled_tokens == 5
