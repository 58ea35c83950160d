"""The worker process (`quire-worker`): its wiring, top to bottom."""

import asyncio
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from quire.models import LocatedModel, ModelNotFound, locate_model
from quire.version import VERSION
from services.chassis.process import StartupError, run_process, settle_memory
from services.chassis.server import GrpcServer
from services.chassis.tasks import run_until_first_ends
from services.chassis.telemetry import Telemetry
from services.worker.engine import Engine, StartUp, load_engine
from services.worker.link import SchedulerLink
from services.worker.machine import ClaimedName, Machine, claim_name
from services.worker.metrics import WorkerMetrics
from services.worker.model_thread import ModelThread
from services.worker.observer import AttachmentObserver
from services.worker.plan import Attachment, Registration
from services.worker.settings import WorkerSettings, read_settings
from services.worker.spans import AttachmentSpans
from services.worker.stream import LinkOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_LINK_SERVICE = "quire.v1.WorkerLinkService"

# How often Python hands its lock from one busy thread to another, seconds. With the default of 5 ms
# the link and the health check wait that long whenever the model thread runs Python between two
# tensor operations; much shorter costs the model thread more than it gives the link.
_SWITCH_INTERVAL_S = 0.0005
# How long the model thread may take to notice that nothing more comes.
_THREAD_END_S = 1.0
# How often a hanging step is looked for, seconds.
_HANG_CHECK_S = 1.0


async def serve(stopping: asyncio.Event) -> None:
    """Loads the model, attaches to the scheduler and executes steps until `stopping` is set.

    Raises:
        SettingsError: flags or environment are wrong.
        StartupError: the model, the device or the memory cannot be used as told.
    """
    machine = Machine()
    start_up = StartUp(machine.age_s())
    settings = read_settings(sys.argv[1:], os.environ)
    telemetry = Telemetry(settings, service="worker", version=VERSION, env=os.environ)
    try:
        thread_ended = await _serve(settings, telemetry, machine, start_up, stopping)
    finally:
        await telemetry.close()
    if not thread_ended:
        log.warning("the model thread is busy; ending without it")
        # Not sys.exit: the interpreter must not be taken down under a thread inside the model.
        os._exit(0)


async def _serve(
    settings: WorkerSettings,
    telemetry: Telemetry,
    machine: Machine,
    start_up: StartUp,
    stopping: asyncio.Event,
) -> bool:
    """See `serve`; the telemetry is closed by the caller. False: the model thread still runs."""
    located = _located(settings.model)
    log.info("loading %s from %s", located.name, located.path)

    server = GrpcServer([WORKER_LINK_SERVICE])
    await server.start(settings.listen)
    thread = ModelThread(asyncio.get_running_loop())
    try:
        engine = await _unless(
            stopping,
            thread.submit(
                functools.partial(load_engine, settings, located.path, machine, start_up)
            ),
        )
        if engine is not None:
            settle_memory()
            # Held until the end; a name given by the user is the user's to keep unique.
            claimed = None if settings.worker_id else claim_name(socket.gethostname())
            registration = _registration(
                settings, located, engine, claimed=claimed, instance_id=telemetry.instance_id
            )
            readiness = Readiness(server, start_up)
            link = SchedulerLink(
                LinkOptions(
                    target=settings.scheduler,
                    registration=registration,
                    drain_timeout_s=settings.drain_timeout,
                ),
                make_executor=functools.partial(
                    engine.attach, traced=telemetry.tracing is not None
                ),
                thread=thread,
                on_ready=readiness.set,
                observe=_observer(telemetry, engine, registration.worker_id, thread),
            )
            telemetry.serve()
            await run_until_first_ends(
                link.run(stopping),
                readiness.watch(thread, settings.step_timeout),
                telemetry.run(),
            )
    finally:
        await server.stop()
    return await thread.close(_THREAD_END_S)


class Readiness:
    """The worker's health. Ready while steps are taken and none hangs; the first time is also the
    end of the start. Alive while no step hangs.

    Args:
        server: whose health it is.
        start_up: the phases so far.
    """

    def __init__(self, server: GrpcServer, start_up: StartUp) -> None:
        self._server = server
        self._start_up: StartUp | None = start_up
        self._takes_steps = False
        self._hangs = False

    async def watch(self, thread: ModelThread, step_timeout_s: float) -> None:
        """Notices a step that takes longer than `step_timeout_s` seconds, and its end; for ever."""
        while True:
            await asyncio.sleep(min(_HANG_CHECK_S, step_timeout_s))
            hangs = thread.busy_s > step_timeout_s
            if hangs == self._hangs:
                continue
            self._hangs = hangs
            if hangs:
                log.error("a step has been running for more than %g s", step_timeout_s)
            else:
                log.warning("the step that hung has ended")
            await self._server.set_alive(not hangs)
            await self._server.set_ready(self._takes_steps and not hangs)

    async def set(self, ready: bool) -> None:
        """Steps are taken from now on, or are not any more."""
        self._takes_steps = ready
        await self._server.set_ready(ready and not self._hangs)
        if ready and self._start_up is not None:
            self._start_up.end_of("register")
            log.info("ready after %s", self._start_up)
            self._start_up = None


def _observer(
    telemetry: Telemetry, engine: Engine, worker_id: str, thread: ModelThread
) -> Callable[[Attachment], AttachmentObserver] | None:
    """Makes the observer of an attachment; None where neither metrics nor traces are asked for."""
    tracing = telemetry.tracing
    if telemetry.metrics is None and tracing is None:
        return None
    metrics: WorkerMetrics | None = None
    if telemetry.metrics is not None:
        metrics = WorkerMetrics(
            telemetry.metrics,
            limits=engine.limits,
            footprint=engine.footprint,
            device=engine.device,
            thread=thread,
        )

    def observe(attachment: Attachment) -> AttachmentObserver:
        spans = AttachmentSpans(tracing.tracer, worker_id, attachment) if tracing else None
        return AttachmentObserver(attachment, metrics=metrics, spans=spans)

    return observe


def _registration(
    settings: WorkerSettings,
    located: LocatedModel,
    engine: Engine,
    *,
    claimed: ClaimedName | None,
    instance_id: str,
) -> Registration:
    return Registration(
        worker_id=claimed.name if claimed else settings.worker_id or "",
        instance_id=instance_id,
        model=settings.served_model_name or located.name,
        model_digest=engine.loaded.digest,
        dtype=str(engine.dtype).removeprefix("torch."),
        device=str(engine.device),
        limits=engine.limits,
        eos_token_ids=tuple(engine.loaded.config.eos_token_ids),
    )


def _located(model: str) -> LocatedModel:
    try:
        return locate_model(model)
    except ModelNotFound as error:
        raise StartupError(str(error)) from error


async def _unless(stopping: asyncio.Event, future: asyncio.Future[T]) -> T | None:
    """The future's result; None if `stopping` is set before it is there."""
    async with asyncio.TaskGroup() as tasks:
        stop = tasks.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [stop, future]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
    return future.result() if future.done() else None


def main() -> None:
    """Entry point of `quire-worker`."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    sys.exit(run_process(serve))


if __name__ == "__main__":
    main()
