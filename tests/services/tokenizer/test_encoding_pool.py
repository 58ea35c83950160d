import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from services.chassis.errors import InvalidArgument, Overloaded
from services.tokenizer.domain import ChatMessage, RenderedChat
from services.tokenizer.encoding import Encoding
from services.tokenizer.encoding_pool import EncodingPool
from tests.assets.tokenizers import byte_ids
from tests.services.tokenizer.harness import eventually


class SlowEncoding(Encoding):
    """Encodes when told to, and counts."""

    def __init__(self, encoding: Encoding) -> None:
        self.__dict__.update(encoding.__dict__)
        self.may_go_on = threading.Event()
        self.begun = 0

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.begun += 1
        assert self.may_go_on.wait(20)
        return super().encode(texts, add_special_tokens=add_special_tokens)


class WatchedEncoding(Encoding):
    """Notes for each call what share of it was the event loop's longest pause."""

    def __init__(self, encoding: Encoding) -> None:
        self.__dict__.update(encoding.__dict__)
        self.turns: list[float] = []
        self.pauses: list[float] = []

    def watched(self, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        self.turns = [begin]
        result = call()
        turns = [*self.turns, time.perf_counter()]
        longest = max(after - before for before, after in itertools.pairwise(turns))
        self.pauses.append(longest / (turns[-1] - begin))
        return result

    def encode(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return self.watched(lambda: super(WatchedEncoding, self).encode(*args, **kwargs))

    def decode(self, *args: Any, **kwargs: Any) -> list[str]:
        return self.watched(lambda: super(WatchedEncoding, self).decode(*args, **kwargs))

    def render(self, *args: Any, **kwargs: Any) -> RenderedChat:
        return self.watched(lambda: super(WatchedEncoding, self).render(*args, **kwargs))


@contextmanager
def pool_of(encoding: Encoding, **kwargs: int) -> Iterator[EncodingPool]:
    pool = EncodingPool(encoding, **kwargs)
    try:
        yield pool
    finally:
        pool.close()


async def encode(pool: EncodingPool, text: str = "a") -> list[list[int]]:
    return await pool.encode([text], "text", add_special_tokens=True)


async def test_it_encodes_decodes_and_renders(encoding: Encoding) -> None:
    with pool_of(encoding) as pool:
        assert await encode(pool, "hi") == [byte_ids(b"hi")]
        assert await pool.decode([byte_ids(b"hi")], skip_special_tokens=True) == ["hi"]
        messages = [ChatMessage(role="user", content="x")]
        rendered = await pool.render(messages, add_generation_prompt=True)
        assert rendered == encoding.render(messages, add_generation_prompt=True)


async def test_the_loop_turns_while_a_long_text_is_at_work(encoding: Encoding) -> None:
    watched = WatchedEncoding(encoding)
    with pool_of(watched) as pool:
        done = False

        async def turn() -> None:
            while not done:
                watched.turns.append(time.perf_counter())
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(turn())
            text = "many words " * 15_000
            (ids,) = await encode(pool, text)
            await pool.decode([ids * 10], skip_special_tokens=True)
            messages = [ChatMessage(role="user", content=text)]
            await pool.render(messages, add_generation_prompt=True)
            done = True
    # Nearly all of each call, if the library kept other threads out.
    assert max(watched.pauses) < 0.6, watched.pauses


async def test_errors_come_through(encoding: Encoding) -> None:
    with pool_of(encoding) as pool, pytest.raises(InvalidArgument, match="must not hold"):
        await pool.render([ChatMessage(role="<|im_end|>", content="x")], add_generation_prompt=True)


async def test_too_many_calls_are_refused_until_some_are_done(encoding: Encoding) -> None:
    slow = SlowEncoding(encoding)
    with pool_of(slow, threads=1, max_waiting=2) as pool:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(encode(pool)) for _ in range(2)]
            await eventually(lambda: slow.begun == 1)
            with pytest.raises(Overloaded) as caught:
                await encode(pool)
            assert caught.value.reason == "TOO_MANY_ENCODING"
            slow.may_go_on.set()
        assert [task.result() for task in waiting] == [[byte_ids(b"a")]] * 2
        assert await encode(pool) == [byte_ids(b"a")]


async def test_callers_that_went_away_leave_no_word_in_the_log(
    encoding: Encoding, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowEncoding(encoding)
    with pool_of(slow, threads=1) as pool:
        gone = [encode(pool, text) for text in ("a", "b")]
        for call in gone:
            call.send(None)
        await eventually(lambda: slow.begun == 1)
        for call in gone:
            call.close()  # as of a handler that gRPC lets go of without cancelling it
        slow.may_go_on.set()
        assert await encode(pool) == [byte_ids(b"a")]
        await asyncio.sleep(0)
        gc.collect()
    assert slow.begun == 2
    assert not caplog.records


async def test_a_call_nobody_waits_for_is_not_made_but_counts_until_it_is_gone(
    encoding: Encoding,
) -> None:
    slow = SlowEncoding(encoding)
    with pool_of(slow, threads=1, max_waiting=2) as pool:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(encode(pool))
            dropped = tasks.create_task(encode(pool))
            await eventually(lambda: slow.begun == 1)
            dropped.cancel()
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await encode(pool)
            slow.may_go_on.set()
            await running
            assert await encode(pool) == [byte_ids(b"a")]
        assert slow.begun == 2


@pytest.mark.parametrize("size", [8 * 1024 * 1024, 8 * 1024 * 1024 + 1])
async def test_the_longest_text(encoding: Encoding, size: int) -> None:
    slow = SlowEncoding(encoding)
    with pool_of(slow, threads=1) as pool:
        if size > 8 * 1024 * 1024:
            with pytest.raises(InvalidArgument, match="at most 8388608 characters, got 8388609"):
                await encode(pool, "x" * size)
        else:
            async with asyncio.TaskGroup() as tasks:
                taken = tasks.create_task(encode(pool, "x" * size))
                await eventually(lambda: slow.begun == 1)
                slow.encode = lambda *_, **__: []  # not worth the time
                taken.cancel()
                slow.may_go_on.set()
        assert slow.begun == (1 if size == 8 * 1024 * 1024 else 0)
