"""compose.yaml, brought up by a real engine: what people who run it see.

One set for the whole module, and each test goes on from what the ones before it left: first answer,
more replicas, a killed worker, an orderly end, and services without any network.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator

import openai
import pytest

from quire import SamplingParams
from quire.answers import Delta
from tests.system.compose_set import MODEL, Engine, Parts, engine_problem, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

WORKERS, TOKENIZERS = 4, 2

QUESTION = "The capital of France is"
LONG = 150
"""Tokens that take some seconds also where a processor is fast."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with the images of this tree, and nothing running."""
    problem = engine_problem()
    if problem:
        pytest.skip(problem)
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n{line}")
            sys.stdout.flush()

    parts = Parts(say)
    engine = Engine.start(parts)
    try:
        engine.compose("down", "--volumes", "--timeout", "1")
        engine.build()
        yield engine
    finally:
        with parts.part("down"):
            engine.stop()
        say(f"compose: these parts together: {sum(parts.seconds.values()):.0f} s")


@pytest.fixture(scope="module")
async def up(engine: Engine) -> Engine:
    """The set as `docker compose up` brings it up: the model fetched, a first answer given."""
    with engine.parts.part("cold up to first answer"):
        await asyncio.to_thread(engine.up)
        async with engine.client() as client:
            first = await client.complete(QUESTION, greedy(4))
    assert first.text.startswith(" Paris")
    return engine


@pytest.fixture
def alone(up: Engine) -> Iterator[Callable[..., str]]:
    """`Engine.run_alone`; what it starts is gone after the test."""
    started: list[str] = []

    def start(*arguments: str, options: tuple[str, ...] = ()) -> str:
        started.append(up.run_alone(*arguments, options=options))
        return started[-1]

    yield start
    for container in reversed(started):
        up.docker("rm", "--force", container)


@pytest.mark.timeout(1200)  # the first one waits for engine, images and model
async def test_a_question_is_answered_through_the_published_port(up: Engine) -> None:
    async with up.client() as client:
        assert (await client.info()).model == MODEL
        answer = await client.complete_chat([{"role": "user", "content": "Hello"}], greedy(4))
    assert len(answer.token_ids) == 4


async def test_without_a_gpu_the_worker_computes_on_the_cpu_and_says_so(up: Engine) -> None:
    (worker,) = up.containers("worker")
    threads = len(os.sched_getaffinity(0))
    said = f"computing in float32 on cpu, threads: {threads} ({threads} processors by affinity"
    assert said in up.log(worker)


async def test_the_gpu_is_asked_for_by_an_overlay_alone(up: Engine) -> None:
    def described(*files: str) -> dict[str, object]:
        worker = up.config(*files)["services"]["worker"]
        return {
            "device": worker.get("environment", {}).get("QUIRE_DEVICE"),
            "reserved": worker["deploy"].get("resources", {}).get("reservations"),
        }

    assert described("compose.yaml") == {"device": None, "reserved": None}
    wanted = {"capabilities": ["gpu"], "driver": "nvidia", "device_ids": ["0"]}
    assert described("compose.yaml", "compose.gpu.yaml") == {
        "device": "cuda",
        "reserved": {"devices": [wanted]},
    }


async def test_the_overlay_of_telemetry_goes_over_the_set(up: Engine) -> None:
    plain = up.config("compose.yaml")["services"]
    services = up.config("compose.yaml", "compose.observability.yaml")["services"]
    assert set(services) - set(plain) == {"collector", "jaeger", "prometheus", "grafana"}
    for service, described in plain.items():
        more = services[service].pop("environment", {})
        before = described.pop("environment", {})
        assert before.items() <= more.items()
        assert services[service] == described


async def test_a_worker_told_to_use_a_gpu_does_not_go_on_without_one(
    up: Engine, alone: Callable[..., str]
) -> None:
    options = ("--env=QUIRE_DEVICE=cuda",)
    worker = alone("worker", "quire-worker", "--model", MODEL, options=options)
    code, log = up.finished(worker)
    assert code == 2
    assert "--device cuda: this process sees no GPU" in log


async def test_more_workers_and_tokenizers_join_while_it_runs(up: Engine) -> None:
    before = up.containers("worker")
    with up.parts.part(f"scale to {WORKERS} workers and {TOKENIZERS} tokenizers"):
        up.up("--scale", f"worker={WORKERS}", "--scale", f"tokenizer={TOKENIZERS}")
    assert set(before) < set(up.containers("worker"))
    assert len(up.loads().running) == WORKERS
    assert len(set(up.text_target().split(","))) == TOKENIZERS
    async with up.client() as client:
        answers = await asyncio.gather(*(client.complete(QUESTION, greedy(4)) for _ in range(8)))
    assert {answer.text for answer in answers} == {answers[0].text}


async def test_a_worker_is_killed_in_mid_answer_and_the_answer_goes_on(up: Engine) -> None:
    requeues = up.loads().requeues
    deltas: list[Delta] = []
    begun = asyncio.Event()

    async def answer() -> None:
        async with up.client(resume_tries=0) as client:
            async for delta in client.generate("Once upon a time", greedy(LONG)):
                deltas.append(delta)
                begun.set()

    def kill() -> str:
        (victim,) = [id for id, running in up.loads().running.items() if running]
        up.kill_service(victim, "quire-worker")
        return victim

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        await begun.wait()
        victim = await asyncio.to_thread(kill)
    assert sum(len(delta.token_ids) for delta in deltas) == LONG
    assert deltas[-1].finished is not None
    assert up.loads().requeues == requeues + 1

    def is_back() -> bool:
        state = up.inspect(victim)
        return state["RestartCount"] == 1 and state["Health"]["Status"] == "healthy"

    with up.parts.part("the killed worker is healthy again"):
        await until(is_back)
    assert len(up.loads().running) == WORKERS


