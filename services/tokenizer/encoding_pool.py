"""Runs the tokenizer's slow calls beside the event loop: a few threads, a bounded queue.

Owns the threads. Knows nothing of requests.
"""

import asyncio
import functools
import threading
import time
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
        on_done: told of each call, on the event loop: "encode", "decode" or "render", how long it
            waited and how long it took, seconds.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        threads: int = 2,
        max_waiting: int = 256,
        on_done: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self._encoding = encoding
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._max_waiting = max_waiting
        self._on_done = on_done
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
            "encode",
            functools.partial(self._encoding.encode, texts, add_special_tokens=add_special_tokens),
        )

    async def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """See Encoding.decode.

        Raises:
            Overloaded: too many calls wait.
        """
        return await self._run(
            "decode",
            functools.partial(
                self._encoding.decode, sequences, skip_special_tokens=skip_special_tokens
            ),
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
            "render",
            functools.partial(
                self._encoding.render,
                messages,
                add_generation_prompt=add_generation_prompt,
                check=check,
            ),
        )

    def close(self) -> None:
        """Ends the threads; calls that have not begun are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Calls in the pool, those at work included."""
        return self._waiting

    async def _run(self, kind: str, call: Callable[[], T]) -> T:
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
            if self._on_done is not None and job.ended is not None:
                self._on_done(kind, job.began - job.made, job.ended - job.began)

    def _done(self, _future: Future[T]) -> None:
        with self._lock:
            self._waiting -= 1


def _note_error(result: asyncio.Future[T]) -> None:
    """A caller that went without being cancelled misses its error; the loop need not tell of it."""
    if not result.cancelled():
        result.exception()


class _Job(Generic[T]):
    """A call that is not made once nobody wants its result; knows when it was made, seconds."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.is_wanted = True
        self.made = time.perf_counter()
        self.began = self.made
        self.ended: float | None = None

    def run(self) -> T:
        """Makes the call, on a thread of the pool."""
        if not self.is_wanted:
            raise asyncio.CancelledError
        self.began = time.perf_counter()
        try:
            return self._call()
        finally:
            self.ended = time.perf_counter()


def _check_size(texts: Sequence[str], field: str) -> None:
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS:
        raise InvalidArgument(field, f"must have at most {MAX_CHARACTERS} characters, got {size}")
