"""The tokenizer service as a process.

Wiring, top to bottom:

    settings ─► model folder ─► Encoding ─► EncodingPool ─┐
                     │             └──► Validator ────────┼─► TextServicer ─► GrpcServer
                     └─► sampling defaults ──┘            │         health: session up
    schedulers ◄══ Session ══► SchedulerLink ◄── Router ──┘

Ready means: the tokenizer is loaded, a session with a scheduler stands, and that can serve. On
SIGTERM: not ready, new calls refused, running ones finish within --drain-timeout, goodbye to the
scheduler, and exit 0.
"""

import asyncio
import logging
import os
import sys

from quire.models import ModelNotFound, locate_model
from quire.v1 import text_pb2_grpc
from quire.version import VERSION
from services.chassis.errors import Unavailable
from services.chassis.process import StartupError, run_process, settle_memory
from services.chassis.server import GrpcServer
from services.chassis.telemetry import Telemetry
from services.tokenizer.encoding import load_encoding
from services.tokenizer.encoding_pool import EncodingPool
from services.tokenizer.metrics import State, TokenizerMetrics
from services.tokenizer.routing import Router
from services.tokenizer.sampling_defaults import load_sampling_defaults
from services.tokenizer.servicer import TextServicer
from services.tokenizer.session_call import LinkOptions
from services.tokenizer.settings import TokenizerSettings, read_settings
from services.tokenizer.validation import Validator
from services.tokenizer.watching import Watchers

log = logging.getLogger("services.tokenizer")

_SERVICE = "quire.v1.TextService"
_MOST_THREADS = 8
_LAST_WORDS_S = 0.5
"""What a call ended by us may take to send its status."""


def main() -> None:
    """Entry point of `quire-tokenizer`."""
    sys.exit(run_process(_main))


async def _main(stopping: asyncio.Event) -> None:
    settings = read_settings(sys.argv[1:], os.environ)
    telemetry = Telemetry(settings, service="tokenizer", version=VERSION, env=os.environ)
    try:
        await serve(settings, telemetry, stopping)
    finally:
        await telemetry.close()


async def serve(settings: TokenizerSettings, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set, then drains.

    Raises:
        StartupError: the model, one of its files, or an address cannot be used.
    """
    try:
        located = locate_model(settings.model)
    except ModelNotFound as error:
        raise StartupError(f"model: {error}") from error
    # On a thread, so that signals are heard meanwhile.
    encoding = await asyncio.to_thread(load_encoding, located.path)
    defaults = load_sampling_defaults(located.path)
    model = settings.served_model_name or located.name
    server = GrpcServer([_SERVICE], observers=telemetry.observers())

    async def on_serving(serving: bool) -> None:
        await server.set_ready(serving and not stopping.is_set())

    link = Router(
        [
            LinkOptions(target=target, tokenizer_digest=encoding.digest, model=model)
            for target in settings.scheduler
        ],
        on_serving,
    )
    metrics = None if telemetry.metrics is None else TokenizerMetrics(telemetry.metrics, model)
    pool = EncodingPool(
        encoding,
        threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))),
        on_done=None if metrics is None else metrics.encoded,
    )
    servicer = TextServicer(
        version=VERSION,
        validator=Validator(model=model, vocab_size=encoding.vocab_size, defaults=defaults),
        encoding=encoding,
        pool=pool,
        link=link,
        watchers=_watchers(telemetry, metrics, model, encoding.digest, settings.trace_content),
    )
    if metrics is not None:
        metrics.watch(
            lambda: State(calls=servicer.live_calls, encoding=pool.waiting, links=link.states)
        )
    text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server.grpc)
    telemetry.serve()
    try:
        bound = await server.start(settings.listen)
        log.info("serving %s on %s", model, ", ".join(bound))
        settle_memory()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.run())
            lag = tasks.create_task(telemetry.run())
            await stopping.wait()
            await _drain(server, servicer, link, settings.drain_timeout)
            lag.cancel()
    finally:
        await server.stop()
        pool.close()


def _watchers(
    telemetry: Telemetry,
    metrics: TokenizerMetrics | None,
    model: str,
    digest: str,
    content: bool,
) -> Watchers | None:
    """Who watches the requests; None where nothing is asked for."""
    if telemetry.tracing is None and metrics is None:
        return None
    return Watchers(
        model=model,
        tokenizer_digest=digest,
        tracer=None if telemetry.tracing is None else telemetry.tracing.tracer,
        metrics=metrics,
        content=content,
    )


async def _drain(
    server: GrpcServer, servicer: TextServicer, link: Router, timeout_s: float
) -> None:
    """Lets running calls finish, ends those that do not, and says goodbye to the scheduler."""
    servicer.refuse_new()
    await server.set_ready(False)
    if not await _idle_within(servicer, timeout_s):
        log.warning("%d calls still run after %g s", servicer.live_calls, timeout_s)
        link.fail_all(Unavailable("this tokenizer is going away", reason="DRAINING"))
        await _idle_within(servicer, _LAST_WORDS_S)
    link.stop()


async def _idle_within(servicer: TextServicer, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await servicer.wait_idle()
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    main()
