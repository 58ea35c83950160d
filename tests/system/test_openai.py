"""OpenAI clients through the unmodified gateway `smg`, driven by the official client."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from quire.client import AsyncClient
from quire.local import LocalConfig, LocalSet
from quire.local_plan import free_ports
from quire.params import SamplingParams
from quire.v1 import info_pb2, info_pb2_grpc
from services.scheduler.journal_file import JournalFile
from services.scheduler.replay import Replay
from tests.assets.byte_tokenizer import SPECIAL_TOKENS
from tests.assets.checkpoints import make_random_checkpoint, make_successor_checkpoint
from tests.system.service_set import ROOT, ServiceSet

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
END = 256
"""An end-of-sequence token of the tiny models."""

USER = [{"role": "user", "content": "Hi"}]
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
SAMPLING_DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60)


class Door:
    """A running set with a gateway, and the official client of it."""

    def __init__(self, local: LocalSet, client: openai.AsyncOpenAI) -> None:
        self.local = local
        self.client = client

    async def chat(self, **fields: Any) -> Any:
        asked = {"model": "tiny", "messages": USER, "temperature": 0, **fields}
        return await self.client.chat.completions.create(**asked)

    async def complete(self, **fields: Any) -> Any:
        asked = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 8, **fields}
        return await self.client.completions.create(**asked)

    async def running(self) -> int:
        async with grpc.aio.insecure_channel(self.local.scheduler) as channel:
            return await requests_at(channel)


async def requests_at(channel: grpc.aio.Channel) -> int:
    """Live requests of a scheduler, as a gateway is told."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    answer = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    return int(answer.loads[0].num_total_reqs)


