"""One trace for each request, from the client to the scheduler, read back from a real receiver."""

import asyncio
import contextlib
import json
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from quire.v1 import text_pb2, text_pb2_grpc
from tests.fakes.otlp_receiver import OtlpReceiver, Span, dead_url, receiving
from tests.quire.cli.running_quire import environment, started
from tests.system.raw_requests import text_request
from tests.system.service_set import SERVING, TEXT_SERVICE, TOKEN_SERVICE, ServiceSet

pytestmark = pytest.mark.system

TOKENIZERS = ("tokenizer", "tokenizer-1")
SERVER = "quire-tokenizer SERVER text_completion tiny"
CALLER = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
UNSAMPLED = "1af7651916cd43dd8448eb211c80319c"

# What streams and probes would be called; nothing else may be a span of the door.
LONG_LIVED = re.compile(r"Session|Attach|Watch|Check|Reflection")


@contextlib.asynccontextmanager
async def traced_set(model: Path, *flags: str) -> AsyncIterator[ServiceSet]:
    """A scheduler, a worker and two tokenizers, all ready, all with these flags."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        kinds = ("scheduler", "worker", "tokenizer")
        services = ServiceSet(Path(folder), model, dict.fromkeys(kinds, flags))
        try:
            await services.start("scheduler", "worker-0", *TOKENIZERS)
            await services.until(lambda: services.health("scheduler", TOKEN_SERVICE), SERVING)
            for name in TOKENIZERS:
                await services.until(lambda name=name: services.health(name, TEXT_SERVICE), SERVING)
            yield services
        finally:
            await services.end()


async def ended(services: ServiceSet) -> None:
    """All end in order and tell what is left; every exit code is 0, and no log has an error."""
    for name in (*TOKENIZERS, "scheduler", "worker-0"):
        program = services.programs[name]
        program.send(signal.SIGTERM)
        assert await program.exit_code() == 0, program.log


def error_lines(services: ServiceSet) -> list[str]:
    logs = "\n".join(program.log for program in services.programs.values())
    return [line for line in logs.splitlines() if re.match(r"\S+ \S+ E ", line)]


async def quire_generate(url: str, target: str) -> dict[str, object]:
    """One answer of a client that is a process of its own, and traces."""
    command = [sys.executable, "-m", "quire", "generate", "--prompt", "A", "--max-tokens", "8"]
    command += ["--temperature", "0", "--ignore-eos", "--json", "--target", target]
    command += ["--otlp-traces-endpoint", url]
    async with started(*command, env=environment()) as process:
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return json.loads(out)


def skeleton(receiver: OtlpReceiver, trace_id: str) -> list[str]:
    """A trace but for what lies within the scheduler's request."""
    below = ("queue", "prefill", "decode", "worker_request")
    lines = receiver.tree(trace_id).splitlines()
    return [line for line in lines if line.split()[-1] not in below]


def whole(*, client: bool = False) -> list[str]:
    """The tree of a request that went well, outermost first."""
    lines = [
        SERVER,
        "  quire-tokenizer INTERNAL tokenize",
        "  quire-scheduler INTERNAL llm_request",
        "  quire-tokenizer INTERNAL detokenize",
    ]
    return ["quire-cli CLIENT text_completion", *(f"  {one}" for one in lines)] if client else lines


async def read(call: object) -> list[object]:
    return [message async for message in call]


