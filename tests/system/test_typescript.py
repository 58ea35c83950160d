"""examples/typescript as its reader uses it: installed, generated, type-checked, run."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.system.conftest import System
from tests.system.service_set import is_at_rest

pytestmark = [pytest.mark.system, pytest.mark.demo_model]

EXAMPLE = Path(__file__).parents[2] / "examples" / "typescript"
SOURCES = shutil.ignore_patterns("node_modules", "build", "generated")

if shutil.which("npm") is None:
    pytest.skip("node and npm are not installed", allow_module_level=True)


async def run(folder: Path, *command: str) -> str:
    """What a command printed; fails where it failed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(100):
        printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{printed}"
    return printed


@pytest.fixture(scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example at a place of its own beside the protos, so that nothing made before counts."""
    root = tmp_path_factory.mktemp("typescript")
    shutil.copytree(EXAMPLE.parents[1] / "protos", root / "protos")
    copy = root / "examples" / "typescript"
    shutil.copytree(EXAMPLE, copy, ignore=SOURCES)
    await run(copy, "npm", "ci")
    await run(copy, "npm", "run", "generate")
    return copy


async def test_it_does_what_it_says(folder: Path, system: System) -> None:
    await run(folder, "npm", "run", "build")
    printed = await run(folder, "npm", "run", "--silent", "start", "--", system.local.target)
    _, complete, chat, cancel, expire, wrong, overloaded = printed.split(":\n")
    assert complete.startswith(" Paris.")
    assert "FINISH_REASON_LENGTH, 5 tokens of prompt, 12 of answer" in complete
    assert chat.startswith("The capital of France is Paris.")
    assert "FINISH_REASON_STOP" in chat
    assert cancel.startswith("  CANCELLED after 5 messages")
    assert expire.startswith("  DEADLINE_EXCEEDED")
    assert wrong.splitlines()[:3] == [
        "  INVALID_ARGUMENT",
        "  sampling.temperature: must be finite and >= 0, got -1",
        "  sampling.top_p: must be in (0, 1], got 2",
    ]
    assert overloaded.startswith("  RESOURCE_EXHAUSTED, TTFT_TARGET, again in ")
    assert float(overloaded.split()[-2]) > 0
    while not is_at_rest(await system.loads()):  # what was cancelled holds nothing
        await asyncio.sleep(0.02)


async def test_a_misused_stub_does_not_compile(folder: Path) -> None:
    broken = folder / "src" / "broken.ts"
    broken.write_text(
        'import { GenerateRequest } from "./generated/quire/v1/text.js";\n'
        "export const request: GenerateRequest = GenerateRequest.fromPartial({ text: 1 });\n"
    )
    try:
        with pytest.raises(AssertionError, match=r"TS2322"):
            await run(folder, "npm", "run", "build")
    finally:
        broken.unlink()


async def test_no_server_is_told(folder: Path) -> None:
    await run(folder, "npm", "run", "build")
    with pytest.raises(AssertionError, match="Error: 14 UNAVAILABLE: "):
        await run(folder, "npm", "run", "--silent", "start", "--", "127.0.0.1:1")
