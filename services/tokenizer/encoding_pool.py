"""Runs the tokenizer's slow calls beside the event loop: a few threads, a bounded queue.

Owns the threads. Knows nothing of requests.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from services.chassis.errors import InvalidArgument, Overloaded
from services.tokenizer.domain import ChatMessage, RenderedChat
from services.tokenizer.encoding import Encoding

T = TypeVar("T")

MAX_CHARACTERS = 8 * 1024 * 1024
"""Most characters encoded for one request: millions of tokens, and seconds of work."""


class EncodingPool:
    """The tokenizer, for the event loop.

    Args:
        encoding: called from several threads at once.
        threads: that work at a time.
        max_waiting: calls in the pool, those at work included.
    """

    def __init__(self, encoding: Encoding, *, threads: int = 2, max_waiting: int = 256) -> None:
        self._encoding = encoding
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting = 0

    async def encode(
        self, texts: Sequence[str], field: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """See Encoding.encode.

        Args:
            texts: each is encoded by itself.
            field: where they came from.
            add_special_tokens: whether to add what the tokenizer adds to a prompt.

        Raises:
            InvalidArgument: they are too long together.
            Overloaded: too many calls wait.
        """
        _check_size(texts, field)
        return await self._run(
            functools.partial(self._encoding.encode, texts, add_special_tokens=add_special_tokens)
        )

    async def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """See Encoding.decode.

        Raises:
            Overloaded: too many calls wait.
        """
        return await self._run(
            functools.partial(
                self._encoding.decode, sequences, skip_special_tokens=skip_special_tokens
            )
        )

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        check: Callable[[str], None] | None = None,
    ) -> RenderedChat:
        """See Encoding.render.

        Raises:
            InvalidArgument: see there, or the messages are too long together.
            Overloaded: too many calls wait.
        """
        _check_size([message.content for message in messages], "messages")
        return await self._run(
            functools.partial(
                self._encoding.render,
                messages,
                add_generation_prompt=add_generation_prompt,
                check=check,
            )
        )

    def close(self) -> None:
        """Ends the threads; calls that have not begun are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[[], T]) -> T:
        if self._waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._waiting} texts wait to be encoded", reason="TOO_MANY_ENCODING"
            )
        with self._lock:
            self._waiting += 1
        job = _Job(call)
        future = self._executor.submit(job.run)
        future.add_done_callback(self._done)
        try:
            # Shielded, so that a job nobody waits for is still counted while it holds its texts.
            result = asyncio.shield(asyncio.wrap_future(future))
            result.add_done_callback(_note_error)
            return await result
        finally:
            job.is_wanted = False

    def _done(self, _future: Future[T]) -> None:
        with self._lock:
            self._waiting -= 1


def _note_error(result: asyncio.Future[T]) -> None:
    """A caller that went without being cancelled misses its error; the loop need not tell of it."""
    if not result.cancelled():
        result.exception()


class _Job(Generic[T]):
    """A call that is not made once nobody wants its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.is_wanted = True

    def run(self) -> T:
        """Makes the call, on a thread of the pool."""
        if not self.is_wanted:
            raise asyncio.CancelledError
        return self._call()


def _check_size(texts: Sequence[str], field: str) -> None:
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS:
        raise InvalidArgument(field, f"must have at most {MAX_CHARACTERS} characters, got {size}")
