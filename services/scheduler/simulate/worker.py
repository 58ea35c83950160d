"""A worker that computes nothing: it keeps each row's counts and takes the time of a step model.

Counts lie in numpy columns by slot, so that a step of 1,000 rows costs tens of microseconds. What a
row "says" is one token again and again, and an end of sequence as its last one where the request
may go on for longer: the number of tokens until then travels in the seed of its sampling.
"""

from dataclasses import dataclass

import numpy as np

from services.scheduler.core.plan import IntArray, StepPlan, StepResult, TokenArray, WorkerSpec
from services.scheduler.simulate.step_model import EOS_TOKEN, StepModel

SAID_TOKEN = 7
"""Every sampled token but the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A step's result and when the worker has it."""

    result: StepResult
    done_at: int
    tokens: int
    rows: int


class SimulatedWorker:
    """One worker; steps are executed in the order in which they are submitted.

    Args:
        spec: as attached.
        model: gives the time of a step.
    """

    def __init__(self, spec: WorkerSpec, model: StepModel) -> None:
        self.spec = spec
        self._model = model
        self._known: IntArray = np.zeros(spec.num_slots, np.int64)
        self._computed: IntArray = np.zeros(spec.num_slots, np.int64)
        self._last: IntArray = np.zeros(spec.num_slots, np.int64)
        """How many tokens in all each slot's request has once it has said all."""
        self._said: TokenArray = np.full(spec.num_slots, SAID_TOKEN, np.uint32)
        self._said.flags.writeable = False
        self._free_at = 0
        self.filled_tokens = 0
        """Tokens whose keys and values lie in the cache for a request that is not released; a
        prefix that several share counts for each.
        """
        self.busy_us = 0
        """Time computed, microseconds."""

    def submit(self, plan: StepPlan, now: int) -> Answer:
        """Takes a step; its answer is worked out at once and comes at `done_at`."""
        if plan.released_slots.size:
            self.filled_tokens -= int(self._computed[plan.released_slots].sum())
            self._computed[plan.released_slots] = 0
        for row in plan.new_rows:
            self._known[row.slot] = row.token_ids.size
            self._computed[row.slot] = row.num_computed
            self._last[row.slot] = row.prompt_len + row.sampling.seed
            self.filled_tokens += row.num_computed
        slots = plan.slots
        computed = self._computed[slots] + plan.num_tokens
        self._computed[slots] = computed
        known = self._known[slots]
        samples = computed == known
        known += samples
        self._known[slots] = known
        tokens = int(plan.num_tokens.sum())
        self.filled_tokens += tokens
        duration = self._model.step_us(tokens, slots.size, int(computed.sum()))
        self._free_at = max(self._free_at, now) + duration
        self.busy_us += duration
        result = StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=samples.astype(np.uint8),
            token_ids=self._sampled(known[samples] >= self._last[slots[samples]]),
            execute_us=duration,
        )
        return Answer(result=result, done_at=self._free_at, tokens=tokens, rows=int(slots.size))

    def _sampled(self, last: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> TokenArray:
        if not last.any():
            return self._said[: last.size]
        return np.where(last, np.uint32(EOS_TOKEN), np.uint32(SAID_TOKEN)).astype(np.uint32)
