"""The only loop of the scheduler: take the inputs, plan, execute on the workers, apply, deliver.

Owns the core; nobody else touches it. Everything runs on one event loop: callers post inputs and
return at once, answers go to their outboxes. The loop reads the clock and hands it to the core.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from services.chassis.errors import AlreadyExists, FailedPrecondition, Unavailable
from services.chassis.logs import told
from services.scheduler import codec
from services.scheduler.core.admission import token_limit
from services.scheduler.core.cache_log import CacheLog
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    NO_TOKENS,
    AddRequest,
    Ended,
    EndReason,
    Events,
    Limits,
    LinkFault,
    Loads,
    Pin,
    Refused,
    Stall,
    StepPlan,
    StepResult,
    WorkerSpec,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.facts import Attachment, Facts, WorkerKind
from services.scheduler.latencies import LatencyWindow
from services.scheduler.link_timings import StepTimings, TimingWindow
from services.scheduler.outbox import Outbox, StreamIds
from services.scheduler.recording import RecordingScheduler
from services.scheduler.watching import Watcher, Watchers

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Core = Scheduler | RecordingScheduler

_STREAM_BITS = 32
_STREAM_MASK = (1 << _STREAM_BITS) - 1


class WorkerLink:
    """The loop's end of one attachment: steps to send, then the reason why it ended.

    Args:
        spec: the worker's limits, lowered by the configuration.
        epoch: of the attachment.
        model: name of the model it serves.
        instance_id: of the worker's process.
        kind: of the worker.
        since: when it was attached, microseconds.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        epoch: int,
        model: str,
        instance_id: str,
        kind: WorkerKind,
        since: int,
    ) -> None:
        self.spec = spec
        self.epoch = epoch
        self.model = model
        self.instance_id = instance_id
        self.kind = kind
        self.since = since
        self.end_reason: str | None = None
        """Set once the loop has let go of the worker."""
        self.timings = TimingWindow()
        self._steps: deque[StepPlan] = deque()  # at most max_in_flight: the core plans no more
        self._news = asyncio.Event()

    def put(self, step: StepPlan) -> None:
        """A step to send."""
        self._steps.append(step)
        self._news.set()

    def end(self, reason: str) -> None:
        """Lets go of the worker; the first reason counts."""
        if self.end_reason is None:
            self.end_reason = reason
        self._news.set()

    async def take(self) -> StepPlan | None:
        """The next step to send, or None once the loop has let go of the worker."""
        while self.end_reason is None:
            if self._steps:
                return self._steps.popleft()
            self._news.clear()
            await self._news.wait()
        return None


@dataclass(frozen=True, slots=True)
class _Post:
    """One input of the loop: called with the time, gives events."""

    act: Callable[[int], Events | None]


