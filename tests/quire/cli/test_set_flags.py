"""The flags of a local set on a command line."""

from pathlib import Path

from quire.cli.command import Parser
from quire.cli.set_flags import add_set_flags, local_config


def flags(tmp_path: Path, *argv: str) -> list[str]:
    (tmp_path / "model.gguf").touch()
    parser = Parser(prog="quire up")
    add_set_flags(parser, port=0)
    config = local_config(parser.parse_args(["--model", str(tmp_path), *argv]))
    return list(config.flags["scheduler"])


def test_only_what_was_given_is_passed_on(tmp_path: Path) -> None:
    assert flags(tmp_path) == []
    assert flags(tmp_path, "--tpot-target", "50", "--enable-prefix-caching=false") == [
        "--tpot-target=50",
        "--enable-prefix-caching=false",
    ]


def test_a_list_is_given_in_parts(tmp_path: Path) -> None:
    assert flags(tmp_path, "--tenant", "a:weight=2", "--tenant=b,c", "--partial-block-reuse") == [
        "--tenant=a:weight=2,b,c",
        "--partial-block-reuse=true",
    ]