async def until(ask: Callable[[], Any], wanted: Any, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while await ask() != wanted:
            await asyncio.sleep(0.02)


async def listed(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def text_of(chunks: Sequence[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@contextlib.asynccontextmanager
async def running_door(model: Path, **flags: Sequence[str]) -> AsyncIterator[Door]:
    checked = ("--check-block-tables=true", *flags.get("scheduler", ()))
    config = LocalConfig(
        model=model,
        served_model_name="tiny",
        port=0,
        openai_port=0,
        flags={"worker": ("--kv-cache-memory=64MiB",), **flags, "scheduler": checked},
    )
    async with LocalSet(config) as local, client_of(local.openai_url) as client:
        yield Door(local, client)


@pytest.fixture(scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """A model that answers every chat with the alphabet."""
    folder = make_successor_checkpoint(
        tmp_path_factory.mktemp("alphabet"), successors={ord("\n"): ord("A"), ord("Z"): END}
    )
    async with running_door(folder) as running:
        yield running


async def test_models_are_listed(door: Door) -> None:
    models = await door.client.models.list()
    assert [model.id for model in models.data] == ["tiny"]


async def test_a_chat(door: Door) -> None:
    answer = await door.chat()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ALPHABET)
    assert choice.finish_reason == "stop"
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for token in SPECIAL_TOKENS:
        prompt = prompt.replace(token, "~")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(ALPHABET) + 1
    assert answer.usage.total_tokens == len(prompt) + len(ALPHABET) + 1


async def test_completions(door: Door) -> None:
    answer = await door.complete()
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("defghijk", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    several = await door.complete(prompt=["abc", "xy"], max_tokens=2)
    assert [one.text for one in several.choices] == ["de", "z{"]
    chunks = await listed(await door.complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("max_tokens", [1, 5, 100])
async def test_b086_the_usage_of_a_stream_comes_last_and_is_that_of_the_whole(
    door: Door, max_tokens: int
) -> None:
    whole = await door.chat(max_tokens=max_tokens)
    stream = await door.chat(
        max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    )
    *chunks, finish, last = await listed(stream)
    assert last.choices == []
    for counts in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, counts) == getattr(whole.usage, counts)
    assert not any(chunk.usage for chunk in (*chunks, finish))
    assert finish.choices[0].finish_reason == whole.choices[0].finish_reason
    assert text_of(chunks) == whole.choices[0].message.content
    plain = await listed(await door.chat(max_tokens=max_tokens, stream=True))
    assert not any(chunk.usage for chunk in plain)
    assert plain[-1].choices[0].finish_reason


async def test_b088_the_first_delta_has_the_role_and_no_later_one_is_empty(door: Door) -> None:
    first, *others, last = await listed(await door.chat(stream=True))
    assert first.choices[0].delta.role == "assistant"
    assert text_of(others) == ALPHABET
    for chunk in others:
        assert chunk.choices[0].delta.content
        assert chunk.choices[0].delta.role is None
    assert last.choices[0].finish_reason == "stop"
    assert "content" not in last.choices[0].delta.model_dump(exclude_unset=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_b100_a_stop_string_ends_text_and_computation(door: Door, stream: bool) -> None:
    answer = await door.chat(stop=["FGH", "never"], stream=stream, max_tokens=1900)
    if stream:
        chunks = await listed(answer)
        text, finish = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        # Those that were computed before the gateway said that it is enough.
        assert answer.usage.completion_tokens <= len(ALPHABET) + 1
    assert (text, finish) == ("ABCDE", "stop")
    await until(door.running, 0, within_s=5)


async def test_a_prompt_that_is_too_long_is_refused_with_the_limit(door: Door) -> None:
    for prompt, limit in (("a" * 2048, "2048"), ("a" * 6_000_000, "2048")):
        with pytest.raises(openai.BadRequestError, match=limit) as caught:
            await door.complete(prompt=prompt)
        assert caught.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.max_tokens.*at most 2045"):
        await door.complete(max_tokens=5000)
    assert (await door.complete()).choices[0].text == "defghijk"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": True, "top_logprobs": 3}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("repetition_penalty", {"extra_body": {"repetition_penalty": 1.2}}),
        ("min_p", {"extra_body": {"min_p": 0.1}}),
        ("n", {"n": 2}),
        ("json_schema", {"response_format": {"type": "json_object"}}),
        (
            "json_schema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "object"}},
                }
            },
        ),
        ("regex", {"extra_body": {"regex": "a+"}}),
    ],
)
async def test_what_is_not_there_yet_is_refused_by_name(
    door: Door, field: str, fields: dict[str, Any], stream: bool
) -> None:
    """Also where a stream was asked for: as a status, before anything of it."""
    with pytest.raises(openai.InternalServerError) as caught:
        await door.chat(stream=stream, **fields)
    assert caught.value.status_code == 501
    assert f"sampling_params.{field} is not available" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "fields"),
    [("n", {"n": 0}), ("temperature", {"temperature": -1}), ("top_p", {"top_p": 2})],
)
async def test_b031_an_invalid_parameter_is_a_status_and_no_stream(
    door: Door, field: str, fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        await door.chat(stream=stream, **fields)
    assert (await door.complete()).choices[0].text == "defghijk"


async def test_a_client_that_leaves_in_mid_stream_frees_its_request(door: Door) -> None:
    stream = await door.complete(stream=True, **LONG)
    taken = 0
    async for _ in stream:
        taken += 1
        if taken == 5:
            break
    assert await door.running() == 1
    await stream.close()
    await until(door.running, 0, within_s=2)


async def test_b022_a_client_that_leaves_a_plain_call_frees_its_request(door: Door) -> None:
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(door.complete(**LONG))
        await until(door.running, 1)
        call.cancel()
    await until(door.running, 0, within_s=2)


async def test_many_at_once(door: Door) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(door.complete(max_tokens=1 + n % 7)) for n in range(40)]
    for n, call in enumerate(calls):
        assert call.result().choices[0].text == "defghijk"[: 1 + n % 7]


@pytest.mark.parametrize("name", ["gateway", "scheduler"])
async def test_what_dies_comes_back_behind_the_same_url(door: Door, name: str) -> None:
    os.kill(dict(door.local.processes())[name], signal.SIGKILL)

    async def answers() -> bool:
        with contextlib.suppress(openai.APIError):
            return bool((await door.complete()).choices[0].text == "defghijk")
        return False

    async with asyncio.timeout(5):
        while await answers():
            await asyncio.sleep(0.02)
    await until(answers, True, within_s=60)


# The same request through both doors


