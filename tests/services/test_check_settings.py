"""What is wrong with the settings of a service, without the service."""

import pytest

from services.check_settings import main

Read = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "argv",
    [
        ["scheduler", "--listen", "unix:///tmp/s.sock"],
        ["tokenizer", "--model", "m"],
        ["worker", "--model", "m", "--dtype=float32", "--local-workers", "2"],
    ],
)
def test_good_settings_pass_in_silence(argv: list[str], capsys: Read) -> None:
    assert main(argv) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (
            ["scheduler", "--prefill-chunk-size=x"],
            "--prefill-chunk-size must be a whole number, got 'x'\n",
        ),
        (["tokenizer"], "--model is required (or QUIRE_MODEL)\n"),
        (
            ["worker", "--model=m", "--local-workers=x", "--device", "tpu", "--zzz"],
            "unknown flag --zzz\n"
            "--device must be one of auto, cpu, cuda, got tpu\n"
            "--local-workers must be a whole number, got 'x'\n",
        ),
    ],
)
def test_each_problem_is_a_line(argv: list[str], problems: str, capsys: Read) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", problems)


def test_the_environment_counts_too(monkeypatch: pytest.MonkeyPatch, capsys: Read) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "x")
    assert main(["worker", "--model", "m"]) == 2
    assert capsys.readouterr().err == "QUIRE_BLOCK_SIZE must be a whole number, got 'x'\n"