async def test_openai_clients_come_in_by_the_gateway(up: Engine) -> None:
    up.use_profile("openai")
    with up.parts.part("gateway built and up"):
        up.compose("build", "--quiet", "gateway", timeout_s=600)
        up.up("--no-deps", "gateway")
    door = f"http://{up.published('gateway', 30000)}/v1"
    async with openai.AsyncOpenAI(base_url=door, api_key="none", timeout=60) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=4, temperature=0
        )
    assert answer.choices[0].text.startswith(" Paris")


@pytest.mark.parametrize("service", ["scheduler", "worker", "tokenizer"])
async def test_orphans_that_end_are_reaped(up: Engine, service: str) -> None:
    assert up.python(up.containers(service)[0], ORPHANS, "50").split() == ["0"]


@pytest.mark.parametrize("service", ["scheduler", "worker", "tokenizer"])
async def test_a_service_has_no_more_rights_than_it_needs(up: Engine, service: str) -> None:
    assert json.loads(up.python(up.containers(service)[0], RIGHTS)) == {
        "uid": 10001,
        "capabilities": 0,
        "no new privileges": True,
        "/opt/quire": "Read-only file system",
        "/var/lib/quire": "Read-only file system",
        "/tmp": "may be written",
    }


async def test_an_orderly_stop_lets_the_answer_end(up: Engine) -> None:
    deltas: list[Delta] = []
    begun = asyncio.Event()

    async def answer() -> None:
        async with up.client(resume_tries=0) as client:
            async for delta in client.generate("One, two, three,", greedy(LONG // 2)):
                deltas.append(delta)
                begun.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        await begun.wait()
        with up.parts.part("stop while an answer streams"):
            await asyncio.to_thread(up.compose, "stop")
    assert sum(len(delta.token_ids) for delta in deltas) == LONG // 2
    ended = {
        service: [up.inspect(container)["ExitCode"] for container in up.containers(service)]
        for service in ("model", "scheduler", "worker", "tokenizer", "gateway")
    }
    assert ended == {
        "model": [0],
        "scheduler": [0],
        "worker": [0] * WORKERS,
        "tokenizer": [0] * TOKENIZERS,
        "gateway": [0],
    }


@pytest.mark.parametrize("after", ["2 s", "it said that it loads"])
async def test_a_stop_while_a_worker_loads_is_an_orderly_end(
    up: Engine, alone: Callable[..., str], after: str
) -> None:
    worker = alone("worker", "quire-worker", "--model", MODEL)
    if after == "2 s":
        await asyncio.sleep(2)
    else:
        await until(lambda: "loading" in up.log(worker))
    with up.parts.part(f"stop a worker after {after}"):
        await asyncio.to_thread(up.docker, "stop", "--time=30", worker)
    assert up.inspect(worker)["ExitCode"] == 0, up.log(worker)


async def test_all_of_it_works_without_any_network(up: Engine, alone: Callable[..., str]) -> None:
    """Three containers that share a loopback interface and have no other; one processor's worth of
    time for the worker."""
    options = ("--network=none",)
    pulled = alone("slim", "quire", "model", "pull", MODEL, options=options)
    code, log = up.finished(pulled)
    assert code == 0
    assert "is already there" in log
    scheduler = alone("slim", "quire-scheduler", options=options)
    options = (f"--network=container:{scheduler}",)
    tokenizer = alone("slim", "quire-tokenizer", "--model", MODEL, options=options)
    worker = alone("worker", "quire-worker", "--model", MODEL, options=(*options, "--cpus=1"))
    with up.parts.part("start without a network"):
        await until(lambda: "ready after" in up.log(worker))
    asked = ("--prompt", QUESTION, "--max-tokens", "4", "--temperature", "0")
    assert " Paris" in up.docker("exec", tokenizer, "quire", "generate", *asked)
    assert "computing in float32 on cpu, threads: 1 (1 processors by" in up.log(worker)


async def test_a_worker_takes_the_processors_its_container_is_bound_to(
    up: Engine, alone: Callable[..., str]
) -> None:
    options = ("--cpuset-cpus=0",)
    worker = alone("worker", "quire-worker", "--model", MODEL, options=options)
    await until(lambda: "KV cache" in up.log(worker))
    assert "computing in float32 on cpu, threads: 1 (1 processors by" in up.log(worker)


ORPHANS = """
import os, pathlib, sys, time
alive, write_end = os.pipe()
if os.fork() == 0:
    for _ in range(int(sys.argv[1])):
        if os.fork() == 0:
            time.sleep(0.2)
            os._exit(0)
    os._exit(0)
os.wait()
os.close(write_end)
os.read(alive, 1)

def dead() -> int:
    stats = [path.read_text() for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    return sum(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats)

for _ in range(50):
    if not dead():
        break
    time.sleep(0.1)
print(dead())
"""
"""Leaves so many children behind, whose parent ends before they do, and counts the dead ones."""

RIGHTS = """
import json, os, pathlib, re
status = pathlib.Path("/proc/self/status").read_text()
found = {
    "uid": os.getuid(),
    "capabilities": int(re.search(r"CapEff:\\s*(\\w+)", status)[1], 16),
    "no new privileges": "NoNewPrivs:\\t1" in status,
}
for folder in ("/opt/quire", "/var/lib/quire", "/tmp"):
    try:
        pathlib.Path(folder, "written").touch()
        found[folder] = "may be written"
    except OSError as error:
        found[folder] = error.strerror
print(json.dumps(found))
"""