class EngineLoop:
    """See the module.

    Args:
        core: the state machine; owned from now on.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._watchers = Watchers()
        # Bounded by what callers may have open: credits, live requests, open steps.
        self._inbox: deque[_Post] = deque()
        self._wake = asyncio.Event()
        self._links: dict[str, WorkerLink] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._live: dict[int, set[int]] = {}
        self._next_sink = 1
        self._closed = False
        self._serving = False
        self._latencies = LatencyWindow()
        self._started = _now()
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        """Set while no request is live."""
        self.workers_changed = asyncio.Event()
        """Set whenever a worker came or went; whoever watches clears it."""
        self.after_turn: Callable[[], None] | None = None
        """Called once all inputs of a turn are taken and its steps are planned; None: nobody is."""
        self.last_hashing: tuple[int, bytes] | None = None
        """What `hashing` gave last, also after the workers left."""

    async def run(self) -> None:
        """Runs until `close`."""
        while not self._closed:
            await self._wait()
            while self._inbox:
                post = self._inbox.popleft()
                self._deliver(post.act(_now()))
            self._deliver(self._core.expire(_now()))
            # A step each in turn: what one worker leaves to another is then placed before the first
            # has used up its steps in flight.
            while any([self._execute(link) for link in list(self._links.values())]):
                pass
            if self.after_turn is not None:
                self.after_turn()
            if self._core.is_idle:
                self.idle.set()
            else:
                self.idle.clear()

    def close(self) -> None:
        """Ends the loop, the links and the outboxes; what is live gets no terminal event."""
        self._closed = True
        self._watchers.closing(_now())
        for link in list(self._links.values()):
            link.end("the scheduler stops")
        for outbox in self._outboxes.values():
            outbox.close()
        self._wake.set()

    def watch(self, watcher: Watcher) -> None:
        """Has somebody watch from now on; call it before the first worker comes."""
        self._watchers.join(watcher)

    # Views

    @property
    def limits(self) -> Limits | None:
        """What the attached workers can serve."""
        return self._core.limits

    @property
    def model(self) -> str:
        """Name of the model served, "" without workers."""
        return next((link.model for link in self._links.values()), "")

    @property
    def hashing(self) -> tuple[int, bytes] | None:
        """Block size and model digest for the hashes of new prompts, or None without workers."""
        for link in self._links.values():
            return link.spec.block_size, link.spec.model_digest
        return None

    @property
    def serving(self) -> bool:
        """Whether requests can be served now, as far as is known; callers are told of changes."""
        return self._serving

    @serving.setter
    def serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            for outbox in self._outboxes.values():
                outbox.put_serving(serving)

    def loads(self) -> Loads:
        """Gauges and counters."""
        return self._core.loads()

    def stall(self) -> Stall | None:
        """What blocks, where work waits and nothing has moved for too long."""
        return self._core.stall(_now())

    def now(self) -> int:
        """The clock of the core, microseconds."""
        return _now()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._core.config

    def pins(self) -> tuple[Pin, ...]:
        """Prefixes that are kept cached."""
        return self._core.pins()

    def cached_blocks(self, hashes: bytes) -> int:
        """How many of these hashes, back to back, some worker has cached."""
        return self._core.cached_blocks(hashes)

    def cached_hashes(self) -> bytes:
        """The hashes of all cached blocks, back to back."""
        return self._core.cached_hashes()

    def facts(self) -> Facts:
        """What else there is to show, beside `loads`."""
        return Facts(
            model=self.model,
            started=self._started,
            attachments={
                worker_id: Attachment(
                    kind=link.kind, since=link.since, timings=link.timings.summary()
                )
                for worker_id, link in self._links.items()
            },
            latencies=self._latencies,
        )

    def watch_cache(self, log: CacheLog | None) -> None:
        """See Scheduler.watch_cache; the log is best read in `after_turn`."""
        self._core.watch_cache(log)

    @property
    def max_running(self) -> int:
        """Most requests that the attached workers run at a time."""
        seats = (link.spec.max_num_seqs for link in self._links.values())
        most = self._core.config.max_num_seqs
        return sum(n if most is None else min(n, most) for n in seats)

    def deadline(self, remaining_us: int | None) -> int | None:
        """An instant on the clock of the core, from what is left until then; microseconds."""
        return None if remaining_us is None else _now() + remaining_us

    # Callers

    def check(self, request: AddRequest) -> None:
        """Refuses what the attached workers can never serve; the core decides again when it adds.

        Raises:
            ServiceError: names the field and the limit.
        """
        if self._core.limits is None:
            return
        try:
            token_limit(request, self._core.limits)
        except Refused as error:
            self._watchers.refused(request, error.refusal, _now())
            raise codec.refusal_error(error.refusal) from error

    @contextlib.asynccontextmanager
    async def caller(self, outbox: Outbox) -> AsyncIterator["Caller"]:
        """Registers a caller; on leaving, its live requests are aborted."""
        sink = self._next_sink
        self._next_sink += 1
        self._outboxes[sink] = outbox
        self._live[sink] = set()
        try:
            yield Caller(self, sink)
        finally:
            del self._outboxes[sink]
            for handle in sorted(self._live.pop(sink)):
                self.abort(handle)

    def add(self, sink: int, request: AddRequest) -> None:
        """Posts a request; a refusal is its end in the caller's outbox."""

        def act(now: int) -> Events | None:
            if sink not in self._live:
                return None  # its caller has left
            watched = self._watchers.adding(request, now)
            try:
                events = self._core.add(watched, now)
            except Refused as error:
                self._watchers.refused(watched, error.refusal, now)
                end = codec.refusal_error(error.refusal)
                self._outboxes[sink].put_end(request.handle & _STREAM_MASK, end)
                return None
            self._live[sink].add(request.handle)
            return events

        self._post(act)

    def abort(self, handle: int) -> None:
        """Posts the end of a request by its owner."""
        self._post(lambda now: self._core.abort(handle, now))

    def finish(self, handle: int, kept_tokens: int) -> None:
        """Posts the end of a request whose text met a stop string."""
        self._post(lambda now: self._core.finish(handle, kept_tokens, now))

    # Changes at run time

    async def configure(self, change: Callable[[Config], Config]) -> Config:
        """Replaces the configuration by what `change` makes of it, and gives that.

        Raises whatever `change` raises; nothing has changed then.
        """

        def act(now: int) -> tuple[Config, Events]:
            config = change(self._core.config)
            return config, self._core.configure(config, now)

        return await self._asked(act)

    async def pin(self, pin: Pin) -> int:
        """Keeps a prefix cached; gives how many of its blocks are cached now.

        Raises:
            Refused: pins would keep too much.
        """
        return await self._asked(lambda now: (self._core.pin(pin, now), NO_TOKENS))

    async def unpin(self, name: str) -> bool:
        """Lets a prefix go; False: there is no pin of that name."""
        return await self._asked(lambda now: (self._core.unpin(name, now), NO_TOKENS))

    async def flush(self) -> int:
        """Gives up all cached blocks that hold neither a request nor a pin; how many there were."""
        return await self._asked(lambda now: (self._core.flush(now), NO_TOKENS))

    async def _asked(self, act: Callable[[int], tuple[_T, Events]]) -> _T:
        """Posts an input that somebody waits for; gives its value, or raises its error."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def answer(now: int) -> Events | None:
            try:
                value, events = act(now)
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                if not done.done():
                    done.set_exception(error)
                return None
            if not done.done():
                done.set_result(value)
            return events

        if self._closed:
            raise Unavailable("the scheduler is stopping")
        self._post(answer)
        return await done

    # Workers

    async def attach(
        self, spec: WorkerSpec, model: str, instance_id: str, kind: WorkerKind
    ) -> WorkerLink:
        """Takes a worker; an older attachment of the same instance is let go first.

        Raises:
            AlreadyExists: another instance of that name is attached.
            FailedPrecondition: it does not agree with the attached workers.
            Unavailable: the scheduler is stopping.
        """
        taken: asyncio.Future[WorkerLink] = asyncio.get_running_loop().create_future()

        def act(now: int) -> Events | None:
            old = self._links.get(spec.worker_id)
            if old is not None and old.instance_id != instance_id:
                taken.set_exception(
                    AlreadyExists(
                        f"worker_id: another worker named {spec.worker_id!r} is attached; "
                        "give each its own --worker-id",
                        reason="WORKER_ID_TAKEN",
                    )
                )
                return None
            if old is not None:
                self._lose(old, "it dialled again", now)
            if not self._core.compatible(spec) or self.model not in ("", model):
                taken.set_exception(
                    FailedPrecondition(
                        "model, model digest, block size, vocabulary and end-of-sequence tokens "
                        "must equal the attached workers'"
                    )
                )
                return None
            try:
                lowered, epoch, events = self._core.attach(spec, now)
            except MemoryError:
                taken.set_exception(
                    FailedPrecondition(
                        f"no memory for {spec.num_slots} rows of {spec.max_model_len} tokens; "
                        "lower max_num_seqs or max_model_len"
                    )
                )
                return None
            link = WorkerLink(lowered, epoch, model, instance_id, kind, now)
            self._links[spec.worker_id] = link
            self._watchers.attached(lowered, now)
            self.last_hashing = spec.block_size, spec.model_digest
            log.info(
                "worker %s attached: epoch %d, %d blocks of %d tokens",
                spec.worker_id,
                epoch,
                spec.num_blocks,
                spec.block_size,
            )
            self._workers_changed()
            taken.set_result(link)
            return events

        if self._closed:
            raise Unavailable("the scheduler is stopping")
        self._post(act)
        return await taken

    def result(self, link: WorkerLink, result: StepResult, timings: StepTimings) -> None:
        """Posts the answer to a step."""
        received = _now()

        def act(now: int) -> Events | None:
            if link.end_reason is not None:
                return None  # a late answer of an attachment that is over
            try:
                events = self._core.apply(link.spec.worker_id, result, now)
            except LinkFault as fault:
                self._lose(link, f"protocol fault: {fault}", now)
                return None
            link.timings.answered(timings, received)
            self._watchers.answered(link.spec.worker_id, result, timings, events, now)
            return events

        self._post(act)

    def lost(self, link: WorkerLink, reason: str) -> None:
        """Posts the end of an attachment."""

        def act(now: int) -> None:
            if link.end_reason is None:
                self._lose(link, reason, now)

        self._post(act)

    # The cycle

    async def _wait(self) -> None:
        now = _now()
        wakeup = self._core.next_wakeup(now)
        timeout = None if wakeup is None else max(0, wakeup - now) / 1e6
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        self._wake.clear()

    def _post(self, act: Callable[[int], Events | None]) -> None:
        self._inbox.append(_Post(act))
        self._wake.set()

    def _execute(self, link: WorkerLink) -> bool:
        """Plans a step for the link to send, unless enough are open. True if there was one."""
        now = _now()
        step = self._core.plan(link.spec.worker_id, now)
        if step is None:
            fault = self._core.broken(link.spec.worker_id)
            if fault is not None:
                log.error("planning for worker %s met a fault: %s", link.spec.worker_id, fault)
                self._lose(link, "its steps cannot be planned", now)
            return False
        link.timings.sent(now)
        if self._watchers:
            step = self._watchers.planned(link.spec.worker_id, step, now, _now() - now)
        link.put(step)
        return True

    def _deliver(self, events: Events | None) -> None:
        if events is None:
            return
        if events.handles.size:
            sinks = events.handles >> _STREAM_BITS
            streams = (events.handles & _STREAM_MASK).astype(np.uint32)
            if (sinks == sinks[0]).all():
                self._put_tokens(int(sinks[0]), streams, events.token_ids)
            else:
                for sink in np.unique(sinks).tolist():
                    mine = sinks == sink
                    self._put_tokens(sink, streams[mine], events.token_ids[mine])
        for end in events.ended:
            self._latencies.ended(end)
            self._watchers.ended(end, end.ended)
            self._put_end(end)

    def _put_tokens(self, sink: int, streams: StreamIds, token_ids: StreamIds) -> None:
        outbox = self._outboxes.get(sink)
        if outbox is not None:
            outbox.put_tokens(streams, token_ids)

    def _put_end(self, end: Ended) -> None:
        sink, stream = end.handle >> _STREAM_BITS, end.handle & _STREAM_MASK
        outbox = self._outboxes.get(sink)
        if outbox is None:
            return
        self._live[sink].discard(end.handle)
        outbox.put_end(stream, end)
        if end.reason is EndReason.FAILED:
            name, message = told(end.request_id), told(end.message)
            log.error("request %s failed on its worker: %s", name, message)
        elif end.reason is EndReason.FAULT:
            name, message = told(end.request_id), told(end.message)
            log.error("request %s cannot be scheduled: %s", name, message)

    def _lose(self, link: WorkerLink, reason: str, now: int) -> None:
        log.warning("worker %s lost: %s", link.spec.worker_id, reason)
        self._core.lost(link.spec.worker_id, now)
        self._watchers.lost(link.spec.worker_id, reason, now)
        del self._links[link.spec.worker_id]
        link.end(reason)
        self._workers_changed()

    def _workers_changed(self) -> None:
        self.workers_changed.set()
        for outbox in self._outboxes.values():
            outbox.put_limits(self._core.limits)


class Caller:
    """One caller's handle on the loop: requests by stream id, answers in its outbox."""

    def __init__(self, loop: EngineLoop, sink: int) -> None:
        self._loop = loop
        self._sink = sink

    def handle(self, stream: int) -> int:
        """The core's name for one of this caller's streams."""
        return self._sink << _STREAM_BITS | stream

    def add(self, request: AddRequest) -> None:
        """See EngineLoop.add; the request's handle comes from `handle`."""
        self._loop.add(self._sink, request)

    def abort(self, stream: int) -> None:
        """Ends a request."""
        self._loop.abort(self.handle(stream))

    def finish(self, stream: int, kept_tokens: int) -> None:
        """Ends a request whose text met a stop string."""
        self._loop.finish(self.handle(stream), kept_tokens)


def _now() -> int:
    return time.monotonic_ns() // 1000
