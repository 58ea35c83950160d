"""Executes one step: rows, copies of blocks, batch, forward, sample, rows again.

Owns the order of these stages for one attachment. Decides nothing but the sampled tokens. Runs on
the model thread only.
"""

import time

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import KVCache
from services.worker.batch import StepBatch, gather
from services.worker.models.decoder import CausalLM
from services.worker.plan import (
    Column,
    DeviceLost,
    FailureKind,
    StepPhases,
    StepPlan,
    StepResult,
)
from services.worker.rows import RequestRows
from services.worker.sampler import sample


class Runner:
    """The step executor of one attachment.

    Args:
        model: the loaded model.
        cache: its KV cache. What an earlier attachment left in it is never read.
        rows: the empty rows of this attachment.
        device: where the model and the cache are.
        traced: measure the phases of the steps that have a trace context.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        rows: RequestRows,
        device: torch.device,
        *,
        traced: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._device = device
        self._traced = traced

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes `plan`; sampled tokens are appended to their rows, as input of the next step.

        A row that cannot be computed is a failure in the result, in this and every later step until
        its slot is released; the other rows are good.

        Raises:
            LinkProtocolError: the plan breaks the contract of the step link; no tensor was touched.
            DeviceLost: the device reports an error that only a new process gets rid of.
            Exception: what the forward raised, e.g. out of memory; the rows are unusable after it.
        """
        watch = _Watch(self._device) if self._traced and plan.traceparent else None
        self._rows.apply(plan)
        if plan.copied_to.size:
            self._copy_blocks(plan)
        batch = gather(self._rows, plan, self._device)
        if batch is None:
            return self._result(plan, np.zeros(0, np.int64), np.zeros(0, np.int64))
        try:
            tokens, ok = self._compute(batch, watch)
        except Exception as error:
            self._check_device(error)
            raise
        phases = watch.phases() if watch is not None else None
        self._rows.advance(batch.slots, batch.num_tokens)
        good = batch.sampled_rows
        if not ok.all():
            for slot in batch.sampled_slots[~ok]:
                self._rows.fail(
                    int(slot), FailureKind.NOT_FINITE, "the model gave logits that are not finite"
                )
            good, tokens = good[ok], tokens[ok]
        self._rows.append_tokens(plan.slots[good], tokens)
        return self._result(plan, good, tokens, phases)

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources, targets = (
            torch.from_numpy(blocks).to(self._device)
            for blocks in (plan.copied_from, plan.copied_to)
        )
        try:
            with torch.inference_mode():
                self._cache.copy_blocks(sources, targets)
        except Exception as error:
            self._check_device(error)
            raise

    def _compute(
        self, batch: StepBatch, watch: "_Watch | None"
    ) -> tuple[Column, npt.NDArray[np.bool_]]:
        """Forward and sample: token ids int64 [samples], and which count, bool [samples]."""
        if watch is not None:
            watch.end_of_phase()
        with torch.inference_mode():
            logits = self._model.forward(
                batch.input_ids, batch.positions, self._cache, batch.attention, batch.logits_rows
            )
            if watch is not None:
                watch.end_of_phase()
            if not batch.sampled_rows.size:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # its errors and time are this step's
                return np.zeros(0, np.int64), np.zeros(0, np.bool_)
            sampled = sample(logits, batch.sampling)
            return sampled.token_ids.cpu().numpy(), sampled.ok.cpu().numpy()

    def _result(
        self,
        plan: StepPlan,
        sampled_rows: Column,
        tokens: Column,
        phases: StepPhases | None = None,
    ) -> StepResult:
        counts = np.zeros(len(plan.slots), dtype=np.uint8)
        counts[sampled_rows] = 1
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=counts,
            token_ids=tokens.astype(np.uint32),
            failures=self._rows.failures(plan.slots),
            phases=phases,
        )

    def _check_device(self, error: Exception) -> None:
        """Tells an error of one step from one that stays: on a GPU the second kind is sticky."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(f"{self._device}: {lost}") from error


class _Watch:
    """Measures the phases of one step: batch, forward, sample.

    A GPU is waited for at the end of each phase, which is why only traced steps are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends_ns = [time.monotonic_ns()]

    def end_of_phase(self) -> None:
        """A phase ends now."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends_ns.append(time.monotonic_ns())

    def phases(self) -> StepPhases:
        """The last phase ends now."""
        self.end_of_phase()
        start, batch, forward, sample = self._ends_ns
        return StepPhases(
            batch_us=(batch - start) // 1000,
            forward_us=(forward - batch) // 1000,
            sample_us=(sample - forward) // 1000,
        )
