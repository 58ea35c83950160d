"""The worker's end of the step link: dial, register, execute steps in order, answer, dial again.

Owns the stream and its life. Invariant: steps run one after another on the model thread, and
results are written in that order. Knows neither tensors nor requests; what a step does is the
runner's.
"""

import asyncio
import enum
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from quire.v1 import worker_pb2, worker_pb2_grpc
from services.chassis.channel import open_channel
from services.chassis.tasks import run_until_first_ends
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

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
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


class _Kind(enum.Enum):
    UNREACHABLE = "no scheduler there"
    LOST = "link lost"
    REFUSED = "refused"
    LEFT = "scheduler said goodbye"
    BROKEN = "link ended by this worker"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class _End:
    kind: _Kind
    reason: str


class SchedulerLink:
    """Keeps this worker attached to its scheduler until told to stop.

    Args:
        options: where and how.
        make_executor: makes the empty state of a new attachment.
        thread: where steps are executed.
        on_attached: told True after registration and False when the attachment ends.
    """

    def __init__(
        self,
        options: LinkOptions,
        *,
        make_executor: Callable[[Attachment], StepExecutor],
        thread: ModelThread,
        on_attached: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._options = options
        self._make_executor = make_executor
        self._thread = thread
        self._on_attached = on_attached
        self._random = random.Random()
        self._logged: _End | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Attaches, and attaches again whenever the link ends, until `stopping` is set.

        Then the steps already received are answered and the scheduler is told goodbye.

        Raises:
            DeviceLost: the device is gone; the process must end.
        """
        delay = _FIRST_DELAY_S
        while not stopping.is_set():
            dialled = time.monotonic()
            end = await self._attach(stopping)
            if end.kind is _Kind.STOPPED:
                log.info("detached: %s", end.reason)
                return
            self._log(end)
            if time.monotonic() - dialled > _LONGEST_DELAY_S:
                delay = _FIRST_DELAY_S  # it was attached for a while: a new story
            if end.kind is _Kind.REFUSED:
                delay = _LONGEST_DELAY_S
            await _sleep(delay * self._random.uniform(0.5, 1.0), stopping)
            delay = min(delay * 2, _LONGEST_DELAY_S)

    async def _attach(self, stopping: asyncio.Event) -> _End:
        """One stream, from dialling to its end."""
        async with open_channel(self._options.target) as channel:
            stub: Any = worker_pb2_grpc.WorkerLinkServiceStub(channel)
            stream = _Stream(stub.Attach(), self._options, self._thread)
            try:
                await run_until_first_ends(
                    stream.read(self._attached), stream.write(), stream.stop_on(stopping)
                )
            finally:
                stream.drop_pending()
                await self._on_attached(False)
            return stream.end

    async def _attached(self, attachment: Attachment) -> StepExecutor:
        self._logged = None
        log.info(
            "attached to %s: epoch %d, at most %d requests per step",
            self._options.target,
            attachment.epoch,
            attachment.max_num_seqs,
        )
        executor = self._make_executor(attachment)
        await self._on_attached(True)
        return executor

    def _log(self, end: _End) -> None:
        """One line per change: a scheduler that stays away is not told every second."""
        if end == self._logged:
            return
        self._logged = end
        target, reason = self._options.target, end.reason
        if end.kind is _Kind.UNREACHABLE:
            log.warning("no scheduler at %s (%s); dialling until it answers", target, reason)
        elif end.kind is _Kind.REFUSED:
            log.error("the scheduler at %s refused this worker: %s; asking again", target, reason)
        elif end.kind is _Kind.LEFT:
            log.info("the scheduler at %s said goodbye: %s; dialling again", target, reason)
        else:
            log.error("%s: %s; attaching anew, with empty rows", end.kind.value, reason)


class _Stream:
    """One Attach call: `read`, `write` and `stop_on` run side by side until one of them returns."""

    def __init__(self, call: _Call, options: LinkOptions, thread: ModelThread) -> None:
        self._call = call
        self._options = options
        self._thread = thread
        self._limits = options.registration.limits
        self._unanswered = 0
        self._attached = False
        self._draining = False
        # One more than steps: None, the sign to say goodbye, comes after the last of them.
        self._results: asyncio.Queue[asyncio.Future[_Answer] | None] = asyncio.Queue(
            self._limits.max_in_flight + 1
        )
        self._ended: _End | None = None

    @property
    def end(self) -> _End:
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
            self._end(_Kind.BROKEN, f"protocol violation: {error}")
        except TimeoutError:
            seconds = self._options.register_timeout_s
            self._end(_Kind.LOST, f"no answer to Register within {seconds:g} s")
        except grpc.aio.AioRpcError as error:
            self._end_by_error(error)

    async def write(self) -> None:
        """Writes each result when it is there, and goodbye when told."""
        while (future := await self._results.get()) is not None:
            try:
                answer = await future
            except DeviceLost:
                raise  # ends the process: no new attachment can help
            except LinkProtocolError as error:
                self._end(_Kind.BROKEN, f"protocol violation: {error}")
                return
            except Exception as error:  # noqa: BLE001 - logged where it was raised
                self._end(_Kind.BROKEN, f"a step failed: {type(error).__name__}")
                return
            self._unanswered -= 1
            if not await self._write(codec.to_result(answer.result, answer.timings)):
                await self._end_by_status()
                return
        if await self._write(codec.to_bye("worker stops")):
            await self._call.done_writing()
            await asyncio.sleep(_CLOSE_TIMEOUT_S)
        self._end(_Kind.STOPPED, "goodbye said, the scheduler did not close the stream")

    async def stop_on(self, stopping: asyncio.Event) -> None:
        """Once `stopping` is set: answers what was received, says goodbye, and ends in any case."""
        await stopping.wait()
        if not self._attached:
            self._end(_Kind.STOPPED, "before it was attached")
            return
        self._draining = True
        self._results.put_nowait(None)
        await asyncio.sleep(self._options.drain_timeout_s)
        self._end(_Kind.STOPPED, f"{self._unanswered} steps unanswered at the drain timeout")

    def drop_pending(self) -> None:
        """Steps that have not begun are not executed any more."""
        while not self._results.empty():
            future = self._results.get_nowait()
            if future is not None:
                future.cancel()

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
        self._results.put_nowait(
            self._thread.submit(functools.partial(timed.execute, plan, received_ns))
        )

    async def _write(self, message: worker_pb2.AttachRequest) -> bool:
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
                self._end(_Kind.STOPPED, "goodbye said")
            else:
                self._end(_Kind.LOST, "the stream ended without goodbye")
            return
        self._end_by_code(code, details)

    def _end_by_goodbye(self, goodbye: Goodbye) -> None:
        if self._draining:
            self._end(_Kind.STOPPED, "goodbye said and answered")
        else:
            self._end(_Kind.LEFT, goodbye.reason)

    def _end_by_error(self, error: grpc.aio.AioRpcError) -> None:
        self._end_by_code(error.code(), error.details())

    def _end_by_code(self, code: grpc.StatusCode, details: str | None) -> None:
        reason = f"{code.name}: {details or 'no details'}"
        if self._draining:
            self._end(_Kind.STOPPED, reason)
        elif code in _REFUSALS:
            self._end(_Kind.REFUSED, reason)
        else:
            self._end(_Kind.LOST if self._attached else _Kind.UNREACHABLE, reason)

    def _end(self, kind: _Kind, reason: str) -> None:
        if self._ended is None:
            self._ended = _End(kind, reason)


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


async def _sleep(seconds: float, stopping: asyncio.Event) -> None:
    """Sleeps, but not past `stopping`."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
