"""The real core on simulated time: one worker whose steps take as long as a formula says.

The worker samples no real tokens and checks no block tables; it is for properties of order and
time. Everything is deterministic: noise comes from a seeded generator.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    EndReason,
    Events,
    Refusal,
    Refused,
    Sampling,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256, tenant_salt

VOCAB = 1 << 16


@dataclass(eq=False)
class Course:
    """What became of one request. Instants in microseconds, steps counted from the run's first."""

    handle: int
    tenant: str
    priority_class: str
    prompt: int
    added_at: int
    added_step: int
    token_times: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    admissions: int = 0
    end: Ended | None = None

    @property
    def ttft_steps(self) -> int:
        """Steps completed from `add` to the first token."""
        return self.token_steps[0] - self.added_step

    @property
    def gaps(self) -> list[int]:
        """Microseconds between its tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end.reason in (EndReason.LENGTH, EndReason.STOP)


class SimulatedRun:
    """A core and its worker.

    Args:
        base_us: duration of a step without tokens.
        per_token_us: more for each token.
        noise: largest relative deviation, both ways, but none below half.
        seed: of the noise.
        in_flight: steps the worker holds; the second waits for the first.
        config: fields of Config.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        block_size: int = 16,
        max_num_seqs: int = 16,
        budget: int = 512,
        max_model_len: int = 8192,
        in_flight: int = 1,
        base_us: int = 1000,
        per_token_us: int = 10,
        noise: float = 0.0,
        seed: int = 0,
        check: bool = False,
        **config: object,
    ) -> None:
        self.core = Scheduler(Config(**config), SHA256)
        self.spec = WorkerSpec(
            worker_id="w",
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(),
            max_in_flight=in_flight,
            model_digest=b"model",
        )
        _, self._epoch, _ = self.core.attach(self.spec, 0)
        self.now = 0
        self.steps = 0
        self.courses: dict[int, Course] = {}
        self.step_tokens: list[int] = []
        """Tokens computed in each step."""
        self.step_samples: list[int] = []
        """Tokens sampled in each step."""
        self._random = random.Random(seed)
        self._noise = noise
        self._times = (base_us, per_token_us)
        self._check = check
        self._open: deque[tuple[StepPlan, int, list[int]]] = deque()
        self._rows: dict[int, tuple[int, int]] = {}
        """Tokens known and computed on the worker, by slot."""
        self._handles: dict[int, int] = {}

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 16,
        *,
        tenant: str = "",
        priority_class: str = "",
        **fields: object,
    ) -> Course:
        """Adds a request; a prompt given by its length is like no other.

        Raises:
            Refused: the core did not take it.
        """
        handle = len(self.courses)
        ids = prompt if isinstance(prompt, list) else self._own_prompt(handle, prompt)
        course = Course(handle, tenant, priority_class, len(ids), self.now, self.steps)
        self.courses[handle] = course
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.array(ids, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=handle),
            tenant=tenant,
            priority_class=priority_class,
            salt=tenant_salt(tenant),
            **fields,
        )
        try:
            self._take(self.core.add(request, self.now))
        except Refused:
            del self.courses[handle]
            raise
        return course

    def refusal(self, *args: object, **fields: object) -> Refusal | None:
        """Adds a request; why it was refused, or None."""
        try:
            self.add(*args, **fields)
        except Refused as error:
            return error.refusal
        return None

    def step(self) -> bool:
        """Plans as much as the worker takes, and has it answer one step. False: nothing to do."""
        while (plan := self.core.plan("w", self.now)) is not None:
            self._send(plan)
            if self._check:
                self.core.check_invariants()
        fault = self.core.broken("w")
        assert fault is None, fault
        if not self._open:
            return False
        self._answer()
        wakeup = self.core.next_wakeup(self.now)
        if wakeup is not None and wakeup <= self.now:
            self._take(self.core.expire(self.now))
        if self._check:
            self.core.check_invariants()
        return True

    def run(self, steps: int, each: Callable[[int], None] | None = None) -> None:
        """So many steps; before each, `each` is called with its number from 0."""
        for number in range(steps):
            if each is not None:
                each(number)
            if not self.step():
                self.now += self._times[0]
                self._take(self.core.expire(self.now))

    def drain(self, most: int) -> int:
        """Steps until nothing is left; fails after `most`."""
        for number in range(most):
            if not self.step():
                assert self.core.is_idle, "requests are left, and nothing is planned"
                return number
        raise AssertionError(f"not done after {most} steps")

    def computed_tokens(self, *, tenant: str | None = None, cls: str | None = None) -> int:
        """Tokens computed so far for a tenant or a class."""
        return sum(
            sum(course.chunks)
            for course in self.courses.values()
            if tenant in (None, course.tenant) and cls in (None, course.priority_class)
        )

    def _own_prompt(self, handle: int, length: int) -> list[int]:
        return [(handle * 7919 + 13 * place + handle % 251) % VOCAB for place in range(length)]

    def _send(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._rows[new.slot] = (new.token_ids.size, new.num_computed)
            self._handles[new.slot] = new.sampling.seed
            self.courses[new.sampling.seed].admissions += 1
        samples: list[int] = []
        for slot, tokens in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            known, computed = self._rows[slot]
            computed += tokens
            assert computed <= known, "more planned than known"
            samples.append(int(computed == known))
            self._rows[slot] = (known + samples[-1], computed)
            self.courses[self._handles[slot]].chunks.append(tokens)
        self.step_tokens.append(int(plan.num_tokens.sum()))
        self.step_samples.append(sum(samples))
        base, per_token = self._times
        takes = base + per_token * self.step_tokens[-1]
        takes *= max(0.5, 1 + self._noise * self._random.uniform(-1, 1))
        self._open.append((plan, int(takes), samples))

    def _answer(self) -> None:
        plan, takes, samples = self._open.popleft()
        self.now += takes
        self.steps += 1
        result = StepResult(
            epoch=self._epoch,
            step_id=plan.step_id,
            counts=np.array(samples, np.uint8),
            token_ids=np.array([1 + self.steps % 1000] * sum(samples), np.uint32),
            execute_us=takes,
        )
        self._take(self.core.apply("w", result, self.now))

    def _take(self, events: Events) -> None:
        for handle in events.handles.tolist():
            course = self.courses[handle]
            assert course.end is None
            course.token_times.append(self.now)
            course.token_steps.append(self.steps)
        for end in events.ended:
            assert self.courses[end.handle].end is None
            self.courses[end.handle].end = end


def percentile(values: list[int], per_cent: int) -> int:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, -(-len(values) * per_cent // 100) - 1)]
