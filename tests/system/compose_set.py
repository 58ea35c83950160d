"""The set of compose.yaml in a real engine, and what a test does with it.

The engine comes from deploy/ci/docker_engine.sh: the one that runs already, or one started for the
test and stopped after it.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import AsyncClient

ROOT = Path(__file__).parents[2]
ENGINE_SCRIPT = ROOT / "deploy/ci/docker_engine.sh"

PROJECT = "quire-test"
"""The same in every run, so that what a killed run left is removed by the next one."""

PYTHON = "3.11"
"""Of the images: the one that Debian 12 packages, where no base image can be pulled."""

MODEL = "smollm2-135m-instruct"

Say = Callable[[str], None]


@dataclass
class Parts:
    """How long the parts of the whole took."""

    say: Say
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self.say(f"compose: {name}: {self.seconds[name]:.1f} s")


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float = 120) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stderr[-4000:]}"
    return done.stdout


def engine_problem() -> str:
    """Why no engine can be had here; "" if one can."""
    if os.geteuid() == 0 and Path("/etc/debian_version").exists():
        return ""
    if shutil.which("docker") is None:
        return "there is no docker, and only root on Debian can install it"
    answers = subprocess.run(
        ["docker", "compose", "ls"], capture_output=True, timeout=60, check=False
    )
    return "" if answers.returncode == 0 else "no Docker engine with the compose plugin answers"


@dataclass(frozen=True)
class Loads:
    """Running requests by container of the attached workers, and how many lost their worker."""

    running: Mapping[str, int]
    requeues: int


class Engine:
    """A Docker engine, and the images of this tree in it."""

    def __init__(self, env: Mapping[str, str], parts: Parts) -> None:
        self._env = dict(env)
        self.parts = parts

    @classmethod
    def start(cls, parts: Parts) -> "Engine":
        env = dict(os.environ)
        with parts.part("engine"):
            said = run([str(ENGINE_SCRIPT), "start"], env, timeout_s=300)
        env |= dict(re.findall(r"^export (\w+)=(.*)$", said, re.MULTILINE))
        first = free_ports(3)
        env |= {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "QUIRE_IMAGE": PROJECT,
            "QUIRE_MODEL": MODEL,
            "BASE": f"python:{PYTHON}-slim",
            "TOKENIZER_PORT": f"{first}-{first + 1}",
            "OPENAI_PORT": str(first + 2),
        }
        return cls(env, parts)

    def build(self) -> None:
        """Makes the images, from a local base image where none can be pulled."""
        with self.parts.part("base image"):
            run([str(ENGINE_SCRIPT), "base", self._env["BASE"]], self._env, timeout_s=300)
        with self.parts.part("torch wheel"):
            fetch_torch()
        with self.parts.part("build"):
            self.compose("build", "--quiet", timeout_s=900)

    def stop(self) -> None:
        """Removes the set with its volumes, and ends the daemon if it was started for the test."""
        self.compose("down", "--volumes", "--timeout", "5")
        run([str(ENGINE_SCRIPT), "stop"], self._env)

    def docker(self, *command: str, timeout_s: float = 120) -> str:
        return run(["docker", *command], self._env, timeout_s)

    def compose(self, *command: str, timeout_s: float = 120) -> str:
        return run(["docker", "compose", *command], self._env, timeout_s)

    def use_profile(self, profile: str) -> None:
        """From now on the services of this profile belong to the set."""
        self._env["COMPOSE_PROFILES"] = profile

    def up(self, *flags: str) -> None:
        """Returns when every service is healthy."""
        self.compose("up", "--detach", "--no-build", "--wait", *flags, timeout_s=300)

    def config(self, *files: str) -> dict[str, Any]:
        """What compose makes of one file, or of several over each other."""
        flags = [flag for file in files for flag in ("--file", file)]
        merged: dict[str, Any] = json.loads(self.compose(*flags, "config", "--format", "json"))
        return merged

    def containers(self, service: str) -> list[str]:
        """Ids of its replicas, ended ones too."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of its state, with the number of restarts."""
        (found,) = json.loads(self.docker("inspect", container))
        return {**found["State"], "RestartCount": found["RestartCount"]}

    def python(self, container: str, code: str, *arguments: str) -> str:
        """Runs a piece of Python inside a container."""
        return self.docker("exec", container, "python", "-c", code, *arguments)

    def published(self, service: str, port: int, index: int = 1) -> str:
        """Where a replica's port is found on this host, which must be for this host alone."""
        address = self.compose("port", "--index", str(index), service, str(port)).strip()
        assert address.startswith("127.0.0.1:"), address
        return address

    def text_target(self) -> str:
        """The published doors of all tokenizers."""
        replicas = range(1, len(self.containers("tokenizer")) + 1)
        return ",".join(self.published("tokenizer", 50051, index) for index in replicas)

    @contextlib.asynccontextmanager
    async def client(self, *, resume_tries: int = 16) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(self.text_target(), resume_tries=resume_tries) as client:
            yield client

    def loads(self) -> Loads:
        """What the scheduler tells of its workers; its address is not published."""
        (scheduler,) = self.containers("scheduler")
        found = json.loads(self.python(scheduler, _ASK_LOADS))
        # A worker is named after its host, which is the beginning of its container's id.
        running = {name.rpartition("-")[0]: count for name, count in found["running"].items()}
        ids = self.containers("worker")
        return Loads(
            running={id: running[id[:12]] for id in ids if id[:12] in running},
            requeues=found["requeues"],
        )

    def kill_service(self, container: str, program: str) -> None:
        """Kills a service's process from inside; `docker kill` would count as a wanted stop."""
        self.python(container, _KILL, program)

    def run_alone(self, target: str, *command: str, options: Sequence[str] = ()) -> str:
        """Starts a container outside the set, hardened as there; the models are at hand.

        Args:
            target: of the Dockerfile.
            command: what to run.
            options: further ones of `docker run`.

        Returns:
            Its id.
        """
        hardened = ["--init", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"]
        return self.docker(
            *("run", "--detach", *hardened, f"--volume={PROJECT}_models:/var/lib/quire:ro"),
            *(*options, f"{PROJECT}:{target}", *command),
        ).strip()

    def finished(self, container: str) -> tuple[int, str]:
        """Waits for the end of a container: its exit code and its log."""
        code = int(self.docker("wait", container))
        return code, self.log(container)

    def log(self, container: str) -> str:
        """What a container has said, on both channels."""
        done = subprocess.run(
            ["docker", "logs", container],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout


async def until(check: Callable[[], bool], timeout_s: float = 90) -> None:
    """Waits until something about the containers is so."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(check):
            await asyncio.sleep(0.3)


def fetch_torch() -> None:
    """Puts the build of torch that pip finds on this machine where the image's build looks first.

    The build network may know other indexes than this machine, and with them only the CUDA build.
    """
    wheels = ROOT / "wheels"
    constraints = (ROOT / "constraints.txt").read_text()
    (version,) = re.findall(r"^torch==(.*)$", constraints, re.MULTILINE)
    if list(wheels.glob(f"torch-{version}*-cp{PYTHON.replace('.', '')}-*.whl")):
        return
    flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    command = [sys.executable, "-m", "pip", "download", *flags]
    run([*command, "--dest", str(wheels), f"torch=={version}"], os.environ, timeout_s=600)


def free_ports(count: int) -> int:
    """The first of so many ports in a row on which nobody listens."""
    for first in range(42000, 42900, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


_ASK_LOADS = """
import grpc, json
from quire.v1 import info_pb2, info_pb2_grpc
with grpc.insecure_channel("127.0.0.1:50052") as channel:
    loads = info_pb2_grpc.InfoServiceStub(channel).GetLoads(info_pb2.GetLoadsRequest(), timeout=10)
running = {worker.worker_id: worker.running for worker in loads.workers}
print(json.dumps({"running": running, "requeues": loads.counters.requeues}))
"""

_KILL = """
import os, pathlib, signal, sys
for status in pathlib.Path("/proc").glob("[0-9]*"):
    words = (status / "cmdline").read_bytes().split(b"\\0")
    # Not the init process, which has the program's name among its arguments.
    if status.name != "1" and any(word.endswith(sys.argv[1].encode()) for word in words[:2]):
        os.kill(int(status.name), signal.SIGKILL)
        break
else:
    sys.exit(f"no process {sys.argv[1]}")
"""
