"""What a person does with a running set: the command line, the README's script, the demo."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.system.conftest import System

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.system, pytest.mark.demo_model, pytest.mark.timeout(180)]


async def run(*command: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command run in the repository."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def quire(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "quire", *arguments)


async def test_generate_prints_one_json_object(system: System) -> None:
    code, out, err = await run(
        *quire("generate", "--prompt", "The capital of France is", "--max-tokens", "8"),
        *("--temperature", "0", "--json", "--target", system.local.target),
    )
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert "Paris" in answer["text"]
    assert len(answer["token_ids"]) == 8
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 8


async def test_the_readme_script_streams_text(system: System) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = (block for block in blocks if "import grpc" in block)
    assert "127.0.0.1:50051" in script
    script = script.replace("127.0.0.1:50051", system.local.target)
    code, out, err = await run(sys.executable, "-c", script)
    assert (code, err) == (0, "")
    assert "Paris" in out


async def test_chat_answers_and_the_same_seed_draws_the_same_tokens(system: System) -> None:
    question = "What is the capital of France?"
    target = ("--target", system.local.target)
    code, out, _ = await run(*quire("chat", question, "--temperature", "0", *target))
    assert code == 0
    assert "Paris" in out
    answers = []
    for _ in range(2):
        arguments = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "12", "--json")
        code, out, _ = await run(*quire("chat", question, *arguments, *target))
        assert code == 0
        answers.append(json.loads(out)["token_ids"])
    assert answers[0] == answers[1]


async def test_a_killed_client_frees_its_blocks(system: System) -> None:
    process = await asyncio.create_subprocess_exec(
        *quire("generate", "--prompt", "Count to a million: one, two,", "--ignore-eos"),
        *("--max-tokens", "2000", "--target", system.local.target),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.read(4)
    process.kill()
    await process.wait()
    async with asyncio.timeout(10):
        while (loads := await system.loads()).running + loads.waiting:
            await asyncio.sleep(0.02)
    (worker,) = loads.workers
    assert worker.blocks_free + worker.blocks_evictable == worker.blocks_total


async def test_up_serves_until_interrupted_and_leaves_nothing() -> None:
    process = await asyncio.create_subprocess_exec(
        *quire("up", "--port", "0"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        target = ""
        while not target:
            line = (await process.stdout.readline()).decode()
            assert line, "quire up ended early"
            found = re.search(r"127\.0\.0\.1:\d+", line)
            target = found[0] if found else ""
        arguments = ("generate", "--prompt", "Hello", "--max-tokens", "2", "--target", target)
        code, _, err = await run(*quire(*arguments))
        assert (code, err) == (0, "")
        watch = ""
        while not watch.startswith("  quire top"):
            watch = (await process.stdout.readline()).decode()
            assert watch, "it does not say how to watch it"
        code, frame, err = await run(*quire(*watch.split()[1:], "--once", "--interval", "0.1"))
        assert (code, err) == (0, "")
        assert "0 running  0 waiting" in frame
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert target not in await service_commands()


async def service_commands() -> str:
    """The command lines of all service processes on this machine."""
    _, out, _ = await run("ps", "-eo", "args")
    return "\n".join(line for line in out.splitlines() if "services." in line)
