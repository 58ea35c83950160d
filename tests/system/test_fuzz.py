"""Thousands of random requests and bytes: everything ends as it must, and nothing is left of it."""

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from quire.v1 import generation_pb2, text_pb2, token_pb2, worker_pb2
from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.system.random_requests import LONGEST, Maker, Plan
from tests.system.raw_requests import successors, text_request, token_request
from tests.system.service_set import Program, ServiceSet, serving

REQUESTS = 2_000
AT_A_TIME = 24
CANARY_EVERY = 100
STREAMS = 300

# 48 blocks of 16 tokens: three of the long requests fill it, so that requests are preempted.
WORKER = (
    *(f"--max-model-len={LONGEST}", "--max-num-seqs=12", "--max-num-batched-tokens=64"),
    "--kv-cache-memory=96KiB",
)

REASONS = {
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_STOP: "stop",
}

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
async def services(successor_model: Path) -> AsyncIterator[ServiceSet]:
    async with serving(successor_model, {"worker": WORKER}) as running:
        yield running


async def canary(services: ServiceSet) -> None:
    """A good request gives its known tokens at both doors."""
    wanted = successors(65, 8, VOCAB_SIZE)
    (answer,) = [r async for r in services.text.Generate(text_request([65], 8, stream=False))]
    assert list(answer.token_ids) == wanted
    assert bytes(wanted).decode() == answer.text
    ids = [i async for r in services.tokens.Generate(token_request([65], 8)) for i in r.token_ids]
    assert ids == wanted


async def everything_is_well(services: ServiceSet) -> None:
    """All services live, nothing is left of any request, and the next good one works."""
    await services.until(services.at_rest)
    loads = await services.loads()
    assert loads.accepted == loads.ended
    await canary(services)
    for name, program in services.programs.items():
        assert program.is_running, name
        assert not troubles(program), name


def troubles(program: Program) -> list[str]:
    """Tracebacks in a log, from the line before to the end of what they tell."""
    lines = program.log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[max(0, start - 1) : start + 30]) for start in starts]


async def ask(services: ServiceSet, plan: Plan, outcomes: Counter[tuple[str, str]]) -> None:
    """Sends one request, reads as much as its caller would, and checks how it ended."""
    call = call_of(services, plan)
    ids: list[int] = []
    reason, messages, twin_is_due = "", 0, plan.twin is not None
    if plan.cut_after == 0:
        await asyncio.sleep(0.002)
        call.cancel()
    try:
        async for response in call:
            ids.extend(response.token_ids)
            reason = REASONS.get(response.finished.reason, "")
            messages += 1
            if messages == plan.cut_after:
                call.cancel()
            if twin_is_due:
                twin_is_due = False
                await ask(services, plan.twin, outcomes)
    except grpc.aio.AioRpcError as error:
        reason = error.code().name
    except asyncio.CancelledError:
        reason = "CANCELLED"
    assert reason in plan.outcomes, (reason, plan)
    if plan.ids is not None:
        whole = reason in REASONS.values()
        assert ids == (plan.ids if whole else plan.ids[: len(ids)]), plan
    outcomes[plan.kind, reason] += 1


def call_of(services: ServiceSet, plan: Plan) -> Any:
    message = plan.message
    if isinstance(message, token_pb2.TokenServiceGenerateRequest):
        return services.tokens.Generate(message, timeout=plan.timeout_s)
    if isinstance(message, text_pb2.ChatRequest):
        return services.text.Chat(message, timeout=plan.timeout_s)
    return services.text.Generate(message, timeout=plan.timeout_s)


async def test_random_requests_end_as_they_must(services: ServiceSet) -> None:
    maker = Maker()
    plans = iter([maker.plan(number) for number in range(REQUESTS)])
    outcomes: Counter[tuple[str, str]] = Counter()
    before = (await services.loads()).counters

    async def caller() -> None:
        for plan in plans:
            await ask(services, plan, outcomes)
            if outcomes.total() % CANARY_EVERY == 0:
                await canary(services)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_A_TIME):
            tasks.create_task(caller())
    for (kind, reason), count in sorted(outcomes.items()):
        sys.stdout.write(f"{count:5} {kind}: {reason}\n")
    # Whether a deadline of a few milliseconds is met is up to the machine.
    assert set(outcomes) - {("expired", "length")} == OUTCOMES
    assert outcomes.total() >= REQUESTS
    assert (await services.loads()).counters.preemptions > before.preemptions
    await everything_is_well(services)


OUTCOMES = {
    ("greedy", "length"),
    ("sampled", "length"),
    ("sampled", "stop"),
    ("resumed", "length"),
    ("end of sequence", "stop"),
    ("stop string", "stop"),
    ("stop token", "stop"),
    ("chat", "length"),
    ("cut", "CANCELLED"),
    ("deadline", "DEADLINE_EXCEEDED"),
    ("expired", "DEADLINE_EXCEEDED"),
    ("duplicated", "length"),
    ("duplicated", "ABORTED"),
    ("duplicate", "ALREADY_EXISTS"),
    ("replacing", "length"),
    ("wrong", "INVALID_ARGUMENT"),
    ("unknown class", "INVALID_ARGUMENT"),
    ("other model", "NOT_FOUND"),
    ("unknown field", "UNIMPLEMENTED"),
}


# Bytes on the long-lived streams

SESSION, ATTACH = (
    "/quire.v1.TokenService/Session",
    "/quire.v1.WorkerLinkService/Attach",
)


