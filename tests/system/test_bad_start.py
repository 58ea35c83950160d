"""What a person sees who starts a service with something that cannot work.

One line that says what and where, exit code 2, no traceback, nothing left behind.
"""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.assets.checkpoints import make_random_checkpoint

ROOT = Path(__file__).parents[2]
NOWHERE = "127.0.0.1:1"

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("good") / "model", shards=1)


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


async def start(*command: str, home: Path) -> tuple[int, list[str]]:
    """Exit code, and the lines on standard error that are no lines of the log."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "QUIRE_HOME": str(home)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    log = (" D ", " I ", " W ")
    return process.returncode, [
        line for line in err.decode().splitlines() if not any(level in line for level in log)
    ]


def cut(name: str, kept: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:kept])

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (as_pickle, "{}/pytorch_model.bin: pickled weights can run code and are not read"),
        (cut("model.safetensors", 1000), "{}/model.safetensors: damaged or cut short: "),
        (cut("config.json", 50), "{}/config.json: is not JSON, or cut short: "),
        (
            write("config.json", b'{"architectures": ["GPT2LMHeadModel"]}'),
            "{}: config.json: architecture 'GPT2LMHeadModel' is not supported; supported are ",
        ),
        (
            lambda folder: (folder / "a.gguf").touch(),
            "{}: has safetensors and GGUF weights; remove one of them",
        ),
    ],
    ids=["pickle", "weights", "config", "architecture", "both"],
)
async def test_a_worker_with_a_broken_model(
    model: Path, change: Callable[[Path], None], said: str
) -> None:
    change(model)
    code, lines = await start(
        *("services.worker", "--model", str(model), "--scheduler", NOWHERE), home=model
    )
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(said.format(model))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-model-len", "99999"), "--max-model-len: must be in 1..2048, the positions of"),
        (("--kv-cache-memory", "1KiB"), "kv cache: 1KiB does not hold one block of 16 tokens"),
        (("--kv-cache-memory", "1000000TiB"), "--kv-cache-memory"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, tuple) else "",
)
async def test_a_worker_with_flags_that_cannot_work(
    checkpoint: Path, tmp_path: Path, flags: tuple[str, str], said: str
) -> None:
    command = ("services.worker", "--model", str(checkpoint), "--scheduler", NOWHERE, *flags)
    code, lines = await start(*command, home=tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert said in lines[0]


async def test_settings_out_of_range_are_told_together(tmp_path: Path) -> None:
    flags = ("--scheduler=foo", "--num-threads=1000000", "--max-num-seqs=1000000000", "--listen=")
    code, lines = await start("services.worker", *flags, home=tmp_path)
    assert code == 2
    assert [line.removeprefix("quire-worker: ") for line in lines] == [
        "--model is required (or QUIRE_MODEL)",
        "--scheduler must be host:port with a port of 1 to 65535, or unix:///path, got foo",
        "--max-num-seqs must be in 1..16384, got 1000000000",
        "--num-threads must be in 1..1024, got 1000000",
        "--listen needs a value",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (write("tokenizer.json", b"{}"), "{}/tokenizer.json: is not the file of a tokenizer: "),
        (cut("tokenizer.json", 100), "{}/tokenizer.json: is not JSON: "),
        (write("chat_template.jinja", b"{% for"), "{}/chat_template.jinja: the chat template is "),
        (
            write("generation_config.json", b'{"temperature": -1}'),
            "{}/generation_config.json: temperature must be finite and >= 0, got -1",
        ),
    ],
    ids=["empty", "cut", "template", "defaults"],
)
async def test_a_tokenizer_with_a_broken_model(
    model: Path, change: Callable[[Path], None], said: str
) -> None:
    change(model)
    command = ("services.tokenizer", "--model", str(model), "--listen", "127.0.0.1:0")
    code, lines = await start(*command, home=model)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(said.format(model))


@pytest.mark.parametrize("service", ["services.worker", "services.tokenizer"])
async def test_a_model_that_is_not_here(service: str, tmp_path: Path) -> None:
    code, lines = await start(service, "--model", "owner/name", home=tmp_path)
    assert code == 2
    (line,) = lines
    assert line.endswith(
        "model owner/name is not on this machine; get it with: quire model pull owner/name"
    )


async def test_addresses_that_cannot_be_bound(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = f"127.0.0.1:{busy.getsockname()[1]}"
        path = tmp_path / "file"
        path.touch()
        for address, said in {
            f"unix://{tmp_path}/a.sock,{taken}": f"cannot bind {taken}: it is in use",
            "192.0.2.1:50051": "cannot bind 192.0.2.1:50051: it is no address of this machine",
            f"unix://{path}/q.sock": f"cannot make the folder {path}: ",
            "unix:///" + "a" * 120: "socket path is longer than 107 bytes",
        }.items():
            code, lines = await start("services.scheduler", "--listen", address, home=tmp_path)
            assert (code, len(lines)) == (2, 1)
            assert lines[0].startswith(f"listen: {said}")
    assert os.listdir(tmp_path) == ["file"]
