"""Temporary folders that end with their process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.claims import claimed_folder

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, pathlib
from quire.claims import claimed_folder
with claimed_folder(pathlib.Path(sys.argv[1]), "x-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_it_is_removed_at_the_end(tmp_path: Path) -> None:
    with claimed_folder(tmp_path, "x-") as folder:
        (folder / "file").touch()
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_it_may_be_moved_away(tmp_path: Path) -> None:
    with claimed_folder(tmp_path, "x-") as folder:
        folder.rename(tmp_path / "kept")
    assert (tmp_path / "kept").is_dir()


def test_it_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed_folder(tmp_path, "x-"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_behind_is_removed(tmp_path: Path) -> None:
    for name in ("x-old", "x-young", "y-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "x-old" / "file").touch()
    for name in ("x-old", "y-old"):
        age(tmp_path / name)
    os.utime(tmp_path / "x-young", (2**32, 2**32))
    with claimed_folder(tmp_path, "x-"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-young", "y-old"]


def test_what_a_live_process_holds_stays_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        age(held)
        with claimed_folder(tmp_path, "x-"):
            assert held.is_dir()
        process.kill()
        process.wait()
    assert held.is_dir()
    with claimed_folder(tmp_path, "x-"):
        assert not held.exists()
