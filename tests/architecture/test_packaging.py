"""What each kind of installation brings, and that the name `kernels` does no harm."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

HEAVY = {"torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf", "huggingface-hub"}


def requirements_of(extra: str) -> list[Requirement]:
    """Direct requirements of our extra ("" for none); extras within it are followed."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for text in EXTRAS.get(extra, []):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for inner in requirement.extras:
                found += requirements_of(inner)
        else:
            found.append(requirement)
    return found


def closure(extra: str) -> set[str]:
    """Names of all packages an installation with this extra brings."""
    seen: set[tuple[str, str]] = set()
    todo = [(r.name, "") for r in requirements_of(extra)]
    todo += [(r.name, inner) for r in requirements_of(extra) for inner in r.extras]
    while todo:
        name, inner = todo.pop()
        name = canonicalize_name(name)
        if (name, inner) in seen:
            continue
        seen.add((name, inner))
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": inner}):
                todo.append((requirement.name, ""))
                todo += [(requirement.name, further) for further in requirement.extras]
    return {name for name, _ in seen}


def test_the_client_brings_nothing_heavy() -> None:
    brought = closure("")
    assert "grpcio" in brought
    assert brought & HEAVY == set()


@pytest.mark.parametrize("extra", ["tokenizer", "scheduler", "bench", "simulate"])
def test_only_the_worker_brings_torch(extra: str) -> None:
    assert "torch" not in closure(extra)


def test_the_worker_brings_torch_and_no_transformers() -> None:
    brought = closure("worker")
    assert "torch" in brought
    assert "transformers" not in brought


def test_all_means_all_services() -> None:
    everything = {requirement.name for requirement in requirements_of("all")}
    for extra in ("tokenizer", "scheduler", "worker", "openai", "bench", "simulate"):
        assert {requirement.name for requirement in requirements_of(extra)} <= everything


@pytest.mark.parametrize("extra", [*EXTRAS, ""])
def test_constraints_pin_every_requirement_to_a_version_it_admits(extra: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9a-z.]+)", line).groups()
            pins[canonicalize_name(name)] = Version(version)
    wrong = [
        str(requirement)
        for requirement in requirements_of(extra)
        if pins.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]
    assert wrong == []


# Which extra brings what the code in a folder or file imports.
ROOMS = {
    "services/chassis": "chassis",
    "services/tokenizer": "tokenizer",
    "services/scheduler/simulate": "simulate",
    "services/scheduler": "scheduler",
    "services/worker": "worker",
    "kernels": "worker",
    "benchmarks": "bench",
    "quire": "",
}
# `quire model pull` converts tokenizers and asks the hub.
PULLING = ("quire/pull.py", "quire/pull_sources.py", "quire/gguf_tokenizer.py")
# The scheduler looks whether these can be imported, and does without them where they cannot.
OPENAI = ("services/scheduler/facade.py", "services/scheduler/facade_codec.py")


def extra_of(path: Path) -> str:
    """The extra that a source file needs."""
    name = str(path.relative_to(ROOT))
    if name in PULLING:
        return "tokenizer"
    if name in OPENAI:
        return "openai"
    return next((extra for room, extra in ROOMS.items() if name.startswith(f"{room}/")), "")


def foreign_imports(path: Path) -> set[str]:
    """Top-level names of other people's modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"quire", "services", "kernels", "benchmarks"}


SOURCES = [
    path
    for room in ("quire", "services", "kernels", "benchmarks")
    for path in (ROOT / room).rglob("*.py")
]
OWNERS = {
    module: {canonicalize_name(owner) for owner in owners}
    for module, owners in metadata.packages_distributions().items()
}


def test_what_is_imported_is_brought_by_the_extra() -> None:
    wrong = []
    for path in SOURCES:
        brought = {canonicalize_name(r.name) for r in requirements_of(extra_of(path))}
        wrong += [
            f"{path.relative_to(ROOT)} imports {module}, [{extra_of(path)}] does not bring it"
            for module in sorted(foreign_imports(path))
            if not OWNERS.get(module, set()) & brought
        ]
    assert wrong == []


def test_what_an_extra_brings_is_imported() -> None:
    used = {
        (extra_of(path), owner)
        for path in SOURCES
        for module in foreign_imports(path)
        for owner in OWNERS.get(module, ())
    }
    unused = [
        f"[{extra}] brings {requirement.name}"
        for extra in ("", "chassis", "tokenizer", "scheduler", "worker", "bench", "simulate")
        for requirement in map(Requirement, EXTRAS.get(extra, PROJECT["dependencies"]))
        if requirement.name != PROJECT["name"]
        and (extra, canonicalize_name(requirement.name)) not in used
    ]
    assert unused == []


def test_the_version_stays_where_transformers_does_not_take_our_kernels_for_theirs() -> None:
    assert PROJECT["version"].startswith("0.1.")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the wheel installed and nothing else."""
    out = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(out)
    return out


def test_the_wheel_holds_the_packages_and_only_them(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {
        "quire",
        "services",
        "kernels",
        "benchmarks",
        f"quire_llm-{PROJECT['version']}.dist-info",
    }
    for proto in (ROOT / "protos/quire/v1").glob("*.proto"):
        for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert f"quire/v1/{proto.stem}{end}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [name for name in names if "__pycache__" in name] == []


def run_in(site: Path, code: str) -> str:
    """Standard output of `code` with the wheel importable ahead of the working tree."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_transformers_does_not_take_our_kernels_for_theirs(site: Path) -> None:
    code = """
import importlib.metadata, kernels, transformers.utils
print(kernels.__file__)
print("quire-llm" in importlib.metadata.packages_distributions()["kernels"])
print(transformers.utils.is_kernels_available())
"""
    assert run_in(site, code).splitlines() == [str(site / "kernels/__init__.py"), "True", "False"]


def test_the_client_works_where_nothing_heavy_is_installed(site: Path) -> None:
    allowed = sorted(closure(""))
    code = f"""
import importlib.metadata, sys
owners = importlib.metadata.packages_distributions()
allowed = set({allowed!r}) | {{"quire-llm"}}
class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in owners and not allowed & {{o.lower().replace("_", "-") for o in owners[top]}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from quire.v1 import text_pb2, text_pb2_grpc
import quire.client
import quire.cli.main
print(text_pb2_grpc.TextServiceStub.__name__, "torch" in sys.modules, "numpy" in sys.modules)
"""
    assert run_in(site, code) == "TextServiceStub False False"
