"""The scheduler process (`quire-scheduler`): its wiring, top to bottom."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from quire.v1 import admin_pb2_grpc, info_pb2_grpc, token_pb2_grpc, worker_pb2_grpc
from quire.version import VERSION
from services.chassis.logs import told
from services.chassis.process import StartupError, run_process, settle_memory
from services.chassis.server import GrpcServer
from services.chassis.settings import parse
from services.chassis.telemetry import Telemetry
from services.scheduler.admin import AdminServicer
from services.scheduler.audit import AuditLog
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.hashing import hashing_for
from services.scheduler.load_metrics import LoadMetrics
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.model_folder import ModelFolder, read_model_folder
from services.scheduler.prompt_hasher import PromptHasher
from services.scheduler.recording import Recording
from services.scheduler.request_log import RequestLog
from services.scheduler.servicer import InfoServicer, TokenServicer
from services.scheduler.session_chains import SessionChains
from services.scheduler.settings import LATER_FLAGS, Settings
from services.scheduler.traces import Traces
from services.scheduler.vllm_names import vllm_families
from services.scheduler.worker_link import WorkerLinkServicer

facade: ModuleType | None
try:
    from services.scheduler import facade as openai_door
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.partition(".")[0] != "smg_grpc_proto":
        raise
    facade = None  # the extra `openai` is not installed
else:
    facade = openai_door

log = logging.getLogger(__name__)

TOKEN_SERVICE = "quire.v1.TokenService"
INFO_SERVICE = "quire.v1.InfoService"
WORKER_LINK_SERVICE = "quire.v1.WorkerLinkService"
ADMIN_SERVICE = "quire.v1.AdminService"

_STALL_CHECK_S = 1.0


def wire(
    settings: Settings,
    admin: GrpcServer | None = None,
    recording: Recording | None = None,
    telemetry: Telemetry | None = None,
    folder: ModelFolder | None = None,
) -> tuple[EngineLoop, GrpcServer]:
    """The loop and the server in front of it, not yet running.

    Args:
        settings: of the process.
        admin: server of the admin service; None: the same as of the others.
        recording: of the core; None: it is not recorded.
        telemetry: of the process; None: nothing is told.
        folder: of the model, where `settings.tokenizer` names one.
    """
    if recording is None:
        hashing = hashing_for(settings.prefix_caching_hash_algo, settings.hash_key())
        loop = EngineLoop(Scheduler(settings.core_config(), hashing))
    else:
        hashing = recording.hashing
        loop = EngineLoop(recording.core)
    if telemetry is not None:
        watch(loop, telemetry)
    hasher = PromptHasher(hashing, SessionChains())
    always_ready = [INFO_SERVICE, WORKER_LINK_SERVICE]
    if admin is None:
        always_ready.append(ADMIN_SERVICE)
    observers = () if telemetry is None else telemetry.observers()
    served = [TOKEN_SERVICE] if facade is None else [TOKEN_SERVICE, facade.SERVICE]
    server = GrpcServer(served, always_ready, observers)
    token_pb2_grpc.add_TokenServiceServicer_to_server(TokenServicer(loop, hasher), server.grpc)
    info_pb2_grpc.add_InfoServiceServicer_to_server(InfoServicer(loop), server.grpc)
    worker_pb2_grpc.add_WorkerLinkServiceServicer_to_server(
        WorkerLinkServicer(loop, check_block_tables=settings.check_block_tables), server.grpc
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(
        AdminServicer(loop, hasher, AuditLog()), (admin or server).grpc
    )
    if facade is not None:
        facade.add_facade(server, loop, hasher, folder)
    return loop, server


def watch(loop: EngineLoop, telemetry: Telemetry) -> None:
    """Has the loop watched by what the settings ask for."""
    if telemetry.tracing is not None:  # first, so that the others see the contexts it makes
        loop.watch(Traces(telemetry.tracing.tracer, telemetry.tracing.chosen_tracer))
    if telemetry.metrics is not None:
        loop.watch(LoadMetrics(telemetry.metrics, loop))
        loop.watch(SchedulerMetrics(telemetry.metrics, loop))
    loop.watch(RequestLog())


async def serve(stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set and what runs has ended or run out of time."""
    settings = parse(
        Settings, prog="quire-scheduler", argv=sys.argv[1:], env=os.environ, later=LATER_FLAGS
    )
    telemetry = Telemetry(settings, service="scheduler", version=VERSION, env=os.environ)
    try:
        recording = start_recording(settings)
        try:
            await serve_with(settings, recording, telemetry, stopping)
        finally:
            if recording is not None:
                await recording.close()
    finally:
        await telemetry.close()


