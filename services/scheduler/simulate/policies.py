"""The policies that can be simulated: the core's orders of its queue, and the baseline "v0"."""

from dataclasses import replace

from services.scheduler.core.config import Config, Policy
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256
from services.scheduler.simulate.load import Prompts, Source
from services.scheduler.simulate.loop import Engine, Simulation
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.static_batching import StaticBatching
from services.scheduler.simulate.step_model import StepModel

V0 = "v0"
POLICIES = (V0, *(policy.value for policy in Policy))


def engine_for(policy: str, config: Config, *, reserve_tokens: int | None = None) -> Engine:
    """The engine of a policy.

    Args:
        policy: one of POLICIES.
        config: of the core; its order of the queue is set here.
        reserve_tokens: what "v0" reserves for each request; None: prompt and bound.
    """
    if policy == V0:
        return StaticBatching(config, reserve_tokens=reserve_tokens)
    return Scheduler(replace(config, policy=Policy(policy)), SHA256)


def run_policy(  # noqa: PLR0913  # keywords, all of one run
    policy: str,
    source: Source,
    model: StepModel,
    *,
    config: Config | None = None,
    longest: int,
    workers: int = 1,
    seed: int = 0,
    reserve_context: bool = False,
) -> Report:
    """Runs a load to its end.

    Args:
        policy: one of POLICIES.
        source: of the load.
        model: of the workers.
        config: of the core.
        longest: most tokens in all that a request of the load may reach.
        workers: how many.
        seed: of the prompts' tokens.
        reserve_context: "v0" reserves the model's longest context for each request.

    Raises:
        Stuck: the policy makes no progress.
    """
    reserve = model.max_model_len if reserve_context else None
    engine = engine_for(policy, config or Config(), reserve_tokens=reserve)
    short = shortened(model, longest)
    simulation = Simulation(
        engine, source, short, Prompts(seed, short.max_model_len), workers=workers
    )
    simulation.run()
    return simulation.report(policy)


def shortened(model: StepModel, longest: int) -> StepModel:
    """The model with a context of no more than the load needs.

    Decides nothing, but the core's table of tokens has this width, and is spread over memory by it.
    """
    blocks = -(-longest // model.block_size)
    return replace(model, max_model_len=min(model.max_model_len, blocks * model.block_size))
