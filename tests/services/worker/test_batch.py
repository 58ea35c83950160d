import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from services.worker.batch import gather
from services.worker.plan import Attachment, FailureKind, NewRow, StepLimits, StepPlan
from services.worker.rows import RequestRows

CPU = torch.device("cpu")
LIMITS = StepLimits(
    block_size=4,
    num_blocks=1000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=40,
    vocab_size=500,
    max_in_flight=2,
)
ATTACHMENT = Attachment(epoch=1, max_num_seqs=8, num_slots=24, check_block_tables=False)


@dataclass
class Request:
    """What a request is, kept apart from the rows under test."""

    slot: int
    tokens: list[int]
    prompt_len: int
    computed: int
    sampling: tuple[float, float, int, int]
    failed: bool = False
    blocks: list[int] = field(default_factory=list)


def empty():
    return np.zeros(0, np.int64)


def step_of(step_id, chunks, *, new=(), released=(), blocks=None):
    """A plan over (request, tokens) pairs; appends the blocks each one lacks."""
    counts, appended = [], []
    for request, chunk in chunks:
        lacking = -(-(request.computed + chunk) // LIMITS.block_size) - len(request.blocks)
        fresh = [next(blocks) for _ in range(max(0, lacking))]
        request.blocks += fresh
        counts.append(len(fresh))
        appended += fresh
    return StepPlan(
        epoch=1,
        step_id=step_id,
        released_slots=np.array(released, np.int64),
        new_rows=tuple(
            NewRow(
                slot=request.slot,
                token_ids=np.array(request.tokens, np.uint32),
                prompt_len=request.prompt_len,
                num_computed=request.computed,
                temperature=request.sampling[0],
                top_p=request.sampling[1],
                top_k=request.sampling[2],
                seed=request.sampling[3],
                traceparent="",
            )
            for request in new
        ),
        slots=np.array([request.slot for request, _ in chunks], np.int64),
        num_tokens=np.array([chunk for _, chunk in chunks], np.int64),
        num_new_blocks=np.array(counts, np.int64),
        new_block_ids=np.array(appended, np.int64),
        block_table_digest=None,
    )


def check_against_loops(batch, chunks):
    """Rebuilds the batch one token at a time, from the requests alone."""
    chunks = [(row, request, n) for row, (request, n) in enumerate(chunks) if not request.failed]
    ordered = [chunk for chunk in chunks if chunk[2] == 1] + [c for c in chunks if c[2] != 1]
    ids, positions, places, starts = [], [], [], [0]
    last_token = {}
    for row, request, n in ordered:
        for position in range(request.computed, request.computed + n):
            ids.append(request.tokens[position])
            positions.append(position)
            block = request.blocks[position // LIMITS.block_size]
            places.append(block * LIMITS.block_size + position % LIMITS.block_size)
        starts.append(len(ids))
        last_token[row] = len(ids) - 1
    attention = batch.attention
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert attention.slot_mapping.tolist() == places
    assert attention.query_start_loc.tolist() == starts
    ends = [request.computed + n for _, request, n in ordered]
    assert attention.seq_lens.tolist() == ends
    assert attention.num_decode_rows == sum(n == 1 for _, _, n in chunks)
    assert (attention.max_query_len, attention.max_seq_len) == (
        max(n for _, _, n in chunks),
        max(ends),
    )
    for table, (_, request, n) in zip(attention.block_tables.tolist(), ordered, strict=True):
        used = -(-(request.computed + n) // LIMITS.block_size)
        assert table[:used] == request.blocks[:used]
    samples = [
        (row, request) for row, request, n in chunks if request.computed + n == len(request.tokens)
    ]
    assert batch.logits_rows.tolist() == [last_token[row] for row, _ in samples]
    assert batch.sampled_rows.tolist() == [row for row, _ in samples]
    assert batch.sampled_slots.tolist() == [request.slot for _, request in samples]
    sampling = batch.sampling
    assert [
        (float(t), float(p), int(k), int(s) % 2**64)
        for t, p, k, s in zip(
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, strict=True
        )
    ] == [request.sampling for _, request in samples]
    assert sampling.position.tolist() == [
        len(request.tokens) - request.prompt_len for _, request in samples
    ]
    for tensor in (batch.input_ids, batch.positions, batch.logits_rows, attention.slot_mapping):
        assert tensor.dtype is torch.int64
    for tensor in (attention.query_start_loc, attention.seq_lens, attention.block_tables):
        assert tensor.dtype is torch.int32


def make_request(rng, slot):
    length = rng.randint(1, 30)
    prompt_len = rng.randint(1, length)
    return Request(
        slot=slot,
        tokens=[rng.randrange(LIMITS.vocab_size) for _ in range(length)],
        prompt_len=prompt_len,
        computed=rng.choice([0, 0, rng.randint(0, length - 1)]),
        sampling=(
            rng.choice([0.0, 0.5, 1.0]),
            rng.choice([1.0, 0.5]),
            rng.choice([0, 7]),
            rng.choice([0, 2**63 + 11, 2**64 - 1]),
        ),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_match_loops(seed):
    """Mixed prefill, decode, failures, release and re-add in random order."""
    rng = random.Random(seed)
    rows = RequestRows(ATTACHMENT, LIMITS)
    live: list[Request] = []
    mixed = 0
    for step_id in range(1, 80):
        blocks = iter(rng.sample(range(LIMITS.num_blocks), 200))
        released = [request for request in live if rng.random() < 0.1]
        released += [r for r in live if r not in released and len(r.tokens) >= LIMITS.max_model_len]
        live = [request for request in live if request not in released]
        free = sorted(set(range(ATTACHMENT.num_slots)) - {r.slot for r in live + released})
        room = LIMITS.max_num_seqs - len(live)
        new = [make_request(rng, slot) for slot in rng.sample(free, rng.randint(0, room))]
        old = [request for request in live if rng.random() < 0.8]
        chunks, budget = [], LIMITS.max_num_batched_tokens
        for request in rng.sample(old + new, len(old) + len(new)):
            left = len(request.tokens) - request.computed
            chunk = rng.choice([left, rng.randint(1, left)])
            chunks.append((request, min(chunk, max(1, budget - 8 * 1))))
            budget -= chunks[-1][1]
        if budget < 0:  # too many tokens: one each
            chunks = [(request, 1) for request, _ in chunks]
        live += new
        plan = step_of(step_id, chunks, new=new, released=[r.slot for r in released], blocks=blocks)
        rows.apply(plan)
        batch = gather(rows, plan, CPU)
        if all(request.failed for request, _ in chunks):
            assert batch is None
            continue
        check_against_loops(batch, chunks)
        counts = {n for request, n in chunks if not request.failed}
        mixed += 1 in counts and len(counts) > 1
        rows.advance(batch.slots, batch.num_tokens)
        sampled = rng.choices(range(LIMITS.vocab_size), k=len(batch.sampled_slots))
        rows.append_tokens(batch.sampled_slots, np.array(sampled, np.int64))
        by_slot = dict(zip(batch.sampled_slots.tolist(), sampled, strict=True))
        for request, chunk in chunks:
            if request.failed:
                continue
            request.computed += chunk
            if request.slot in by_slot:
                request.tokens.append(by_slot[request.slot])
                if rng.random() < 0.05:
                    request.failed = True
                    rows.fail(request.slot, FailureKind.NOT_FINITE, "not finite")
    assert mixed > 10


def test_a_step_without_rows_has_no_batch():
    rows = RequestRows(ATTACHMENT, LIMITS)
    plan = step_of(1, [])
    rows.apply(plan)
    assert gather(rows, plan, CPU) is None


def test_chunks_that_end_early_sample_nothing():
    rows = RequestRows(ATTACHMENT, LIMITS)
    request = Request(0, [1, 2, 3], 3, 0, (0.0, 1.0, 0, 0))
    plan = step_of(1, [(request, 2)], new=[request], blocks=iter([5]))
    rows.apply(plan)
    batch = gather(rows, plan, CPU)
    assert batch.logits_rows.shape == (0,)
    assert batch.sampling.temperature.shape == (0,)
    assert batch.input_ids.tolist() == [1, 2]