@pytest.fixture(scope="module")
def careful_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answer depends on all before; a beginning of sequence, sampling defaults."""
    folder = make_random_checkpoint(tmp_path_factory.mktemp("careful"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = "<|sep|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SAMPLING_DEFAULTS}))
    return folder


def recorded(path: Path) -> list[tuple[Any, list[int]]]:
    """Requests of a journal in order, with the tokens that each was given."""
    requests: list[tuple[Any, list[int]]] = []
    by_handle: dict[int, list[int]] = {}
    with JournalFile(path) as file:
        for played in Replay(file).entries():
            if played.request is not None:
                requests.append((played.request, []))
                by_handle[played.request.handle] = requests[-1][1]
            if played.events is not None:
                for handle, token in zip(
                    played.events.handles.tolist(), played.events.token_ids.tolist(), strict=True
                ):
                    by_handle[handle].append(token)
    return requests


async def ask_both(
    door: Door, native: AsyncClient, prompts: Sequence[str], wishes: Sequence[dict[str, Any]]
) -> None:
    """Each request first through the native door, then as an OpenAI client."""
    greedy = SamplingParams(temperature=0.0, max_tokens=10)
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        await native.complete_chat(messages, greedy)
        await door.chat(messages=messages, max_tokens=10)
        # The gateway encodes prompts of completions without special tokens, whatever the model.
        ids = await native.tokenize(prompt, add_special_tokens=False)
        await native.complete(ids, greedy)
        await door.complete(prompt=prompt, max_tokens=10)
    for wish in wishes:
        messages = [{"role": "user", "content": "abc"}]
        await native.complete_chat(messages, SamplingParams(max_tokens=2, **wish))
        own = {key: value for key, value in wish.items() if key == "top_k"}
        usual = {key: value for key, value in wish.items() if key != "top_k"}
        await door.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, extra_body=own, **usual
        )


async def test_b110_b097_both_doors_resolve_a_request_alike(
    careful_model: Path, tmp_path: Path
) -> None:
    """Compared as the scheduler got them: prompt ids, parameters, ids of the answer."""
    draw = random.Random(4)
    letters = "abcdefgh \n\tÄßé漢🙂0123456789"
    prompts = ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(16)]
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5},
        {"temperature": 0.0},
        {"top_p": 1.0},
        {"temperature": 0.3, "top_p": 0.5, "seed": 11},
        {"top_k": 5},
    ]
    journal = tmp_path / "journal"
    async with (
        running_door(careful_model, scheduler=(f"--record={journal}",)) as door,
        AsyncClient(door.local.target) as native,
    ):
        await ask_both(door, native, prompts, wishes)
        text = await native.complete("abc", SamplingParams(max_tokens=1))
        assert text.usage.prompt_tokens == 1 + (await door.complete()).usage.prompt_tokens
    pairs = recorded(journal)[:-2]
    assert len(pairs) == 2 * (2 * len(prompts) + len(wishes))
    answers = set()
    for (one, one_ids), (other, other_ids) in zip(pairs[::2], pairs[1::2], strict=True):
        assert other.prompt.tolist() == one.prompt.tolist()
        assert (other.stop_token_ids, other.ignore_eos) == (one.stop_token_ids, one.ignore_eos)
        same_seed = replace(other.sampling, seed=one.sampling.seed)
        assert same_seed == one.sampling
        if one.sampling.temperature == 0 or one.sampling.seed == other.sampling.seed:
            assert other_ids == one_ids
            answers.add(tuple(one_ids))
    assert len(answers) > len(prompts)
    unset = pairs[4 * len(prompts)][0].sampling
    assert (unset.temperature, unset.top_p, unset.top_k) == pytest.approx((0.6, 0.9, 20))


# Two schedulers behind one gateway


POLICIES = {"gateway-0": "round_robin", "gateway-1": "cache_aware"}


class Pair(ServiceSet):
    """Worker n dials scheduler n; two gateways dial both."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model, {"worker": ("--kv-cache-memory=64MiB",)})
        ports = free_ports("127.0.0.1", 0, 6)
        self.ports, self.gateways, self.metrics = ports[:2], ports[2:4], ports[4:]

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.gateways[number]}"

    def command(self, name: str) -> tuple[str, ...]:
        kind, _, number = name.partition("-")
        if kind == "gateway":
            return (
                *(sys.executable, "-m", "smg", "launch", "--worker-urls"),
                *(f"grpc://127.0.0.1:{port}" for port in self.ports),
                *("--policy", POLICIES[name], "--host", "127.0.0.1"),
                *("--port", str(self.gateways[int(number)])),
                *("--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(self.metrics[int(number)])),
                *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
                *("--log-level", "info"),
            )
        command = super().command(name)
        if kind == "scheduler":
            tcp = f"--listen=127.0.0.1:{self.ports[int(number)]}"
            return (*command, tcp, f"--tokenizer={self.model}")
        target = f"--scheduler={self.address(f'scheduler-{number}')}"
        return tuple(target if part.startswith("--scheduler=") else part for part in command)

    async def accepted(self) -> list[int]:
        """Requests that each scheduler that runs has taken so far."""
        return [await self.accepted_by(name) for name in ("scheduler-0", "scheduler-1")]

    async def accepted_by(self, name: str) -> int:
        async with self.channel(name) as channel:
            stub = info_pb2_grpc.InfoServiceStub(channel)
            return int((await stub.GetLoads(info_pb2.GetLoadsRequest(), timeout=10)).accepted)

    async def healthy(self) -> list[int]:
        """Schedulers that each gateway sends requests to."""
        return [
            int(json.loads(body)["healthy_workers"]) if status == 200 else 0
            for status, body in [
                await asyncio.to_thread(fetch, f"{self.url(number)}/readiness") for number in (0, 1)
            ]
        ]


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@pytest.fixture(scope="module")
async def pair(successor_model: Path) -> AsyncIterator[Pair]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qs-") as folder:
        made = Pair(Path(folder), successor_model)
        try:
            await made.start("scheduler-0", "scheduler-1", "worker-0", "worker-1", *POLICIES)
            await made.until(made.healthy, [2, 2])
            yield made
        finally:
            await made.end()


async def ask(client: openai.AsyncOpenAI, prompt: str, max_tokens: int = 3) -> str:
    answer = await client.completions.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=max_tokens
    )
    return str(answer.choices[0].text)