async def code_of(call: object) -> grpc.StatusCode:
    try:
        await read(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_each_request_is_one_trace_across_the_processes(successor_model: Path) -> None:
    async with receiving() as receiver:
        async with traced_set(
            successor_model, f"--otlp-traces-endpoint={receiver.url}"
        ) as services:
            answers = [
                await quire_generate(receiver.url, services.address(name)) for name in TOKENIZERS
            ]
            async with services.channel("tokenizer-1") as other:
                stubs = [services.text, text_pb2_grpc.TextServiceStub(other)]
                await ask_in_all_ways(stubs)
            await leave_early(stubs[0], times=10)
            await services.until(services.at_rest)
            await ended(services)
            assert error_lines(services) == []

        for answer in answers:
            assert skeleton(receiver, answer["trace_id"]) == whole(client=True)
        of_caller = [span for span in receiver.spans if span.parent_id == CALLER[1]]
        assert [span.line for span in of_caller] == [SERVER] * 2
        assert {span.trace_id for span in of_caller} == {CALLER[0]}
        caller_tree = skeleton(receiver, CALLER[0])
        assert sorted(caller_tree[1:]) == sorted(f"  {line}" for line in whole() * 2)

        # 2 by the command line, 2 with a context, 2 without, 1 refused, 10 cut; unsampled none.
        at_the_door = [span for span in receiver.spans if span.service == "quire-tokenizer"]
        requests = [span for span in at_the_door if span.kind == "SERVER"]
        assert len(requests) == 2 + 2 + 2 + 1 + 10
        assert not receiver.of_trace(UNSAMPLED)
        begun = [span for span in requests if not span.parent_id]
        good = [span for span in begun if answered_in_full(span)]
        assert [skeleton(receiver, span.trace_id) for span in good] == [text_whole()] * 2
        assert len({span.trace_id for span in begun}) == len(begun) == 2 + 1 + 10

        (refused,) = [span for span in requests if span.status == "ERROR"]
        assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
        cut = [s for s in requests if s.attributes["rpc.response.status_code"] == "CANCELLED"]
        assert len(cut) == 10
        for span in cut:
            names = [child.name for child in receiver.of_trace(span.trace_id)]
            assert {"llm_request", "detokenize"} <= set(names)
            assert span.end_ns - span.start_ns < 60e9

        assert [span.line for span in receiver.spans if LONG_LIVED.search(span.name)] == []
        instances = {span.resource["service.instance.id"] for span in requests}
        assert len(instances) == 2
        services_seen = {span.service for span in receiver.spans}
        assert services_seen == {
            f"quire-{one}" for one in ("cli", "tokenizer", "scheduler", "worker")
        }
        orphans = [span.line for span in receiver.spans if is_orphan(receiver, span)]
        assert orphans == []


def answered_in_full(span: Span) -> bool:
    return "gen_ai.response.finish_reasons" in span.attributes


def text_whole() -> list[str]:
    """As `whole`, for a prompt that came as ids: nothing is encoded."""
    return [line for line in whole() if not line.endswith("tokenize") or "detok" in line]


def is_orphan(receiver: OtlpReceiver, span: Span) -> bool:
    """Whether its parent was never told of, and is not the test's own."""
    known = {other.span_id for other in receiver.of_trace(span.trace_id)}
    return bool(span.parent_id) and span.parent_id not in known and span.parent_id != CALLER[1]


async def ask_in_all_ways(stubs: Sequence[object]) -> None:
    """Streams and unary answers, with a caller's context and without, unsampled, refused."""
    caller = "-".join(("00", *CALLER))
    for stub, stream in zip(stubs, (True, False), strict=True):
        output = text_pb2.OutputOptions(stream=stream)
        request = text_pb2.GenerateRequest(text="A", output=output)
        request.stopping.max_tokens, request.stopping.ignore_eos = 8, True
        assert await read(stub.Generate(request, metadata=(("traceparent", f"{caller}-01"),)))
        assert await read(stub.Generate(text_request([65], 8, stream=stream)))
        unsampled = caller.replace(CALLER[0], UNSAMPLED)
        assert await read(stub.Generate(request, metadata=(("traceparent", f"{unsampled}-00"),)))
    refused = await code_of(stubs[0].Generate(text_request([], 8)))
    assert refused is grpc.StatusCode.INVALID_ARGUMENT


async def leave_early(stub: object, times: int) -> None:
    for _ in range(times):
        call = stub.Generate(text_request([65], 5_000))
        await call.read()
        call.cancel()


async def test_a_dead_receiver_costs_spans_and_series_do_not_grow(successor_model: Path) -> None:
    flags = ("--enable-metrics", "--metrics-port=0", "--drain-timeout=10")
    with dead_url() as url:
        async with traced_set(successor_model, *flags, f"--otlp-traces-endpoint={url}") as services:
            await ask_many(services, range(100))
            before = await series(services)
            await ask_many(services, range(100, 1_000))
            assert await series(services) == before
            await services.until(lambda: lost_spans(services))
            await ended(services)


async def ask_many(services: ServiceSet, numbers: range) -> None:
    """Requests of unique ids and tenants; every third names a model of its own and is refused."""
    running = asyncio.Semaphore(16)

    async def ask(number: int) -> None:
        names = {"request_id": f"r{number}"}
        if number % 3 == 0:
            names["model"] = f"model-{number}"
        request = text_request([65], 1, stream=False, **names)
        request.scheduling.tenant = f"tenant-{number}"
        request.scheduling.session_id = f"session-{number}"
        async with running:
            code = await code_of(services.text.Generate(request))
        assert code is (grpc.StatusCode.OK if number % 3 else grpc.StatusCode.NOT_FOUND)

    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(ask(number))


async def scraped(services: ServiceSet, name: str) -> list[str]:
    """The samples of a service's endpoint, whose address its log tells."""
    (url,) = re.findall(r"metrics on (http://\S+)", services.programs[name].log)

    def get() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read().decode()

    lines = (await asyncio.to_thread(get)).splitlines()
    return [line for line in lines if not line.startswith("#")]


async def series(services: ServiceSet) -> dict[str, list[str]]:
    """Names and labels of all samples of both services, but for their values."""
    return {
        name: sorted({line.rsplit(" ", 1)[0] for line in await scraped(services, name)})
        for name in ("tokenizer", "scheduler")
    }


async def lost_spans(services: ServiceSet) -> bool:
    samples = dict(line.rsplit(" ", 1) for line in await scraped(services, "tokenizer"))
    lost = {
        outcome: float(samples[f'quire_trace_spans_total{{outcome="{outcome}"}}'])
        for outcome in ("sent", "failed", "dropped")
    }
    assert lost["sent"] == 0
    return lost["failed"] + lost["dropped"] > 0
