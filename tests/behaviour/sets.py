"""Sets of a kind that several tests need, with a canary that fits them."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from services.worker.engine import Engine
from services.worker.plan import StepLimits
from tests.behaviour.stack import Stack, engine_part, running_stack, scripted_part
from tests.fakes.scripted_executor import Script

FILLER = ord("#") + 4
"""What a scripted worker says when its script is over: text that shows if nothing stopped it."""

SCRIPTED_EOS = (0, 2)
"""<|endoftext|> and <|im_end|> of the byte-level tokenizer."""

_CANARY = ((101, 102, 103), (80, 81, 82, 83))


@contextlib.asynccontextmanager
async def scripted_stack(
    sockets: Path,
    folder: Path,
    limits: StepLimits,
    *,
    eos_token_ids: Sequence[int] = SCRIPTED_EOS,
    **scheduler: Any,
) -> AsyncIterator[Stack]:
    """A set whose worker says what it is told."""
    script = Script(FILLER)
    part = scripted_part(script, limits, eos_token_ids=eos_token_ids)
    async with running_stack(sockets, folder, part, script=script, scheduler=scheduler) as stack:
        prompt, output = _CANARY
        script.say(prompt, output)
        stack.canary = _CANARY
        yield stack


@contextlib.asynccontextmanager
async def model_stack(
    sockets: Path,
    folder: Path,
    engine: Engine,
    canary: tuple[tuple[int, ...], tuple[int, ...]],
    **scheduler: Any,
) -> AsyncIterator[Stack]:
    """A set with a model; `canary` is a prompt and what the model must say to it."""
    async with running_stack(sockets, folder, engine_part(engine), scheduler=scheduler) as stack:
        stack.canary = canary
        yield stack
