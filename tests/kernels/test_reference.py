import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from kernels.dispatch import select_kernels
from kernels.interface import AttentionBatch, KVCacheSpec
from kernels.reference import ReferenceKernels
from tests.kernels.paged import naive_attention, paged, random_sequences

DECODES = [(1, 1), (9, 1), (37, 1), (4, 1), (5, 1), (64, 1), (33, 1), (8, 1)]
PREFILLS = [(5, 5), (18, 5), (1, 1), (33, 32), (40, 7), (12, 12)]
MIXED = [(7, 1), (50, 1), (3, 3), (21, 1), (29, 4)]
HEADS = [(4, 2, 16), (9, 3, 8), (5, 1, 24), (4, 4, 10)]


def spec(heads, block_size=4, dtype=torch.float32):
    return KVCacheSpec(
        num_layers=2, num_kv_heads=heads[1], head_dim=heads[2], block_size=block_size, dtype=dtype
    )


def attend(kernels, cache, batch, query, layer, **options):
    asked = {"scale": 0.3, "window": None, "soft_cap": None, "sinks": None} | options
    return kernels.paged_attention(query, cache, layer, batch, **asked)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_attention_is_what_its_definition_says(heads, rows, block_size):
    check_against_definition(heads, rows, block_size=block_size)


@pytest.mark.parametrize("rows", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 1000])
def test_window_hides_what_is_further_back(rows, window):
    check_against_definition((4, 2, 16), rows, window=window)


@pytest.mark.parametrize("rows", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 6])
def test_soft_cap_and_sinks(rows, window):
    heads = (6, 2, 8)
    sinks = torch.linspace(-2, 3, heads[0])
    check_against_definition(heads, rows, window=window, soft_cap=1.5)
    check_against_definition(heads, rows, window=window, sinks=sinks)
    check_against_definition(heads, rows, window=window, soft_cap=0.7, sinks=sinks)


def check_against_definition(heads, rows, *, block_size=4, **options):
    kernels = ReferenceKernels()
    sequences = random_sequences(rows, *heads)
    cache, batch = paged(kernels, sequences, spec(heads, block_size))
    query = torch.cat(sequences.queries)
    asked = {"scale": 0.3, "window": None, "soft_cap": None, "sinks": None} | options
    for layer in range(2):
        got = attend(kernels, cache, batch, query, layer, **options)
        wanted = naive_attention(sequences, layer=layer, **asked)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)


