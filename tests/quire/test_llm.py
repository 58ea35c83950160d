"""`LLM` against scripted doors, and with a real set of its own."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, Scheduling
from quire.batch import MOST_AT_ONCE
from quire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    Overloaded,
    QuireError,
    SetFailed,
    UnknownSetting,
    Unreachable,
)
from tests.assets.checkpoints import make_successor_checkpoint
from tests.fakes.text_service import (
    FakeTextService,
    failure,
    full,
    serving,
    unavailable,
    words,
)

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SMALL = {"device": "cpu", "kv_cache_memory": "16MiB"}


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# Against scripted doors. The doors live on the test's loop, so `LLM` is used in threads.


@contextlib.asynccontextmanager
async def joined(*services: FakeTextService, model: str | None = None) -> Any:
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serving(service)) for service in services]
        llm = await asyncio.to_thread(LLM, model, target=targets)
        try:
            yield llm
        finally:
            await asyncio.to_thread(llm.close)


async def test_a_running_set_is_joined_and_left_running() -> None:
    services = [FakeTextService(length=2), FakeTextService(length=2)]
    async with joined(*services, model="fake") as llm:
        assert llm.model == "fake"
        assert llm.target.count(",") == 1
        outputs = await asyncio.to_thread(llm.generate, ["a", [5, 6], {"prompt": "c"}])
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.prompt for output in outputs] == ["a", None, "c"]
    assert [output.prompt_token_ids for output in outputs] == [None, (5, 6), None]
    for output in outputs:
        (answer,) = output.outputs
        assert (answer.index, answer.text, answer.token_ids) == (0, " w0 w1", (0, 1))
        assert (answer.finish_reason, answer.stop_reason, output.finished) == ("stop", 2, True)
        assert output.usage is not None
        assert output.usage.prompt_tokens == 3
    assert all(service.requests for service in services)
    sent = {request.request_id for service in services for request in service.requests}
    assert sent == {output.request_id for output in outputs}


async def test_another_model_is_not_taken_for_ours() -> None:
    async with serving(FakeTextService()) as target:
        with pytest.raises(InvalidRequest, match=r"model: is 'fake' at .*, and not 'other'"):
            await asyncio.to_thread(LLM, "other", target=target)


async def test_streaming_hands_out_answers_as_they_grow() -> None:
    service = FakeTextService(length=6, pause=3)
    async with joined(service) as llm:

        def read() -> list[RequestOutput]:
            outputs = []
            for output in llm.generate(["a", "b"], streaming=True):
                outputs.append(output)
                if sum(len(one.outputs[0].token_ids) == 3 for one in outputs) >= 2:
                    llm_go_on()
            return outputs

        loop = asyncio.get_running_loop()

        def llm_go_on() -> None:
            loop.call_soon_threadsafe(service.go_on.set)

        outputs = await asyncio.to_thread(read)
    for index in (0, 1):
        mine = [output for output in outputs if output.index == index]
        assert [output.finished for output in mine] == [False] * (len(mine) - 1) + [True]
        assert texts(mine) == ["".join(words(len(one.outputs[0].token_ids))) for one in mine]
        assert any(len(output.outputs[0].token_ids) == 3 for output in mine)
        assert texts(mine)[-1] == "".join(words(6))


async def test_closing_the_iterator_cuts_the_rest() -> None:
    service = FakeTextService(pause=1)
    async with joined(service) as llm:
        outputs = llm.generate(["a", "b"], streaming=True)
        first = await asyncio.to_thread(next, outputs)
        assert not first.finished
        await asyncio.to_thread(outputs.close)
        async with asyncio.timeout(10):
            await service.ended_early.wait()
        service.pause = None
        assert texts(await asyncio.to_thread(llm.generate, "c")) == ["".join(words(5))]


async def test_one_that_is_collected_on_its_own_loop_is_cut() -> None:
    service = FakeTextService(pause=1)
    async with joined(service) as llm:

        def leave_one_in_a_cycle() -> None:
            cycle: list[Any] = [llm.generate("a", streaming=True)]
            cycle.append(cycle)
            next(cycle[0])

        async def collect(_: object) -> None:
            gc.collect()

        gc.disable()
        try:
            await asyncio.to_thread(leave_one_in_a_cycle)
            collected = llm._thread.run(collect).outcome
            await asyncio.to_thread(collected.result, 10)
        finally:
            gc.enable()
        async with asyncio.timeout(10):
            await service.ended_early.wait()
        service.pause = None
        assert texts(await asyncio.to_thread(llm.generate, "c")) == ["".join(words(5))]


async def test_without_parameters_an_answer_ends_some_time() -> None:
    service = FakeTextService(length=1)
    async with joined(service) as llm:
        await asyncio.to_thread(llm.generate, "a")
        await asyncio.to_thread(llm.generate, ["a"], [None])
        await asyncio.to_thread(llm.chat, [{"role": "user", "content": "a"}])
        await asyncio.to_thread(llm.generate, "a", SamplingParams())
    assert [request.stopping.max_tokens for request in service.requests] == [512, 512, 512, 0]


async def test_so_many_run_at_once_and_no_more() -> None:
    service = FakeTextService(length=1, pause=0)
    async with joined(service) as llm, asyncio.TaskGroup() as tasks:
        count = MOST_AT_ONCE + 50
        answers = tasks.create_task(asyncio.to_thread(llm.generate, ["a"] * count))
        async with asyncio.timeout(30):
            while len(service.requests) < MOST_AT_ONCE:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(service.requests) == MOST_AT_ONCE
        service.go_on.set()
        assert len(await answers) == count


async def test_an_overload_is_waited_for() -> None:
    full = failure("RESOURCE_EXHAUSTED", "queue is full")
    full.details.append(unavailable().details[0])
    service = FakeTextService(length=1, refusals=[full, full])
    async with joined(service) as llm:
        assert texts(await asyncio.to_thread(llm.generate, ["a", "b", "c"])) == [" w0"] * 3
        service.refusals = [failure("RESOURCE_EXHAUSTED", "never")]
        with pytest.raises(Overloaded, match="never"):
            await asyncio.to_thread(llm.generate, "a")


async def test_a_batch_may_be_larger_than_the_queue() -> None:
    service = FakeTextService(length=1, room=20, pause=0)
    async with joined(service) as llm, asyncio.TaskGroup() as tasks:
        answers = tasks.create_task(asyncio.to_thread(llm.generate, ["a"] * 600))
        async with asyncio.timeout(30):
            while service.turned_away < MOST_AT_ONCE - 20:
                await asyncio.sleep(0.01)
        service.go_on.set()
        assert texts(await answers) == [" w0"] * 600


async def test_what_nobody_has_room_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.batch._PATIENCE_S", 0.3)
    service = FakeTextService()
    async with joined(service) as llm:
        service.refusal = full(10)
        with pytest.raises(Overloaded, match="queue is full"):
            await asyncio.to_thread(llm.generate, ["a"] * 3)


@pytest.mark.parametrize("reason", ["SHED", "TTFT_TARGET"])
async def test_a_request_that_was_shed_is_not_asked_again(reason: str) -> None:
    service = FakeTextService()
    async with joined(service) as llm:
        service.refusal = full(10, reason)
        with pytest.raises(Overloaded) as caught:
            await asyncio.to_thread(
                llm.generate, "a", scheduling=Scheduling(ttft_target_ms=5, shed_late=True)
            )
    assert caught.value.was_shed
    assert len(service.requests) == 1


async def test_a_deadline_holds_while_a_request_is_turned_away() -> None:
    service = FakeTextService()
    async with joined(service) as llm:
        service.refusal = full(100)
        with pytest.raises(DeadlineExceeded, match=r"time given \(queue is full\)"):
            await asyncio.to_thread(llm.generate, "a", scheduling=Scheduling(deadline_s=1))
    told = [request.scheduling.deadline_ms for request in service.requests]
    assert len(told) > 1
    assert told == sorted(told, reverse=True)
    assert told[-1] < 1000 - 90 * (len(told) - 1)


async def test_scheduling_is_for_all_or_for_each() -> None:
    service = FakeTextService(length=1)
    async with joined(service) as llm:
        batch, urgent = Scheduling(priority_class="batch"), Scheduling(priority_class="interactive")
        await asyncio.to_thread(llm.generate, ["a", "b"], scheduling=batch)
        await asyncio.to_thread(llm.generate, ["a", "b", "c"], scheduling=[urgent, None, batch])
        hi = {"role": "user", "content": "a"}
        await asyncio.to_thread(llm.chat, [[hi], [hi]], scheduling=[batch, urgent])
        names = [request.scheduling.priority_class for request in service.requests]
        assert names[:2] == ["batch", "batch"]
        assert sorted(names[2:5]) == ["", "batch", "interactive"]
        assert sorted(names[5:]) == ["batch", "interactive"]
        with pytest.raises(InvalidRequest, match="scheduling: must be one for all or one for each"):
            llm.generate(["a", "b"], scheduling=[batch])
        with pytest.raises(InvalidRequest, match=r"scheduling\[1\]: must be Scheduling, got str"):
            llm.generate(["a", "b"], scheduling=[batch, "batch"])  # type: ignore[list-item]


async def test_closing_ends_what_runs_in_other_threads() -> None:
    service = FakeTextService(pause=1)

    def ask(llm: LLM) -> None:
        with pytest.raises(QuireError, match="this LLM is closed"):
            llm.generate(["a", "b"])

    async with joined(service) as llm, asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(ask, llm))
        await service.paused.wait()
        await asyncio.to_thread(llm.close)
    with pytest.raises(QuireError, match="this LLM is closed; make another one"):
        llm.generate("a")
    with pytest.raises(QuireError, match="this LLM is closed"):
        next(llm.generate("a", streaming=True))


async def test_one_that_nobody_holds_any_more_is_closed() -> None:
    async with serving(FakeTextService()) as target:
        before = set(threading.enumerate())

        def drop() -> list[threading.Thread]:
            llm = LLM(target=target)
            assert texts(llm.generate("a")) == ["".join(words(5))]
            (own,) = [one for one in threading.enumerate() if one.name == "quire-loop"]
            del llm
            gc.collect()
            own.join(30)
            return [one for one in set(threading.enumerate()) - before if one is own]

        assert await asyncio.to_thread(drop) == []


def test_nobody_at_the_target() -> None:
    with pytest.raises(Unreachable, match=r"cannot reach 127\.0\.0\.1:1"):
        LLM(target="127.0.0.1:1")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"target": "a:1", "dtype": "float32"}, InvalidRequest, "dtype: is a setting of a set"),
        ({"target": "a:1", "workers": 2}, InvalidRequest, "workers: is a setting of a set"),
        ({"target": ""}, InvalidRequest, "target: must name one server or more"),
        ({"tensor_parallel_size": 2}, NotSupported, "tensor_parallel_size=2"),
        ({"max_model_length": 5}, UnknownSetting, "did you mean max_model_len"),
        ({"model": "/nowhere"}, ModelNotFound, "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(
    settings: dict[str, Any], error: type[QuireError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(**settings)


# With a set of its own.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says the next byte after each byte."""
    return make_successor_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **SMALL) as llm:
        yield llm


