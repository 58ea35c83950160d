"""One Attach call, from Register to its end: steps in, results out.

Invariant: steps run one after another on the model thread, and results are written in that order.
Knows neither tensors nor requests; what a step does is the executor's.
"""

import asyncio
import enum
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from services.chassis.logs import told
from services.worker import codec
from services.worker.model_thread import ModelThread
from services.worker.plan import (
    Attachment,
    DeviceLost,
    Goodbye,
    LinkProtocolError,
    Registration,
    StepPlan,
    StepResult,
    StepTimings,
)

log = logging.getLogger(__name__)

# How long the scheduler may take to close the stream after our Bye.
_CLOSE_TIMEOUT_S = 2.0

_REFUSALS = frozenset(
    {
        grpc.StatusCode.ABORTED,  # a newer instance of this worker took the place
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

# grpc's stubs make the call generic; at run time it is a plain class.
_Call = Any


class StepExecutor(Protocol):
    """Executes the steps of one attachment; called on the model thread only."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes one step.

        Raises:
            LinkProtocolError: the step breaks the contract; the link ends.
            DeviceLost: this process cannot execute anything any more.
            Exception: the step failed; the link ends, and the worker registers anew.
        """
        ...


class StepObserver(Protocol):
    """Sees what happens on one attachment, in order; called on the event loop."""

    def received(self, plan: StepPlan, received_ns: int) -> None:
        """A step came, at this time of `time.monotonic_ns`."""
        ...

    def answered(self, result: StepResult, timings: StepTimings) -> None:
        """The oldest step without an answer was executed."""
        ...

    def failed(self, error: Exception) -> None:
        """The oldest step without an answer failed."""
        ...

    def ended(self, kind: "EndKind") -> None:
        """The attachment is over; what has no answer gets none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Where and how to attach.

    Args:
        target: address of the scheduler.
        registration: what this worker is.
        drain_timeout_s: how long steps already received may take once the worker stops.
        register_timeout_s: how long the scheduler may take to answer Register.
    """

    target: str
    registration: Registration
    drain_timeout_s: float
    register_timeout_s: float = 10.0


class EndKind(enum.Enum):
    """Why a stream ended."""

    UNREACHABLE = "no scheduler there"
    LOST = "link lost"
    REFUSED = "refused"
    LEFT = "scheduler said goodbye"
    BROKEN = "link ended by this worker"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream."""

    kind: EndKind
    reason: str


class Stream:
    """One Attach call: `read`, `write` and `stop_on` run side by side until one of them returns.

    Args:
        call: the call, begun.
        options: where and how.
        thread: where steps are executed.
        observe: makes the observer of the attachment, or None: nobody watches.
    """

    def __init__(
        self,
        call: _Call,
        options: LinkOptions,
        thread: ModelThread,
        observe: Callable[[Attachment], StepObserver] | None = None,
    ) -> None:
        self._call = call
        self._options = options
        self._thread = thread
        self._observe = observe
        self._observer: StepObserver | None = None
        self._limits = options.registration.limits
        self._unanswered = 0
        self._attached = False
        self._draining = False
        # One more than steps: None, the sign to say goodbye, comes after the last of them.
        self._results: asyncio.Queue[asyncio.Future[_Answer] | None] = asyncio.Queue(
            self._limits.max_in_flight + 1
        )
        self._ended: End | None = None

    @property
    def end(self) -> End:
        """The first reason for the end; later ones are its consequences."""
        assert self._ended is not None, "the stream runs"
        return self._ended

    async def read(self, on_attached: Callable[[Attachment], Awaitable[StepExecutor]]) -> None:
        """Registers, then hands each step to the model thread as it comes."""
        try:
            async with asyncio.timeout(self._options.register_timeout_s):
                attachment = await self._register()
            if attachment is None:
                return
            timed = _TimedExecutor(await on_attached(attachment))
            self._attached = True
            if self._observe is not None:
                self._observer = self._observe(attachment)
            while (response := await self._call.read()) is not grpc.aio.EOF:
                received = time.monotonic_ns()
                message = codec.from_response(response)
                if isinstance(message, Goodbye):
                    self._end_by_goodbye(message)
                    return
                if isinstance(message, Attachment):
                    raise LinkProtocolError("registered: sent twice")
                self._hand_over(timed, message, received)
            await self._end_by_status()
        except LinkProtocolError as error:
            self._end(EndKind.BROKEN, f"protocol violation: {error}")
        except TimeoutError:
            seconds = self._options.register_timeout_s
            self._end(EndKind.LOST, f"no answer to Register within {seconds:g} s")
        except grpc.aio.AioRpcError as error:
            self._end_by_error(error)

    async def write(self) -> None:
        """Writes each result when it is there, and goodbye when told."""
        while (future := await self._results.get()) is not None:
            try:
                answer = await future
            except Exception as error:  # logged where it was raised
                if self._observer is not None:
                    self._observer.failed(error)
                if isinstance(error, DeviceLost):
                    raise  # ends the process: no new attachment can help
                if isinstance(error, LinkProtocolError):
                    self._end(EndKind.BROKEN, f"protocol violation: {error}")
                else:
                    self._end(EndKind.BROKEN, f"a step failed: {type(error).__name__}")
                return
            self._unanswered -= 1
            if self._observer is not None:
                self._observer.answered(answer.result, answer.timings)
            if not await self._write(codec.to_result(answer.result, answer.timings)):
                await self._end_by_status()
                return
        if await self._write(codec.to_bye("worker stops")):
            await self._call.done_writing()
            await asyncio.sleep(_CLOSE_TIMEOUT_S)
        self._end(EndKind.STOPPED, "goodbye said, the scheduler did not close the stream")

    async def stop_on(
        self, stopping: asyncio.Event, set_ready: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Once `stopping` is set: answers what was received, says goodbye, and ends in any case."""
        await stopping.wait()
        await set_ready(False)
        if not self._attached:
            self._end(EndKind.STOPPED, "before it was attached")
            return
        self._draining = True
        self._results.put_nowait(None)
        await asyncio.sleep(self._options.drain_timeout_s)
        self._end(EndKind.STOPPED, f"{self._unanswered} steps unanswered at the drain timeout")

    def close(self) -> None:
        """Steps that have not begun are not executed any more, and the observer is told."""
        while not self._results.empty():
            future = self._results.get_nowait()
            if future is not None:
                future.cancel()
        if self._observer is not None:
            # None where an error is on its way that ends the process.
            self._observer.ended(self._ended.kind if self._ended else EndKind.BROKEN)

    async def _register(self) -> Attachment | None:
        if not await self._write(codec.to_register(self._options.registration)):
            await self._end_by_status()
            return None
        response = await self._call.read()
        if response is grpc.aio.EOF:
            await self._end_by_status()
            return None
        message = codec.from_response(response)
        if isinstance(message, Goodbye):
            self._end_by_goodbye(message)
            return None
        if not isinstance(message, Attachment):
            raise LinkProtocolError("step: sent before registered")
        limits = self._limits
        most_slots = (limits.max_in_flight + 1) * limits.max_num_seqs
        if not 1 <= message.max_num_seqs <= limits.max_num_seqs:
            raise LinkProtocolError(
                f"registered.max_num_seqs: {message.max_num_seqs}, must be 1 to "
                f"{limits.max_num_seqs}"
            )
        if not message.max_num_seqs <= message.num_slots <= most_slots:
            raise LinkProtocolError(
                f"registered.num_slots: {message.num_slots}, must be {message.max_num_seqs} to "
                f"{most_slots}"
            )
        return message

    def _hand_over(self, timed: "_TimedExecutor", plan: StepPlan, received_ns: int) -> None:
        if self._draining:
            return  # goodbye is on its way; the scheduler takes the step back
        if self._unanswered == self._limits.max_in_flight:
            raise LinkProtocolError(
                f"step {plan.step_id}: {self._unanswered} steps are unanswered already, "
                "that is max_in_flight"
            )
        self._unanswered += 1
        if self._observer is not None:
            self._observer.received(plan, received_ns)
        self._results.put_nowait(
            self._thread.submit(functools.partial(timed.execute, plan, received_ns))
        )

    async def _write(self, message: Message) -> bool:
        """False: the stream is over."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def _end_by_status(self) -> None:
        """Ends by the status of a stream without anything more to read."""
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            if self._draining:
                self._end(EndKind.STOPPED, "goodbye said")
            else:
                self._end(EndKind.LOST, "the stream ended without goodbye")
            return
        self._end_by_code(code, details)

    def _end_by_goodbye(self, goodbye: Goodbye) -> None:
        if self._draining:
            self._end(EndKind.STOPPED, "goodbye said and answered")
        else:
            self._end(EndKind.LEFT, goodbye.reason)

    def _end_by_error(self, error: grpc.aio.AioRpcError) -> None:
        self._end_by_code(error.code(), error.details())

    def _end_by_code(self, code: grpc.StatusCode, details: str | None) -> None:
        reason = f"{code.name}: {told(details or 'no details')}"
        if self._draining:
            self._end(EndKind.STOPPED, reason)
        elif code in _REFUSALS:
            self._end(EndKind.REFUSED, reason)
        elif code is grpc.StatusCode.UNAVAILABLE and not self._attached:
            self._end(EndKind.UNREACHABLE, reason)
        else:
            self._end(EndKind.LOST, reason)

    def _end(self, kind: EndKind, reason: str) -> None:
        if self._ended is None:
            self._ended = End(kind, reason)


@dataclass(frozen=True, slots=True)
class _Answer:
    result: StepResult
    timings: StepTimings


class _TimedExecutor:
    """Executes and times the steps of one attachment, on the model thread."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._free_since_ns = time.monotonic_ns()

    def execute(self, plan: StepPlan, received_ns: int) -> _Answer:
        """Executes one step; what fails is logged here, even if the link is gone meanwhile."""
        start = time.monotonic_ns()
        try:
            result = self._executor.execute(plan)
        except LinkProtocolError:
            raise
        except Exception:
            log.exception("step %d of epoch %d failed", plan.step_id, plan.epoch)
            raise
        end = time.monotonic_ns()
        timings = StepTimings(
            wait_us=(start - received_ns) // 1000,
            execute_us=(end - start) // 1000,
            idle_us=(start - self._free_since_ns) // 1000,
        )
        self._free_since_ns = end
        return _Answer(result, timings)
