"""Every arrow points down: contracts, no cycles, and nothing hidden inside functions."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("quire", "services", "kernels", "benchmarks")
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.is_relative_to(ROOT / "quire" / "v1")
)


def test_the_contracts_in_pyproject_hold() -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_there_are_no_import_cycles() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {
        module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }
    assert list(cycles(imports)) == []


def cycles(imports: dict[str, list[str]]) -> Iterator[list[str]]:
    """One path around each cycle that a depth-first search meets."""
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in finished:
            for imported in imports.get(module, ()):
                yield from visit(imported, [*path, module])
            finished.add(module)

    for module in sorted(imports):
        yield from visit(module, [])


def test_the_search_finds_a_cycle() -> None:
    assert list(cycles({"a": ["b"], "b": ["c"], "c": ["b"], "d": []})) == [["b", "c", "b"]]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stand_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    hidden = [
        f"line {node.lineno}"
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in ast.walk(scope)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    guards = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    ]
    assert hidden + guards == []


CORE = sorted((ROOT / "services/scheduler/core").glob("*.py"))


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_scheduler_core_imports_the_standard_library_numpy_and_itself(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    foreign = {
        name
        for name in imported
        if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}
        and not name.startswith("services.scheduler.core")
    }
    assert foreign == set()
