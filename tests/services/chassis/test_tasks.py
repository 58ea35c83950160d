"""Coroutines that belong together end together, and the first failure comes out bare."""

import asyncio

import pytest

from services.chassis.tasks import first_leaf, run_until_first_ends


class Endless:
    """Runs until it is cancelled, and says so."""

    def __init__(self) -> None:
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # ending may take a moment; the group waits for it
            self.ended = True


async def returns() -> None:
    await asyncio.sleep(0)


async def raises(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_the_first_to_return_ends_the_others() -> None:
    one, two = Endless(), Endless()
    await run_until_first_ends(one.run(), returns(), two.run())
    assert (one.ended, two.ended) == (True, True)


async def test_the_first_to_fail_ends_the_others_and_its_error_comes_out_bare() -> None:
    error = ZeroDivisionError("cause")
    one = Endless()
    with pytest.raises(ZeroDivisionError) as caught:
        await run_until_first_ends(one.run(), raises(error))
    assert caught.value is error
    assert one.ended


async def test_a_failure_while_ending_is_not_lost() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_until_first_ends(fails_when_cancelled(), returns())


async def test_cancelling_the_caller_ends_all() -> None:
    one, two = Endless(), Endless()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_until_first_ends(one.run(), two.run())
    assert (one.ended, two.ended) == (True, True)


def test_the_first_leaf_lies_under_all_groups() -> None:
    leaf = ValueError("leaf")
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [leaf, KeyError()]), KeyError()])
    assert first_leaf(group) is leaf
    assert first_leaf(leaf) is leaf
