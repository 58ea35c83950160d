"""The `quire` command: which commands there are, and what is one line on standard error."""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

import quire as package
from benchmarks.command import COMMAND as BENCH
from quire.cli.admin import COMMAND as ADMIN
from quire.cli.command import CommandError, Entry, Group, Parser
from quire.cli.main import OWN, guarded, main
from quire.cli.model import COMMAND as MODEL
from quire.errors import QuireError, Unreachable
from tests.quire.cli.running_quire import full_disk, quire, started

Read = pytest.CaptureFixture[str]

ENTRIES = [*OWN, *MODEL.entries, *ADMIN.entries, *BENCH.entries]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.target)
def test_the_table_says_what_the_commands_say(entry: Entry) -> None:
    assert entry.available()
    command = entry.load()
    assert (command.name, command.help) == (entry.name, entry.help)
    assert entry.help[0].islower()
    assert not entry.help.endswith(".")
    assert bool(entry.extra) == bool(entry.needs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.target)
def test_every_command_has_help(entry: Entry, capsys: Read) -> None:
    command = entry.load()
    if isinstance(command, Group):
        assert command.run("quire", ["--help"]) == 0
    else:
        parser = Parser(prog=f"quire {entry.name}")
        command.configure(parser)
        with pytest.raises(SystemExit, match="0"):
            parser.parse_args(["--help"])
    assert "usage: quire" in capsys.readouterr().out


def test_the_list_shows_what_can_be_used(capsys: Read) -> None:
    group = Group(
        "some",
        "try it",
        (
            Entry(name="here", help="is shown", target="x:Y"),
            Entry(
                name="away", help="is hidden", target="x:Y", extra="gone", needs=("no_such_mod",)
            ),
        ),
    )
    assert group.run("quire some", ["--help"]) == 0
    out = capsys.readouterr().out
    assert "here  is shown" in out
    assert "away" not in out
    with pytest.raises(CommandError) as caught:
        group.run("quire some", ["away"])
    assert str(caught.value) == (
        "quire some away needs the extra [gone]; install it with: pip install 'quire-llm[gone]'"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], "quire: there is no command 'nonsense' (see quire --help)"),
        (
            ["chta"],
            "quire: there is no command 'chta'; did you mean quire chat? (see quire --help)",
        ),
        (
            ["model", "pul"],
            "quire model: there is no command 'pul'; did you mean quire model pull? "
            "(see quire model --help)",
        ),
        (
            ["generate", "--promt", "x"],
            "quire generate: there is no flag --promt; did you mean --prompt? "
            "(see quire generate --help)",
        ),
        (
            ["up", "--wokers=2", "--zzz", "-t", "--port", "1"],
            "quire up: there is no flag --wokers; did you mean --workers?; there is no flag --zzz; "
            "there is no flag -t (see quire up --help)",
        ),
        (
            ["chat", "-system", "x"],
            "quire chat: there is no flag -system; did you mean --system? (see quire chat --help)",
        ),
        (["model"], "quire model: which command? (see quire model --help)"),
        (["model", "x"], "quire model: there is no command 'x' (see quire model --help)"),
        (
            ["generate"],
            "quire generate: the following arguments are required: --prompt "
            "(see quire generate --help)",
        ),
        (
            ["generate", "two words", "--seed", "1"],
            "quire generate: the text goes after --prompt: --prompt 'two words'",
        ),
        (
            ["generate", "--model", "x"],
            "quire generate: there is no flag --model (see quire generate --help)",
        ),
        (
            ["generate", "--prompt", "x", "--min-p", "0.1"],
            "quire generate: --min-p (dropping tokens far less likely than the best) is not "
            "available in this version",
        ),
        (
            ["chat", "--n=2", "hi"],
            "quire chat: --n (several answers to one prompt) is not available in this version",
        ),
        (
            ["generate", "--prompt", "x", "--max-tok", "1"],
            "quire generate: there is no flag --max-tok; did you mean --max-tokens? "
            "(see quire generate --help)",
        ),
        (
            ["up", "--workers", "two"],
            "quire up: argument --workers: invalid int value: 'two' (see quire up --help)",
        ),
        (
            ["up", "--tensor-parallel-size", "2"],
            "quire up: --tensor-parallel-size (one model over several devices) is not available "
            "in this version",
        ),
        (
            ["up", "--quantization=awq"],
            "quire up: --quantization (computing with quantized weights) is not available in this "
            "version",
        ),
        (
            ["up", "--trust-remote-code"],
            "quire up: --trust-remote-code (model code from the model's folder) is not available "
            "in this version",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_2(argv: list[str], message: str, capsys: Read) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{message}\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--model", "no/such"], "get it with: quire model pull no/such"),
        (["demo", "--model", "./none"], "there is no folder ./none"),
        (["generate", "--prompt", "x", "--top-p", "7"], "top_p: must be in (0, 1], got 7.0"),
        (["chat", "--stop", "", "x"], "stop: must be 1 to 256 characters each, got 0"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_1(argv: list[str], message: str, capsys: Read) -> None:
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("quire: ")
    assert captured.err.endswith(f"{message}\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (QuireError("no"), 1, "quire: no\n"),
        (
            Unreachable("cannot reach x"),
            1,
            "quire: cannot reach x; start a server with: quire up\n",
        ),
        (KeyboardInterrupt(), 130, "quire: interrupted\n"),
    ],
)
def test_what_stops_a_command(error: BaseException, code: int, line: str, capsys: Read) -> None:
    def run() -> int:
        raise error

    assert guarded(run) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [
        (["--prompt", "-1", "--top-k", "-1"], "-1"),
        (["--prompt=--zzz"], "--zzz"),
        (["--prompt", "- what is this?"], "- what is this?"),
        (["--prompt", "--what is this?"], "--what is this?"),
        (["--prompt", "-"], "-"),
    ],
)
def test_what_only_looks_like_a_flag(argv: list[str], prompt: str) -> None:
    command = next(entry for entry in OWN if entry.name == "generate").load()
    assert not isinstance(command, Group)
    parser = Parser(prog="quire generate")
    command.configure(parser)
    assert parser.parse_args(argv).prompt == prompt


