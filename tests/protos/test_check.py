"""`protos/check.py`: what `make check-protos` lets pass, what it does not, and how it is moved."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]


class Copy:
    """The protos and the rules for them, copied, to be broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(
            ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "buf.yaml", folder)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self._folder / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} must be in {name} once"
        path.write_text(text.replace(old, new))

    def check(self, *arguments: str) -> tuple[int, str]:
        """Exit code and all that is printed. No proxy, no registry: nothing is to be fetched."""
        command: Sequence[str] = (sys.executable, "protos/check.py", *arguments)
        environment = {"PATH": "/nowhere", "HOME": str(self._folder / "home")}
        environment["HTTPS_PROXY"] = environment["HTTP_PROXY"] = "http://127.0.0.1:1"
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    @property
    def baseline(self) -> descriptor_pb2.FileDescriptorSet:
        raw = (self._folder / "protos" / "baseline.binpb").read_bytes()
        return descriptor_pb2.FileDescriptorSet.FromString(raw)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


TEXT = "protos/quire/v1/text.proto"


def test_the_contract_as_it_is_passes(copy: Copy) -> None:
    assert copy.check() == (0, "")


def test_the_baseline_is_what_the_protos_say(
    image: descriptor_pb2.FileDescriptorSet, copy: Copy
) -> None:
    now = descriptor_pb2.FileDescriptorSet.FromString(image.SerializeToString())
    for file in now.file:
        file.ClearField("source_code_info")
    landed = copy.baseline
    landed.DiscardUnknownFields()  # marks of buf's own
    assert landed == now, "run `make protos`"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        pytest.param(
            TEXT,
            "bool return_token_ids = 2;",
            "bool return_token_ids = 9;",
            'field "2"',
            id="moved",
        ),
        pytest.param(
            TEXT, "bool return_token_ids = 2;", "uint32 return_token_ids = 2;", "type", id="retyped"
        ),
        pytest.param(
            TEXT, "bool return_token_ids = 2;", "bool token_ids = 2;", "name", id="renamed"
        ),
        pytest.param(
            TEXT,
            "rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);",
            "",
            "Detokenize",
            id="an rpc less",
        ),
    ],
)
def test_a_break_is_refused(copy: Copy, name: str, old: str, new: str, said: str) -> None:
    copy.edit(name, old, new)
    before = copy.baseline
    code, printed = copy.check("--accept")
    assert code == 1
    assert name.removeprefix("protos/") in printed
    assert said in printed
    assert copy.baseline == before


def test_what_lint_asks_is_kept(copy: Copy) -> None:
    copy.edit(TEXT, "message GetInfoRequest {}", "message GetInfoRequest { bool inDetail = 1; }")
    code, printed = copy.check()
    assert code == 1
    assert "in_detail" in printed


def test_an_addition_passes_and_is_held_from_then_on(copy: Copy) -> None:
    added = "message GetInfoRequest { bool in_detail = 1; }"
    copy.edit(TEXT, "message GetInfoRequest {}", added)
    assert copy.check("--accept") == (0, "")
    copy.edit(TEXT, added, "message GetInfoRequest { bool in_detail = 2; }")
    code, printed = copy.check()
    assert code == 1
    assert "in_detail" in printed


def test_an_intended_break_is_a_rule_and_a_file_in_buf_yaml(copy: Copy) -> None:
    copy.edit(TEXT, "bool return_token_ids = 2;", "bool return_token_ids = 9;")
    config = (ROOT / "buf.yaml").read_text()
    exception = "  ignore_only:\n    FIELD_NO_DELETE: [quire/v1/text.proto]\n"
    copy.edit("buf.yaml", config, config + exception)
    before = copy.baseline
    assert copy.check("--accept") == (0, "")
    assert copy.baseline != before
