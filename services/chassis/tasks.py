"""Runs coroutines that belong together and end together."""

import asyncio
from collections.abc import Coroutine


async def run_until_first_ends(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs all until the first one returns or raises; cancels the others and waits for them.

    Raises:
        Exception: what the first one to fail raised, bare.
    """
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    except* Exception as errors:  # noqa: BLE001 -- re-raised below, out of its group
        failure = first_leaf(errors)
    if failure is not None:
        raise failure


def first_leaf(group: BaseException) -> BaseException:
    """The first plain exception inside nested exception groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