def session_message(draw: random.Random) -> bytes:
    """A message of a session, right or wrong, or no message at all."""
    request = token_request([draw.randrange(300)], draw.randrange(30), request_id="s").request
    choices: tuple[Callable[[], Any], ...] = (
        lambda: token_pb2.SessionRequest(hello=token_pb2.Hello(protocol_major=1)),
        lambda: token_pb2.SessionRequest(hello=token_pb2.Hello(protocol_major=9)),
        lambda: token_pb2.SessionRequest(
            submit=token_pb2.Submit(stream_id=draw.randrange(5), request=request)
        ),
        lambda: token_pb2.SessionRequest(submit=token_pb2.Submit(stream_id=draw.randrange(2**32))),
        lambda: token_pb2.SessionRequest(abort=token_pb2.Abort(stream_id=draw.randrange(5))),
        lambda: token_pb2.SessionRequest(
            finish=token_pb2.Finish(
                stream_id=draw.randrange(5), kept_tokens=draw.choice((0, 1, 2**32 - 1))
            )
        ),
        lambda: token_pb2.SessionRequest(bye=token_pb2.Bye(reason="done")),
        token_pb2.SessionRequest,
    )
    return garbled(draw, draw.choice(choices)().SerializeToString())


def attach_message(draw: random.Random) -> bytes:
    """A message of a worker, right or wrong, or no message at all."""
    small = (0, 1, 2, 16, 2**31, 2**32 - 1)
    register = worker_pb2.Register(
        worker_id=draw.choice(("", "worker-0", "w" * 500, "other")),
        instance_id="x",
        protocol_major=draw.choice((0, 1, 2)),
        model=draw.choice(("", "tiny", "another")),
        model_digest=draw.choice(("", "d")),
        eos_token_ids=[draw.choice(small)],
        **{name: draw.choice(small) for name in REGISTER_NUMBERS},
    )
    result = worker_pb2.StepResult(
        epoch=draw.choice(small),
        step_id=draw.choice(small),
        counts=draw.randbytes(draw.randrange(9)),
        token_ids=draw.randbytes(draw.randrange(9)),
        errors=[worker_pb2.SlotError(slot=draw.choice(small), message="no")],
    )
    choices: tuple[Callable[[], Any], ...] = (
        lambda: worker_pb2.AttachRequest(register=register),
        lambda: worker_pb2.AttachRequest(register=register),
        lambda: worker_pb2.AttachRequest(result=result),
        lambda: worker_pb2.AttachRequest(bye=token_pb2.Bye(reason="done")),
        worker_pb2.AttachRequest,
    )
    return garbled(draw, draw.choice(choices)().SerializeToString())


REGISTER_NUMBERS = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "vocab_size",
    "max_in_flight",
)


def garbled(draw: random.Random, message: bytes) -> bytes:
    """The message, or in one case of four something a little or wholly different."""
    if draw.random() < 0.75:
        return message
    if draw.random() < 0.5 or not message:
        return draw.randbytes(draw.randrange(40))
    position = draw.randrange(len(message))
    return message[:position] + draw.randbytes(1) + message[position + 1 :]


def throw(address: str, method: str, messages: list[bytes], *, cut: bool) -> str:
    """Sends bytes on a stream, reads what comes meanwhile, and says how it ended."""
    started: SimpleQueue[Any] = SimpleQueue()

    def sent() -> Iterator[bytes]:
        call = started.get()
        yield from messages
        if cut:
            call.cancel()

    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(method)(sent(), timeout=20)
        started.put(call)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        return str(call.code().name)


async def read_all(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


@pytest.mark.parametrize(
    ("method", "make", "seed"), [(SESSION, session_message, 1), (ATTACH, attach_message, 2)]
)
async def test_random_bytes_on_a_long_stream_hurt_nobody(
    services: ServiceSet, method: str, make: Callable[[random.Random], bytes], seed: int
) -> None:
    draw = random.Random(seed)
    ends: Counter[str] = Counter()
    hello = token_pb2.SessionRequest(hello=token_pb2.Hello(protocol_major=1)).SerializeToString()
    for number in range(STREAMS):
        messages = [make(draw) for _ in range(draw.randint(1, 8))]
        if method == SESSION and draw.random() < 0.7:
            messages.insert(0, hello)
        cut = draw.random() < 0.3
        address = services.address("scheduler")
        ends[await asyncio.to_thread(throw, address, method, messages, cut=cut)] += 1
        if number % CANARY_EVERY == 0:
            await canary(services)
    sys.stdout.write(f"{dict(ends)}\n")
    assert {"INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= set(ends)
    assert "INTERNAL" not in ends, troubles(services.programs["scheduler"])[:3]
    await everything_is_well(services)


@pytest.mark.parametrize("door", ["text", "token"])
async def test_random_bytes_as_a_request_hurt_nobody(services: ServiceSet, door: str) -> None:
    draw = random.Random(3)
    make = text_request if door == "text" else token_request
    service = "TextService" if door == "text" else "TokenService"
    channel = services.text_channel if door == "text" else services.token_channel
    call: Any = channel.unary_stream(f"/quire.v1.{service}/Generate")
    ends: Counter[str] = Counter()
    for _ in range(STREAMS):
        good = make([65], draw.randint(1, 5)).SerializeToString()
        stream = call(garbled(draw, good), timeout=20)
        await read_all(stream)
        ends[(await stream.code()).name] += 1
    sys.stdout.write(f"{dict(ends)}\n")
    assert {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"} <= set(ends)
    assert not {"INTERNAL", "UNKNOWN"} & set(ends), services.logs
    await everything_is_well(services)
