"""Runs `quire` as a person does: as a process of its own."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Result:
    """What a run of `quire` gave."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """The environment of the process: this one's, with the repository to import from."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **changes}


@contextlib.asynccontextmanager
async def started(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running process, killed at the end if it is still there."""
    pipe = asyncio.subprocess.PIPE
    settings = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "env": environment()} | options
    process = await asyncio.create_subprocess_exec(*command, **settings)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    """A file that takes nothing, for standard output."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        yield full
    finally:
        os.close(full)


async def quire(*arguments: str, stdin: str = "", **changes: str) -> Result:
    """Runs `quire` to its end; `changes` are to its environment."""
    command = (sys.executable, "-m", "quire", *arguments)
    async with started(*command, env=environment(**changes)) as process:
        out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Result(process.returncode, out.decode(), err.decode())
