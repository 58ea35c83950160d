"""How many prefill tokens a step may have, so that its decodes keep their time between tokens."""

from services.scheduler.core.config import Config
from services.scheduler.core.plan import IntArray
from services.scheduler.core.rows import NO_TARGET
from services.scheduler.core.step_time import StepShape
from services.scheduler.core.worker_state import WorkerState

_TARGET_RESERVE = 8
"""This part of the time between tokens is left to their way to the client, and to a machine whose
speed changes while a step runs."""

_EXTENSION = 4
"""Where decodes alone take longer than they should, prefills get this part of their time."""

_MOST_STEPS_WITHOUT_PREFILL = 4
"""After so many steps whose decodes left no time for prefills, a block is computed all the same."""


def prefill_bound(worker: WorkerState, decodes: IntArray, config: Config) -> int | None:
    """Most prefill tokens beside these decodes, by what is known of the worker's step times.

    Args:
        worker: whose step; counts the steps without prefills.
        decodes: int64 [n], slots of the rows that want one token.
        config: has the target of requests that bring none.

    Returns:
        None where there is no target, or nothing is known of the worker's step times.
    """
    target = _target(worker, decodes, config)
    if target == NO_TARGET:
        return None
    # Streams see steps from answer to answer, and their tokens take a way of their own.
    target = max(0, target - worker.pacing.overhead_us - target // _TARGET_RESERVE)
    shape = StepShape(
        tokens=decodes.size,
        rows=decodes.size,
        context=int(worker.rows.computed[decodes].sum()) + decodes.size,
    )
    context = _longest_prefill(worker)
    most = worker.step_time.tokens_within(target, shape, context)
    if most is None:
        return None
    alone = worker.step_time.predict_us(shape)
    if not most and alone is not None and alone > target:
        # No prefill could make these decodes meet it; so prompts get a part of the time on top.
        extended = alone + alone // _EXTENSION + worker.step_time.margin_us
        most = worker.step_time.tokens_within(extended, shape, context) or 0
    # A block every now and then, so that new prompts are never shut out.
    worker.steps_without_prefill += 1
    if most < 1 and worker.steps_without_prefill >= _MOST_STEPS_WITHOUT_PREFILL:
        most = worker.spec.block_size
    if most > 0:
        worker.steps_without_prefill = 0
    return most


def has_target(worker: WorkerState, decodes: IntArray, config: Config) -> bool:
    """Whether any of these decodes is to have its tokens in a given time."""
    return _target(worker, decodes, config) != NO_TARGET


def _target(worker: WorkerState, decodes: IntArray, config: Config) -> int:
    if not decodes.size:
        return NO_TARGET
    own = int(worker.rows.tpot_target_us[decodes].min())
    return min(config.tpot_target_us or NO_TARGET, own)


def _longest_prefill(worker: WorkerState) -> int:
    """Tokens computed of the running prefill that has got furthest."""
    rows = worker.rows
    unfinished = rows.computed[rows.order] < rows.length[rows.order] - 1
    computed = rows.computed[rows.order][unfinished]
    return int(computed.max()) if computed.size else 0