def test_many_rows_of_very_different_length_are_split_into_groups():
    rows = [(1 + 97 * number % 1500, 1) for number in range(40)]
    check_against_definition((2, 1, 4), rows, block_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_near_float32(dtype):
    kernels = ReferenceKernels()
    sequences = random_sequences(MIXED, 4, 2, 16)
    cache, batch = paged(kernels, sequences, spec((4, 2, 16), dtype=dtype))
    query = torch.cat(sequences.queries).to(dtype)
    for options in ({}, {"soft_cap": 5.0}):
        got = attend(kernels, cache, batch, query, 0, **options)
        asked = {"scale": 0.3, "window": None, "soft_cap": None, "sinks": None} | options
        assert got.dtype == dtype
        wanted = naive_attention(sequences, layer=0, **asked)
        torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("length", range(1, 10))
def test_nothing_unwritten_is_ever_read(length):
    """A pool full of NaN gives the very numbers that a pool of zeros gives."""
    kernels = ReferenceKernels()
    sequences = random_sequences([(length, 1), (3, 1), (length + 5, 4)], 4, 2, 8)
    results = []
    for filling in (0.0, float("nan")):
        cache, batch = paged(Filled(filling), sequences, spec((4, 2, 8)))
        query = torch.cat(sequences.queries)
        results.append(attend(kernels, cache, batch, query, 0, window=None))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


class Filled(ReferenceKernels):
    """Allocates caches whose blocks were used by others before."""

    def __init__(self, filling):
        self._filling = filling

    def allocate_kv_cache(self, spec, num_blocks, device):
        cache = super().allocate_kv_cache(spec, num_blocks, device)
        for table in (*cache.keys, *cache.values):
            table[:, :num_blocks] = self._filling
        return cache


def test_a_row_does_not_see_the_nan_of_its_neighbour():
    kernels = ReferenceKernels()
    sequences = random_sequences([(6, 1), (6, 1), (9, 3)], 4, 2, 8)
    cache, batch = paged(kernels, sequences, spec((4, 2, 8)))
    query = torch.cat(sequences.queries)
    clean = attend(kernels, cache, batch, query, 0)
    cache.keys[0][:, batch.block_tables[1, :2].long()] = float("nan")
    broken = attend(kernels, cache, batch, query, 0)
    assert broken[1].isnan().all()
    assert torch.equal(broken[0], clean[0])
    assert torch.equal(broken[2:], clean[2:])


def test_a_batch_is_planned_anew_when_its_tensors_were_reused():
    """Layer 0 opens a step, even for the same object."""
    kernels = ReferenceKernels()
    sequences = random_sequences([(8, 1), (8, 1)], 2, 1, 4)
    cache, batch = paged(kernels, sequences, spec((2, 1, 4)))
    query = torch.cat(sequences.queries)
    before = attend(kernels, cache, batch, query, 0)
    batch.block_tables[:] = batch.block_tables.flip(0)
    after = attend(kernels, cache, batch, query.flip(0), 0)
    torch.testing.assert_close(after.flip(0), before)


def test_one_cache_serves_calls_in_and_outside_of_inference_mode():
    kernels = ReferenceKernels()
    sequences = random_sequences([(8, 1), (20, 3)], 2, 1, 4)
    cache, batch = paged(kernels, sequences, spec((2, 1, 4)))
    query = torch.cat(sequences.queries)
    with torch.inference_mode():
        inside = attend(kernels, cache, batch, query, 0)
    assert torch.equal(attend(kernels, cache, batch, query, 0), inside)


def test_a_copied_block_is_the_other_one():
    """The copies take the places of their sources in the block tables, and nothing changes."""
    kernels = ReferenceKernels()
    sequences = random_sequences([(9, 1), (14, 3)], 4, 2, 16)
    cache, batch = paged(kernels, sequences, spec((4, 2, 16)))
    query = torch.cat(sequences.queries)
    before = [attend(kernels, cache, batch, query, layer) for layer in range(2)]
    used = batch.block_tables.flatten().tolist()
    spare = [block for block in range(cache.num_blocks) if block not in used]
    sources = batch.block_tables[:, :2].flatten().long()
    targets = torch.tensor(spare[: len(sources)])
    cache.copy_blocks(sources, targets)
    assert [attend(kernels, cache, batch, query, layer).tolist() for layer in range(2)] == [
        out.tolist() for out in before
    ], "the sources are as they were"
    copied = dataclasses.replace(batch, block_tables=batch.block_tables.clone())
    copied.block_tables[:, :2] = targets.view(2, 2)
    for layer in range(2):
        assert torch.equal(attend(kernels, cache, copied, query, layer), before[layer])


def test_rms_norm():
    hidden = torch.randn(3, 24) * 5
    weight = torch.randn(24)
    wanted = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ReferenceKernels().rms_norm(hidden, weight, 1e-5), wanted)


def test_rotary_turns_each_pair_by_its_angle():
    heads = torch.randn(5, 3, 8)
    angles = torch.randn(5, 4)
    got = ReferenceKernels().rotary(heads, angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :4], heads[..., 4:])
    turned = pairs * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1))
    strided = torch.randn(5, 7, 8)
    assert torch.equal(
        ReferenceKernels().rotary(strided[:, 2:5], angles.cos(), angles.sin()),
        ReferenceKernels().rotary(strided[:, 2:5].contiguous(), angles.cos(), angles.sin()),
    )


def test_silu_mul():
    gate_up = torch.randn(4, 10)
    wanted = functional.silu(gate_up[:, :5]) * gate_up[:, 5:]
    torch.testing.assert_close(ReferenceKernels().silu_mul(gate_up), wanted)


def test_bytes_per_block():
    assert spec((4, 2, 16)).bytes_per_block == 2 * 2 * 4 * 2 * 16 * 4
    assert spec((4, 2, 16), 16, torch.bfloat16).bytes_per_block == 2 * 2 * 16 * 2 * 16 * 2


def test_dispatch():
    assert select_kernels(torch.device("cpu")).name == "reference"


def test_an_empty_step_is_legal():
    kernels = ReferenceKernels()
    cache = kernels.allocate_kv_cache(spec((4, 2, 16)), 3, torch.device("cpu"))
    batch = AttentionBatch(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        num_decode_rows=0,
        max_query_len=0,
        max_seq_len=0,
    )
    empty = torch.zeros(0, 2, 16)
    kernels.write_kv(cache, 0, empty, empty, batch.slot_mapping)
    out = attend(kernels, cache, batch, torch.zeros(0, 4, 16), 0, scale=1 / math.sqrt(16))
    assert out.shape == (0, 4, 16)