@pytest.mark.system
def test_one_answer_for_each_prompt_in_order(llm: LLM) -> None:
    prompts = [chr(97 + number % 20) for number in range(60)]
    assert texts(llm.generate(prompts, GREEDY)) == [
        "".join(chr(ord(prompt) + step) for step in range(1, 5)) for prompt in prompts
    ]
    assert llm.generate([], GREEDY) == []


@pytest.mark.system
def test_params_for_each_prompt(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=0, max_tokens=9, stop="e"),
        SamplingParams(temperature=0, max_tokens=3),
    ]
    outputs = llm.generate(["a", "a", [65]], params)
    assert texts(outputs) == ["bc", "bcd", "BCD"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "stop", "length"]
    assert outputs[1].outputs[0].stop_reason == "e"
    assert outputs[2].prompt_token_ids == (65,)


@pytest.mark.system
def test_streams(llm: LLM) -> None:
    last = {}
    for output in llm.generate(["a", "k"], GREEDY, streaming=True):
        assert "bcde".startswith(texts([output])[0]) or "lmno".startswith(texts([output])[0])
        last[output.index] = output
    assert [output.finished for output in last.values()] == [True, True]
    assert texts([last[0], last[1]]) == ["bcde", "lmno"]


@pytest.mark.system
def test_conversations(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    # The template ends in a newline, byte 10.
    assert texts(llm.chat(chat, GREEDY)) == ["\x0b\x0c\r\x0e"]
    assert texts(llm.chat([chat, chat], GREEDY)) == ["\x0b\x0c\r\x0e"] * 2
    *_, last = llm.chat(chat, GREEDY, streaming=True)
    assert (texts([last]), last.finished) == (["\x0b\x0c\r\x0e"], True)


@pytest.mark.system
def test_a_wrong_request_is_named_and_the_next_one_works(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: has 5000 tokens"):
        llm.generate(["a", "b" * 5000, "c"], SamplingParams(temperature=0))
    with pytest.raises(
        InvalidRequest, match=r"^prompts\[0\]: token_ids\.packed\[1\]: must be below"
    ):
        llm.generate([[1, 9999]])
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]"):
        llm.chat([[{"role": "user", "content": "a"}], []])
    assert texts(llm.generate("a", GREEDY)) == ["bcde"]


@pytest.mark.system
def test_a_set_is_joined_by_target(llm: LLM, checkpoint: Path) -> None:
    with LLM(checkpoint, target=llm.target) as other:
        assert texts(other.generate("a", GREEDY)) == ["bcde"]
    assert texts(llm.generate("a", GREEDY)) == ["bcde"]


@pytest.mark.system
def test_threads_share_it(llm: LLM) -> None:
    found: dict[str, list[str]] = {}

    def ask(prompt: str) -> None:
        found[prompt] = texts(llm.generate([prompt] * 5, GREEDY))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in "adg"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": ["bcde"] * 5, "d": ["efgh"] * 5, "g": ["hijk"] * 5}


@pytest.mark.system
async def test_it_works_where_a_loop_runs(llm: LLM) -> None:
    assert texts(llm.generate("a", GREEDY)) == ["bcde"]


@pytest.mark.system
def test_settings_that_do_not_fit_are_all_named(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LLM(checkpoint, workers=0, dtype="float7", max_model_len=-5)
    assert caught.value.violations == (
        ("workers", "must be from 1 to 64, got 0"),
        ("dtype", "must be one of auto, float32, bfloat16, float16, got float7"),
        ("max_model_len", "must be >= 2, got -5"),
    )


@pytest.mark.system
def test_what_only_shows_with_the_model_is_said_in_keywords(checkpoint: Path) -> None:
    with pytest.raises(SetFailed, match=r"worker-0 ended with exit code 2: .*max_model_len") as up:
        LLM(checkpoint, device="cpu", max_model_len=10**8)
    assert "--" not in up.value.message


# Programs of their own: how they end.

PRELUDE = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", kv_cache_memory="16MiB", max_model_len=2000)
assert "torch" not in sys.modules
"""


def program(text: str, checkpoint: Path, home: Path, **options: Any) -> subprocess.Popen[str]:
    """Starts a Python program whose processes can be told by `home` in their environment."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + text, str(checkpoint)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def left_over(home: Path) -> list[int]:
    """Processes that have `home` as their TMPDIR."""
    mark = f"TMPDIR={home}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


@pytest.mark.system
def test_an_exception_ends_the_processes(checkpoint: Path, tmp_path: Path) -> None:
    process = program(
        "print(len(llm.generate(['a'] * 3)), flush=True); 1 / 0", checkpoint, tmp_path
    )
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (1, "3\n")
    assert "ZeroDivisionError" in err
    assert left_over(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_ctrl_c_cuts_the_requests_and_leaves_it_usable(checkpoint: Path, tmp_path: Path) -> None:
    text = """
long = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
try:
    for output in llm.generate(["a"] * 8, long, streaming=True):
        if output.index == 0 and len(output.outputs[0].token_ids) < 60:
            print("running", flush=True)
except KeyboardInterrupt:
    print("cut", flush=True)
print(llm.generate("a", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text, flush=True)
"""
    process = program(text, checkpoint, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert out.replace("running\n", "") == "cut\nbcd\n", err
    assert (process.returncode, err) == (0, "")
    assert left_over(tmp_path) == []


@pytest.mark.system
def test_ctrl_c_while_the_set_starts(checkpoint: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, quire; quire.LLM(sys.argv[1])", str(checkpoint)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not set(left_over(tmp_path)) - {process.pid}:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert left_over(tmp_path) == []


@pytest.mark.system
def test_ctrl_c_ends_a_program_that_does_not_mind_it(checkpoint: Path, tmp_path: Path) -> None:
    text = """
print("running", flush=True)
llm.generate(["a"] * 500, SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True))
"""
    process = program(text, checkpoint, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert left_over(tmp_path) == []


@pytest.mark.system
def test_the_example_of_the_readme_runs(checkpoint: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "import LLM" in block]
    models = tmp_path / "models"
    models.mkdir()
    (models / "smollm2-135m-instruct").symlink_to(checkpoint)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        env={**os.environ, "QUIRE_HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "The capital of France is → tuvwxyz" in done.stdout.decode()
    assert "Two and two is → tuvwxyz" in done.stdout.decode()
