"""How many KV blocks this worker has: measured once at start, told to the scheduler.

Owns the largest step (which is also the warm-up) and the rule that turns free memory into blocks:

- `--kv-cache-memory` is taken as it is;
- on a GPU: `--gpu-memory-utilization` (0.9) of the device, less what is in use after the largest
  step, less what that step needs beyond it;
- on a CPU: half of what the machine and its control groups leave free after the largest step, at
  most 1 GiB, since a CPU's memory is shared with everybody, divided among `--local-workers`, which
  may all measure the same free memory; with `--gpu-memory-utilization` that share of it, without
  the cap, and undivided.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import KVCacheSpec
from services.chassis.process import StartupError
from services.worker.machine import Machine
from services.worker.plan import Attachment, NewRow, StepLimits, StepPlan

log = logging.getLogger(__name__)

_MIB = 2**20
_MOST_BLOCKS = 2**26
"""As many as schedulers make tables for."""
_GPU_SHARE = 0.9
_CPU_SHARE = 0.5
_CPU_CAP_BYTES = 1024 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What the settings say about memory.

    Args:
        kv_cache_bytes: size of the pool; None measures it.
        share: share of the memory to use; None takes the default of the device.
        local_workers: workers that measure the same machine, >= 1.
    """

    kv_cache_bytes: int | None
    share: float | None
    local_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What the largest step left and took.

    Args:
        free_bytes: free on the device after the largest step.
        total_bytes: of the device.
        peak_bytes: what the step needs beyond what stays in use after it.
    """

    free_bytes: int
    total_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Steps to run once at start, and what they need."""

    attachment: Attachment
    steps: tuple[StepPlan, ...]
    num_blocks: int
    """Blocks the steps use."""


def largest_step(limits: StepLimits) -> Profile:
    """A step as large as the limits allow, in tokens and in sampling rows, and a smallest one.

    One row prefills, the others have one token. All rows share the first blocks of the pool: what
    they compute is not looked at, and the pool of the measurement stays small. The second step
    decodes a single row; it is left out where `max_model_len` has no room for it.
    """
    longest = limits.max_model_len - 1
    tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * longest)
    lengths: list[int] = []
    for rows in range(min(limits.max_num_seqs, tokens), 0, -1):
        lengths.append(min(longest, tokens - (rows - 1)))
        tokens -= lengths[-1]
    blocks = [-(-length // limits.block_size) for length in lengths]
    last = len(lengths) - 1
    more = -(-(lengths[last] + 1) // limits.block_size) - blocks[last]
    steps = (
        _step(
            1,
            new_rows=tuple(_profile_row(slot, length) for slot, length in enumerate(lengths)),
            num_tokens=lengths,
            block_ids=[list(range(count)) for count in blocks],
        ),
        _step(2, slots=[last], num_tokens=[1], block_ids=[list(range(more))], released=range(last)),
    )
    return Profile(
        attachment=Attachment(
            epoch=0,
            max_num_seqs=limits.max_num_seqs,
            num_slots=len(lengths),
            check_block_tables=False,
        ),
        steps=steps if lengths[last] + 1 < limits.max_model_len else steps[:1],
        num_blocks=max(blocks),
    )


def measure(
    run_largest_step: Callable[[], None], device: torch.device, machine: Machine
) -> StepMemory:
    """Runs the largest step and says what memory it needs.

    Args:
        run_largest_step: runs it once and drops everything it made.
        device: where.
        machine: of a CPU device.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run_largest_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return StepMemory(free_bytes=free, total_bytes=total, peak_bytes=peak)
    before = machine.resident()
    machine.reset_peak()
    run_largest_step()
    peak = max(0, machine.peak_resident() - before)
    free = machine.available_memory()
    return StepMemory(free_bytes=free, total_bytes=free, peak_bytes=peak)


def pool_bytes(request: MemoryRequest, memory: StepMemory, device: torch.device) -> int:
    """Bytes for the KV pool by the rule of this module; may be too few for one block.

    Raises:
        StartupError: more are asked for than there are.
    """
    if request.kv_cache_bytes is not None:
        if request.kv_cache_bytes > memory.free_bytes:
            raise StartupError(
                f"--kv-cache-memory: {_size(request.kv_cache_bytes)} are asked for, "
                f"{device} has {memory.free_bytes // _MIB}MiB free"
            )
        return request.kv_cache_bytes
    if device.type == "cuda":
        used = memory.total_bytes - memory.free_bytes
        share = _GPU_SHARE if request.share is None else request.share
        return int(memory.total_bytes * share) - used - memory.peak_bytes
    left = memory.free_bytes - memory.peak_bytes
    if request.share is not None:
        return int(left * request.share)
    return min(int(left * _CPU_SHARE), _CPU_CAP_BYTES) // request.local_workers


def choose_num_blocks(size_bytes: int, spec: KVCacheSpec, max_model_len: int) -> int:
    """How many blocks fit into `size_bytes`.

    Raises:
        StartupError: not even one.
    """
    num_blocks = min(size_bytes // spec.bytes_per_block, _MOST_BLOCKS)
    needed = -(-max_model_len // spec.block_size)
    needed_text = _size(needed * spec.bytes_per_block)
    if num_blocks < 1:
        raise StartupError(
            f"kv cache: {_size(size_bytes)} does not hold one block of {spec.block_size} tokens "
            f"({_size(spec.bytes_per_block)}); --kv-cache-memory {needed_text} would hold "
            f"max_model_len {max_model_len}"
        )
    if num_blocks < needed:
        log.warning(
            "the KV cache holds %d tokens, less than max_model_len %d: longer requests will be "
            "refused; set --max-model-len %d, or --kv-cache-memory %s or more",
            num_blocks * spec.block_size,
            max_model_len,
            num_blocks * spec.block_size,
            needed_text,
        )
    return num_blocks


def _step(
    step_id: int,
    *,
    num_tokens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    slots: Sequence[int] | None = None,
    new_rows: tuple[NewRow, ...] = (),
    released: Iterable[int] = (),
) -> StepPlan:
    return StepPlan(
        epoch=0,
        step_id=step_id,
        released_slots=np.array(list(released), np.int64),
        new_rows=new_rows,
        slots=np.array(range(len(num_tokens)) if slots is None else slots, np.int64),
        num_tokens=np.array(num_tokens, np.int64),
        num_new_blocks=np.array([len(row) for row in block_ids], np.int64),
        new_block_ids=np.array([block for row in block_ids for block in row], np.int64),
        block_table_digest=None,
    )


def _profile_row(slot: int, length: int) -> NewRow:
    return NewRow(
        slot=slot,
        token_ids=np.zeros(length, dtype=np.uint32),
        prompt_len=length,
        num_computed=0,
        temperature=1.0,
        top_p=0.9,
        top_k=0,
        seed=slot,
        traceparent="",
    )


def _size(size_bytes: int) -> str:
    """Rounded up, so that a size named to the user is enough."""
    unit, name = (_MIB, "MiB") if size_bytes >= _MIB else (1024, "KiB")
    return f"{-(-max(0, size_bytes) // unit)}{name}"
