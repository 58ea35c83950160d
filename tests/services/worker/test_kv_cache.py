import dataclasses
import logging
import os

import numpy as np
import pytest
import torch

from kernels.interface import KVCacheSpec
from services.chassis.process import StartupError
from services.worker.kv_cache import (
    MemoryRequest,
    StepMemory,
    choose_num_blocks,
    largest_step,
    measure,
    pool_bytes,
)
from services.worker.machine import Machine
from services.worker.plan import StepLimits
from services.worker.rows import RequestRows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
LIMITS = StepLimits(
    block_size=16,
    num_blocks=1000,
    max_num_seqs=128,
    max_num_batched_tokens=256,
    max_model_len=8192,
    vocab_size=100,
    max_in_flight=2,
)
# 2 layers x 2 (keys, values) x 4 heads x 8 numbers x 4 bytes = 512 bytes a token.
SPEC = KVCacheSpec(num_layers=2, num_kv_heads=4, head_dim=8, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "tokens", "rows", "full"),
    [
        ({}, 256, 128, False),
        ({"max_num_seqs": 1}, 256, 1, False),
        ({"max_num_batched_tokens": 100}, 100, 100, False),  # fewer tokens than rows
        ({"max_model_len": 65}, 256, 128, False),
        ({"max_num_seqs": 4, "max_model_len": 65}, 256, 4, True),
        ({"max_num_seqs": 2, "max_model_len": 65}, 128, 2, True),  # two rows hold no more
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, 1, 1, False),
        ({"max_num_seqs": 1, "max_model_len": 2}, 1, 1, True),
    ],
)
def test_the_largest_step_is_legal_and_as_large_as_the_limits(changes, tokens, rows, full):
    limits = dataclasses.replace(LIMITS, **changes)
    profile = largest_step(limits)
    plan = profile.steps[0]
    state = RequestRows(
        profile.attachment, dataclasses.replace(limits, num_blocks=profile.num_blocks)
    )
    state.apply(plan)  # refuses what is too large
    assert int(plan.num_tokens.sum()) == tokens
    assert len(plan.slots) == rows
    assert [len(row.token_ids) for row in plan.new_rows] == plan.num_tokens.tolist()
    state.advance(plan.slots, plan.num_tokens)
    state.append_tokens(plan.slots, np.zeros(len(plan.slots), np.int64))
    for smallest in profile.steps[1:]:
        state.apply(smallest)
        assert smallest.num_tokens.tolist() == [1]
    assert len(profile.steps) == (1 if full else 2)


def test_the_profile_needs_the_blocks_of_one_row_only():
    profile = largest_step(LIMITS)
    assert profile.num_blocks == 9  # 129 tokens
    assert all(step.new_block_ids.max(initial=0) < 9 for step in profile.steps)


def test_cpu_memory_is_measured_at_its_peak():
    def step():
        block = bytearray(os.urandom(1)) * (96 * 2**20)
        del block

    memory = measure(step, CPU, Machine())
    assert 90 * 2**20 < memory.peak_bytes < GIB
    assert memory.free_bytes > 0


@pytest.mark.parametrize(
    ("request_", "device", "expected"),
    [
        (MemoryRequest(kv_cache_bytes=123, share=0.5), CPU, 123),
        (MemoryRequest(kv_cache_bytes=123, share=None), CUDA, 123),
        (MemoryRequest(kv_cache_bytes=None, share=None), CPU, GIB),  # half of 6 GiB, capped
        (MemoryRequest(kv_cache_bytes=None, share=None, local_workers=4), CPU, GIB / 4),
        (MemoryRequest(kv_cache_bytes=None, share=0.75, local_workers=4), CPU, 4.5 * GIB),
        (MemoryRequest(kv_cache_bytes=123, share=None, local_workers=4), CPU, 123),
        (MemoryRequest(kv_cache_bytes=None, share=0.75), CPU, 4.5 * GIB),
        # 0.9 of 10 less 3 in use less 1 for the step.
        (MemoryRequest(kv_cache_bytes=None, share=None), CUDA, 5 * GIB),
        (MemoryRequest(kv_cache_bytes=None, share=0.5), CUDA, 1 * GIB),
    ],
)
def test_the_pool_takes_its_share(request_, device, expected):
    memory = StepMemory(free_bytes=7 * GIB, total_bytes=10 * GIB, peak_bytes=1 * GIB)
    assert pool_bytes(request_, memory, device) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_pool_larger_than_the_memory_is_refused(device):
    memory = StepMemory(free_bytes=7 * GIB, total_bytes=10 * GIB, peak_bytes=1 * GIB)
    wish = MemoryRequest(kv_cache_bytes=7 * GIB + 1, share=None)
    said = rf"^--kv-cache-memory: 7169MiB are asked for, {device} has 7168MiB free$"
    with pytest.raises(StartupError, match=said):
        pool_bytes(wish, memory, device)


def test_half_of_a_small_machine():
    memory = StepMemory(free_bytes=GIB, total_bytes=GIB, peak_bytes=GIB // 2)
    wish = MemoryRequest(kv_cache_bytes=None, share=None)
    assert pool_bytes(wish, memory, CPU) == GIB // 4


def test_blocks_fill_the_pool(caplog):
    assert choose_num_blocks(100 * SPEC.bytes_per_block + 1, SPEC, 1600) == 100
    assert caplog.records == []


@pytest.mark.parametrize("size", [-5, 0, 8191])
def test_a_pool_without_a_block_says_what_would_do(size):
    assert SPEC.bytes_per_block == 8192
    with pytest.raises(StartupError, match=r"does not hold one block .*--kv-cache-memory 4MiB"):
        choose_num_blocks(size, SPEC, 8192)


def test_a_pool_shorter_than_the_longest_request_is_a_warning_with_the_way_out(caplog):
    caplog.set_level(logging.WARNING)
    assert choose_num_blocks(10 * SPEC.bytes_per_block, SPEC, 8192) == 10
    assert "holds 160 tokens, less than max_model_len 8192" in caplog.text
    assert "--max-model-len 160" in caplog.text
