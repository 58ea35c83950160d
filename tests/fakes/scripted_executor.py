"""A worker's step executor that says what a test tells it to: real rows, no model.

Behind the worker's own link it is a whole worker to a real scheduler: every step is checked
against real rows (slots, blocks, digests), and a row's next token is looked up in a script by its
prompt. It can be slow, hang, fail one request, or fail a whole step. One token a row and step: the
step link has no way yet to give several.
"""

import threading
import time
from collections.abc import Sequence

import numpy as np

from services.worker.plan import Attachment, FailureKind, StepLimits, StepPlan, StepResult
from services.worker.rows import RequestRows

_LONGEST_HANG_S = 30.0


class Script:
    """What a scripted worker says; shared by its attachments, changed by the test at any time.

    Attributes:
        filler: what follows the end of an output, and every prompt that has none.
        delay_s: what each step takes.
        broken: the next step raises this, once.
    """

    def __init__(self, filler: int) -> None:
        self.filler = filler
        self.delay_s = 0.0
        self.broken: Exception | None = None
        self._outputs: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._failures: dict[tuple[int, ...], int] = {}
        self._budget: int | None = None
        self._changed = threading.Condition()

    def say(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """`prompt` is answered by `output`, then by filler."""
        self._outputs[tuple(prompt)] = tuple(output)

    def fail(self, prompt: Sequence[int], position: int) -> None:
        """The request of `prompt` fails where it would give its output token `position`."""
        self._failures[tuple(prompt)] = position

    def hold(self, after_steps: int = 0) -> None:
        """Lets so many more steps through; the one after them hangs."""
        with self._changed:
            self._budget = after_steps
            self._changed.notify_all()

    def go_on(self) -> None:
        """Nothing hangs any more."""
        with self._changed:
            self._budget = None
            self._changed.notify_all()

    def wait_for_turn(self) -> None:
        """Called on the model thread before each step."""
        with self._changed:
            went_on = self._changed.wait_for(lambda: self._budget != 0, _LONGEST_HANG_S)
            if not went_on:
                raise AssertionError("the test never let the worker go on")
            if self._budget is not None:
                self._budget -= 1
        if self.delay_s:
            time.sleep(self.delay_s)
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken

    def token(self, prompt: Sequence[int], position: int) -> int | None:
        """Output token `position` (from 0) of `prompt`; None where it fails."""
        key = tuple(prompt)
        if self._failures.get(key) == position:
            return None
        output = self._outputs.get(key, ())
        return output[position] if position < len(output) else self.filler


class ScriptedExecutor:
    """The executor of one attachment."""

    def __init__(self, attachment: Attachment, limits: StepLimits, script: Script) -> None:
        self.rows = RequestRows(attachment, limits)
        self._script = script

    def execute(self, plan: StepPlan) -> StepResult:
        self._script.wait_for_turn()
        rows = self.rows
        rows.apply(plan)
        rows.advance(plan.slots, plan.num_tokens)
        counts = np.zeros(plan.slots.size, np.uint8)
        tokens: list[int] = []
        usable = rows.usable(plan.slots)
        for row, slot in enumerate(plan.slots.tolist()):
            if rows.computed[slot] != rows.known[slot] or (usable is not None and not usable[row]):
                continue
            prompt_len, known = int(rows.prompt_len[slot]), int(rows.known[slot])
            prompt = rows.tokens[slot, :prompt_len].tolist()
            token = self._script.token(prompt, known - prompt_len)
            if token is None:
                rows.fail(slot, FailureKind.NOT_FINITE, "told to fail")
                continue
            counts[row] = 1
            tokens.append(token)
        sampled = plan.slots[counts == 1]
        rows.append_tokens(sampled, np.array(tokens, np.int64))
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=counts,
            token_ids=np.array(tokens, np.uint32),
            failures=rows.failures(plan.slots),
        )