async def test_what_is_cached_draws_requests_since_the_gateway_is_told(pair: Pair) -> None:
    beginning = "a long beginning that these prompts have in common. " * 6
    async with client_of(f"{pair.url(1)}/v1") as client:
        await ask(client, beginning)

        async def is_indexed() -> bool:
            url = f"http://127.0.0.1:{pair.metrics[1]}/metrics"
            _, metrics = await asyncio.to_thread(fetch, url)
            return re.search(r"^smg_kv_index_blocks\S* [1-9]", metrics, re.MULTILINE) is not None

        await pair.until(is_indexed)
        start = await pair.accepted()
        for number in range(6):
            await ask(client, f"{beginning}{number}")
        grown = [now - then for now, then in zip(await pair.accepted(), start, strict=True)]
        assert sorted(grown) == [0, 6]


async def test_one_of_two_schedulers_dies_and_requests_go_on(pair: Pair) -> None:
    async with client_of(f"{pair.url(0)}/v1") as client:
        start = await pair.accepted()
        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                tasks.create_task(ask(client, f"{number}"))
        grown = [now - then for now, then in zip(await pair.accepted(), start, strict=True)]
        assert (sum(grown), min(grown) > 0) == (10, True)

        # Those in the middle of an answer end with an error, never as if they were whole.
        async with asyncio.TaskGroup() as tasks:
            long = [tasks.create_task(is_cut(client, f"{number}")) for number in range(8)]
            await pair.until(lambda: busy(pair))
            await pair.programs["scheduler-0"].kill()
        cut = [task.result() for task in long]
        assert any(cut)
        assert not all(cut)
        for _ in range(6):
            assert await ask(client, "abc") == "def"

        # Back with its worker, it gets requests again.
        await pair.start("scheduler-0")
        await pair.until(pair.healthy, [2, 2])

        async def is_asked_again() -> bool:
            await ask(client, "again")
            return await pair.accepted_by("scheduler-0") > 0

        await pair.until(is_asked_again)


async def busy(pair: Pair) -> bool:
    """Whether both schedulers have something to do."""
    counts = []
    for name in ("scheduler-0", "scheduler-1"):
        async with pair.channel(name) as channel:
            counts.append(await requests_at(channel))
    return min(counts) > 0


async def is_cut(client: openai.AsyncOpenAI, prompt: str) -> bool:
    """Reads a long answer; True where it ended with an error, and never as if it were whole."""
    finished = None
    try:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, temperature=0, stream=True, **LONG
        )
        async for chunk in stream:
            finished = chunk.choices[0].finish_reason or finished
    except openai.APIError:
        assert finished is None
        return True
    assert finished == "length"
    return False


# The command


async def test_up_says_where_openai_clients_go(
    successor_model: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "up", "--model", str(successor_model), "--port", "0"),
        *("--openai-port", "0", "--kv-cache-memory", "64MiB"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        while "OpenAI clients" not in said:
            line = (await process.stdout.readline()).decode()
            assert line, said
            said += line
        found = re.search(r"base URL (http://127\.0\.0\.1:\d+/v1), model (\S+), any API key", said)
        assert found
        async with client_of(found[1]) as client:
            answer = await client.completions.create(
                model=found[2], prompt="abc", temperature=0, max_tokens=3
            )
            assert answer.choices[0].text == "def"
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
