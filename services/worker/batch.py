"""One step's tensors, gathered from the rows by whole columns.

Owns the order of rows inside a batch (rows with one token first, as the kernels ask) and hides it:
what is sampled comes out in the order of the plan. Reads the rows, changes nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionBatch
from services.worker.plan import Column, StepPlan
from services.worker.rows import RequestRows
from services.worker.sampler import SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What the model and the sampler get, and where their results belong."""

    input_ids: torch.Tensor
    """int64 [tokens], rows back to back."""
    positions: torch.Tensor
    """int64 [tokens], position of each token in its request."""
    attention: AttentionBatch
    logits_rows: torch.Tensor
    """int64 [samples], index into the tokens; in plan order."""
    sampling: SamplingBatch
    """[samples], in plan order."""
    slots: Column
    """[rows], the slots computed; a failed row of the plan is not among them."""
    num_tokens: Column
    """[rows], tokens computed of each."""
    sampled_slots: Column
    """[samples]"""
    sampled_rows: Column
    """[samples], each one's row in the plan."""


def gather(rows: RequestRows, plan: StepPlan, device: torch.device) -> StepBatch | None:
    """The batch of a plan that `rows.apply` has checked; None if no row is to be computed."""
    slots, counts = plan.slots, plan.num_tokens
    plan_rows = np.arange(len(slots))
    usable = rows.usable(slots)
    if usable is not None:
        slots, counts, plan_rows = slots[usable], counts[usable], plan_rows[usable]
    if not slots.size:
        return None
    starts = rows.computed[slots]
    ends = starts + counts
    known = rows.known[slots]
    sampling = np.flatnonzero(ends == known)

    max_query_len = int(counts.max())
    order = None if max_query_len == 1 else _decode_first(counts)
    in_order = slots if order is None else slots[order]
    query_ends = np.cumsum(counts if order is None else counts[order])
    token_slots, positions = _tokens(
        in_order, starts if order is None else starts[order], query_ends
    )
    last_token = query_ends - 1
    if order is not None:  # back to plan order
        last_token[order] = last_token.copy()
    sampled = slots[sampling]
    longest = int(ends.max())
    width = -(-longest // rows.block_size)
    return StepBatch(
        input_ids=_tensor(rows.tokens[token_slots, positions].astype(np.int64), device),
        positions=_tensor(positions, device),
        attention=AttentionBatch(
            query_start_loc=_tensor(_with_zero(query_ends), device),
            seq_lens=_tensor((ends if order is None else ends[order]).astype(np.int32), device),
            slot_mapping=_tensor(_cache_slots(rows, token_slots, positions), device),
            block_tables=_tensor(rows.block_table[in_order, :width], device),
            num_decode_rows=len(slots) if order is None else int(np.count_nonzero(counts == 1)),
            max_query_len=max_query_len,
            max_seq_len=longest,
        ),
        logits_rows=_tensor(last_token[sampling], device),
        sampling=SamplingBatch(
            temperature=_tensor(rows.temperature[sampled], device),
            top_p=_tensor(rows.top_p[sampled], device),
            top_k=_tensor(rows.top_k[sampled], device),
            seed=_tensor(rows.seed[sampled].view(np.int64), device),
            position=_tensor(known[sampling] - rows.prompt_len[sampled], device),
        ),
        slots=slots,
        num_tokens=counts,
        sampled_slots=sampled,
        sampled_rows=plan_rows[sampling],
    )


def _decode_first(counts: Column) -> Column:
    """Stable permutation that puts rows with one token first."""
    return np.argsort(counts != 1, kind="stable")


def _tokens(slots: Column, starts: Column, query_ends: Column) -> tuple[Column, Column]:
    """Slot and position of each token of the batch, both int64 [tokens]."""
    if query_ends[-1] == len(slots):
        return slots, starts
    counts = np.diff(query_ends, prepend=0)
    first_token = query_ends - counts
    positions = np.arange(query_ends[-1]) + np.repeat(starts - first_token, counts)
    return np.repeat(slots, counts), positions


def _cache_slots(rows: RequestRows, token_slots: Column, positions: Column) -> Column:
    """Where each token's key and value go: block id * block size + offset, int64 [tokens]."""
    blocks, offsets = np.divmod(positions, rows.block_size)
    return rows.block_table[token_slots, blocks] * np.int64(rows.block_size) + offsets


def _with_zero(query_ends: Column) -> npt.NDArray[np.int32]:
    start_loc = np.zeros(len(query_ends) + 1, dtype=np.int32)
    start_loc[1:] = query_ends
    return start_loc


def _tensor(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`column` on `device`; on a CPU without a copy."""
    tensor = torch.from_numpy(column)
    return tensor if device.type == "cpu" else tensor.to(device)
