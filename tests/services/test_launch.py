import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SLOW_SERVICE = """
import time
print("importing", flush=True)
time.sleep(60)
"""
SERVICE = """
import signal

def main():
    print("main, with", signal.getsignal(signal.SIGTERM).__name__, flush=True)
"""


def launch(folder: Path, source: str) -> subprocess.Popen[str]:
    (folder / "made_service.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-c", "from services.launch import run; run('made_service')"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_import_is_an_orderly_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launch(tmp_path, SLOW_SERVICE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


def test_the_service_gets_to_its_main(tmp_path: Path) -> None:
    with launch(tmp_path, SERVICE) as process:
        assert process.communicate(timeout=30)[0] == "main, with _end\n"
        assert process.returncode == 0


def test_the_installed_programs_are_those_of_the_services() -> None:
    code = """
import importlib, services.launch
for name in ("scheduler", "worker", "tokenizer"):
    module = importlib.import_module(f"services.{name}.__main__")
    module.main = lambda name=name: print(name)
    getattr(services.launch, name)()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["scheduler", "worker", "tokenizer"]