def start_recording(settings: Settings) -> Recording | None:
    """The recording that the settings ask for.

    Raises:
        StartupError: the file cannot be made.
    """
    if settings.record is None:
        return None
    key = settings.hash_key()
    try:
        return Recording(
            Path(settings.record),
            settings.core_config(),
            hashing_for(settings.prefix_caching_hash_algo, key),
            hash_key=key,
            hash_only=settings.record_hash_only,
        )
    except OSError as error:
        raise StartupError(f"--record {settings.record}: {error.strerror}") from error


async def serve_with(
    settings: Settings,
    recording: Recording | None,
    telemetry: Telemetry,
    stopping: asyncio.Event,
) -> None:
    """See `serve`; recording and telemetry are closed by the caller."""
    folder = None
    if settings.tokenizer is not None:
        folder = await asyncio.to_thread(read_model_folder, settings.tokenizer)
    if facade is None:
        log.info("vllm.grpc.engine.VllmEngine is not served: quire-llm[openai] is not installed")
    admin = GrpcServer([], [ADMIN_SERVICE, INFO_SERVICE]) if settings.admin_listen else None
    info = GrpcServer([], [INFO_SERVICE]) if settings.info_listen else None
    loop, server = wire(settings, admin, recording, telemetry, folder)
    telemetry.serve(also=vllm_families)
    doors = [_Door("listening", server, settings.listen)]
    if admin is not None:
        info_pb2_grpc.add_InfoServiceServicer_to_server(InfoServicer(loop), admin.grpc)
        doors.append(_Door("admin service", admin, settings.admin_listen))
    if info is not None:
        info_pb2_grpc.add_InfoServiceServicer_to_server(InfoServicer(loop), info.grpc)
        doors.append(_Door("info service", info, settings.info_listen))
    await start_all(doors)
    settle_memory()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.run())
        lag = tasks.create_task(telemetry.run())
        readiness = tasks.create_task(follow_readiness(loop, server, settings.worker_grace))
        await stopping.wait()
        loop.draining = True
        readiness.cancel()
        lag.cancel()
        loop.serving = False
        await server.set_ready(False)
        await drained(loop, settings.drain_timeout)
        loop.close()
    for door in reversed(doors):
        await door.server.stop()


@dataclass(frozen=True, slots=True)
class _Door:
    what: str
    server: GrpcServer
    listen: Sequence[str]


async def start_all(doors: Sequence[_Door]) -> None:
    """Starts the servers; stops all of them where one cannot be started.

    Raises:
        StartupError: an address cannot be bound.
    """
    try:
        for door in doors:
            bound = await door.server.start(door.listen)
            log.info("%s on %s", door.what, ", ".join(bound))
    except StartupError:
        for door in doors:
            await door.server.stop()
        raise


async def follow_readiness(loop: EngineLoop, server: GrpcServer, grace_s: float) -> None:
    """Ready while a worker is attached and work moves, and for `grace_s` after the last one left.

    Args:
        loop: told, and through it the sessions.
        server: whose health it is.
        grace_s: seconds.
    """
    while True:
        loop.workers_changed.clear()
        if loop.limits is not None:
            stall = loop.stall()
            if stall is not None and loop.serving:
                blocks = told(stall.request_id) or "nobody's request"
                log.error("nothing moves, and %s waits: %s", blocks, stall.reason)
            loop.serving = stall is None
            pause_s: float | None = min(_STALL_CHECK_S, loop.config.stall_timeout_us / 1e6)
        else:
            pause_s = grace_s if loop.serving else None
        await server.set_ready(loop.serving)
        try:
            async with asyncio.timeout(pause_s):
                await loop.workers_changed.wait()
        except TimeoutError:
            if loop.limits is None:
                loop.serving = False


async def drained(loop: EngineLoop, timeout_s: float) -> None:
    """Waits until no request is live, at most `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await loop.idle.wait()
    except TimeoutError:
        log.warning("requests are still running after %g s; leaving them", timeout_s)


def main() -> None:
    """Entry point of `quire-scheduler`."""
    sys.exit(run_process(serve))


if __name__ == "__main__":
    main()