def test_after_two_dashes_there_are_no_flags() -> None:
    parser = Parser(prog="quire chat")
    parser.add_argument("prompt", nargs="*")
    assert parser.parse_args(["--", "--zzz"]).prompt == ["--zzz"]


def test_what_is_passed_on_to_the_services() -> None:
    command = next(entry for entry in OWN if entry.name == "up").load()
    assert not isinstance(command, Group)
    parser = Parser(prog="quire up")
    command.configure(parser)
    from_flags: argparse.Namespace = parser.parse_args(
        ["--workers", "3", "--enable-prefix-caching", "--kv-cache-memory", "1GiB"]
    )
    assert from_flags.enable_prefix_caching == "true"
    assert from_flags.kv_cache_memory == "1GiB"
    assert from_flags.dtype is None
    assert (from_flags.workers, from_flags.tokenizers) == (3, 1)


async def test_wrong_settings_are_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    flags = ("--dtype", "int8", "--block-size=x", "--workers", "2")
    result = await quire("up", "--model", str(tmp_path), "--port", "0", *flags)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: --dtype must be one of auto, float32, bfloat16, float16, got int8; "
        "--block-size must be a whole number, got 'x'\n"
    )


async def test_too_many_of_a_service(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    result = await quire("up", "--model", str(tmp_path), "--workers", "65", "--tokenizers", "0")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: --workers must be from 1 to 64, got 65; --tokenizers must be from 1 to 64, got 0\n"
    )


async def test_help_and_version() -> None:
    help_text = await quire("--help")
    assert help_text.code == 0
    for entry in OWN:
        assert f"  {entry.name:<9} {entry.help}\n" in help_text.out
    version = await quire("--version")
    assert version.out == f"quire {package.__version__}\n"
    nothing = await quire()
    assert (nothing.code, nothing.out) == (2, "")
    assert "usage: quire COMMAND" in nothing.err


async def test_a_start_is_light() -> None:
    """Health checks run often: what is slow to import must not be."""
    show = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    code = f"import quire.cli.main, quire.cli.health; {show}"
    async with started(
        sys.executable, "-c", code, cwd=Path(package.__file__).parents[1]
    ) as process:
        out, _ = await process.communicate()
    loaded = set(json.loads(out))
    assert "grpc" in loaded
    heavy = {
        "numpy",
        "rich",
        "huggingface_hub",
        "tokenizers",
        "gguf",
        "importlib.metadata",
        "torch",
    }
    assert not loaded & heavy


def test_the_package_shows_what_it_has() -> None:
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="'quire' has no attribute 'nonsense'"):
        _ = package.nonsense  # type: ignore[attr-defined]  # that is the test
    try:
        expected = importlib.metadata.version("quire-llm")
    except importlib.metadata.PackageNotFoundError:
        expected = "0+source"
    assert package.__version__ == expected


async def test_a_full_disk_is_one_line() -> None:
    with full_disk() as full:
        async with started(sys.executable, "-m", "quire", "--version", stdout=full) as process:
            _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"quire: No space left on device\n")
