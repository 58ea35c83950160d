"""What the worker makes once at start and keeps over all attachments: model, KV cache, limits.

Owns the order of the start: device, model, largest step (measurement and warm-up), cache. Runs on
the model thread.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.dispatch import select_kernels
from kernels.interface import KernelSet, KVCache, KVCacheSpec
from services.chassis.process import StartupError
from services.worker.kv_cache import (
    MemoryRequest,
    choose_num_blocks,
    largest_step,
    measure,
    pool_bytes,
)
from services.worker.machine import Machine
from services.worker.models.config import ModelError
from services.worker.models.registry import LoadedModel, load_model
from services.worker.plan import Attachment, StepLimits
from services.worker.rows import RequestRows
from services.worker.runner import Runner
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# One step is executed while the next one waits on the worker.
_MAX_IN_FLIGHT = 2
_MAX_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


class StartUp:
    """How long each phase of the start took, for one line of the log.

    Args:
        age_s: how old the process is; what came before are its imports.
    """

    def __init__(self, age_s: float) -> None:
        self._last = time.monotonic()
        self._phases = [("import", age_s)]

    def end_of(self, phase: str) -> float:
        """`phase` ends now, the next one begins; returns its seconds."""
        now = time.monotonic()
        seconds = now - self._last
        self._phases.append((phase, seconds))
        self._last = now
        return seconds

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._phases)
        return f"{sum(seconds for _, seconds in self._phases):.2f} s ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What the engine takes of its machine."""

    threads: int
    """Threads of one operation on the CPU."""
    load_s: float
    """Time to load the weights, seconds."""
    largest_step_bytes: int
    """Most memory a step took beside weights and cache, as measured at the start."""
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The loaded model, its cache, and what bounds its steps."""

    loaded: LoadedModel
    cache: KVCache
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device
    footprint: Footprint

    def attach(self, attachment: Attachment, *, traced: bool = False) -> Runner:
        """The runner of a new attachment, with empty rows; see `Runner` for `traced`."""
        rows = RequestRows(attachment, self.limits)
        return Runner(self.loaded.model, self.cache, rows, self.device, traced=traced)


def load_engine(
    settings: WorkerSettings, path: Path, machine: Machine, start_up: StartUp
) -> Engine:
    """Loads the model in folder `path` and sizes its cache.

    Raises:
        StartupError: model, device or memory cannot be used as the settings say.
    """
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device)
    threads_from = _set_threads(settings, machine) if device.type == "cpu" else "torch's default"
    log.info(
        "computing in %s on %s, threads: %d (%s)",
        str(dtype).removeprefix("torch."),
        _named(device),
        torch.get_num_threads(),
        threads_from,
    )
    kernels = select_kernels(device)
    try:
        with _memory_for("the weights"):
            loaded = load_model(
                path,
                dtype=dtype,
                device=device,
                kernels=kernels,
                max_model_len=settings.max_model_len,
                memory_bytes=machine.available_memory() if device.type == "cpu" else None,
            )
    except ModelError as error:
        raise StartupError(str(error)) from error
    load_s = start_up.end_of("load")

    limits = StepLimits(
        block_size=settings.block_size,
        num_blocks=0,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=(
            settings.max_num_batched_tokens or _MAX_BATCHED_TOKENS[device.type]
        ),
        max_model_len=loaded.config.max_model_len,
        vocab_size=loaded.config.vocab_size,
        max_in_flight=_MAX_IN_FLIGHT,
    )
    spec = KVCacheSpec(
        num_layers=loaded.config.num_layers,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        block_size=settings.block_size,
        dtype=dtype,
    )
    with _memory_for("the largest step; set a smaller --max-num-batched-tokens"):
        memory = measure(
            lambda: _run_largest_step(loaded, kernels, spec, limits, device), device, machine
        )
    request = MemoryRequest(
        kv_cache_bytes=settings.kv_cache_bytes,
        share=settings.gpu_memory_utilization,
        local_workers=settings.local_workers,
    )
    num_blocks = choose_num_blocks(pool_bytes(request, memory, device), spec, limits.max_model_len)
    cache = _allocate(kernels, spec, num_blocks, device)
    start_up.end_of("profile")
    log.info(
        "KV cache: %d blocks of %d tokens, %d MiB; largest step: %d MiB",
        num_blocks,
        spec.block_size,
        num_blocks * spec.bytes_per_block // 2**20,
        memory.peak_bytes // 2**20,
    )
    return Engine(
        loaded=loaded,
        cache=cache,
        limits=replace(limits, num_blocks=num_blocks),
        dtype=dtype,
        device=device,
        footprint=Footprint(
            threads=torch.get_num_threads(),
            load_s=load_s,
            largest_step_bytes=memory.peak_bytes,
            kv_cache_bytes=num_blocks * spec.bytes_per_block,
        ),
    )


@contextlib.contextmanager
def _memory_for(what: str) -> Iterator[None]:
    """Says in one line that there is not enough memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        # torch has a type of its own for GPUs only.
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", text):
            raise
        raise StartupError(f"there is not enough memory for {what}") from error


def _run_largest_step(
    loaded: LoadedModel,
    kernels: KernelSet,
    spec: KVCacheSpec,
    limits: StepLimits,
    device: torch.device,
) -> None:
    """Runs a largest and a smallest step: what is made at first use is made before a request."""
    profile = largest_step(limits)
    cache = _allocate(kernels, spec, profile.num_blocks, device)
    rows = RequestRows(profile.attachment, replace(limits, num_blocks=profile.num_blocks))
    runner = Runner(loaded.model, cache, rows, device)
    for plan in profile.steps:
        failures = runner.execute(plan).failures
        if failures:
            log.warning("%s computing in %s", failures[0].message, spec.dtype)


def _allocate(
    kernels: KernelSet, spec: KVCacheSpec, num_blocks: int, device: torch.device
) -> KVCache:
    try:
        return kernels.allocate_kv_cache(spec, num_blocks, device)
    except (RuntimeError, MemoryError) as error:
        size_mib = num_blocks * spec.bytes_per_block // 2**20
        raise StartupError(
            f"kv cache: cannot allocate {size_mib} MiB on {device}; set a smaller --kv-cache-memory"
        ) from error


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    if name == "cuda" and not available:
        raise StartupError("--device cuda: this process sees no GPU, or its torch has no CUDA")
    return torch.device(name)


def _named(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def _set_threads(settings: WorkerSettings, machine: Machine) -> str:
    """Sets the threads of operations on the CPU; returns where the number comes from."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
        return "--num-threads"
    processors = machine.processors(len(os.sched_getaffinity(0)))
    torch.set_num_threads(max(1, processors.count // settings.local_workers))
    found = f"{processors.count} processors by {processors.bound_by}"
    return f"{found}, --local-workers {settings.local_workers}"


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
