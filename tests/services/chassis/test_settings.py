"""Flags beat variables beat defaults, and every problem is reported at once."""

import dataclasses

import pytest

from services.chassis.settings import SettingsError, parse, setting

LATER = {"--quantization": "int8 weights", "--tensor-parallel-size": "several GPUs for one model"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example."""

    model: str = setting(help="model to serve")
    listen: tuple[str, ...] = setting(help="addresses", default=("127.0.0.1:1",))
    max_num_seqs: int = setting(
        help="requests at a time", default=8, check=lambda n: n >= 1, rule="must be >= 1"
    )
    share: float = setting(help="share, 100% is 1", default=0.5)
    limit: int | None = setting(
        help="tokens", default=None, check=lambda n: n >= 1, rule="must be >= 1"
    )
    caching: bool = setting(help="reuse prefixes", default=True)


def read(*argv: str, **env: str) -> Example:
    return parse(Example, prog="example", argv=argv, env=env, later=LATER)


def problems(*argv: str, **env: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(*argv, **env)
    return str(caught.value).splitlines()


def test_defaults_hold_where_nothing_is_given() -> None:
    assert read("--model", "m") == Example(model="m")


def test_every_type_is_read_from_flags() -> None:
    settings = read(
        "--model=m", "--listen", "a:1, b:2", "--max-num-seqs", "3", "--share=0.25", "--limit=9",
        "--caching", "off",
    )  # fmt: skip
    assert settings == Example(
        model="m", listen=("a:1", "b:2"), max_num_seqs=3, share=0.25, limit=9, caching=False
    )


def test_a_flag_beats_the_variable_and_the_variable_beats_the_default() -> None:
    env = {"QUIRE_MODEL": "from-env", "QUIRE_MAX_NUM_SEQS": "5"}
    settings = read("--model", "from-flag", **env)
    assert (settings.model, settings.max_num_seqs) == ("from-flag", 5)


def test_a_list_may_be_given_in_parts() -> None:
    assert read("--model=m", "--listen=a:1,b:2", "--listen", "c:3").listen == ("a:1", "b:2", "c:3")
    assert problems("--model=m", "--listen=a:1", "--listen") == ["example: --listen needs a value"]


def test_an_empty_variable_counts_as_unset() -> None:
    assert read("--model", "m", QUIRE_MAX_NUM_SEQS="").max_num_seqs == 8


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--caching"], True),
        (["--caching", "false"], False),
        (["--caching=1"], True),
        (["--no-caching"], False),
        (["--no-caching", "--caching"], True),
    ],
)
def test_a_switch_has_three_forms(argv: list[str], value: bool) -> None:
    assert read("--model", "m", *argv).caching is value


def test_all_problems_are_reported_together() -> None:
    argv = ["--max-num-seqs", "0", "--share", "half", "--limit", "--nonsense", "7"]
    assert problems(*argv, "--quantization=int8", QUIRE_CACHING="maybe") == [
        "example: unknown flag --nonsense",
        "example: --quantization (int8 weights) is not available in this version",
        "example: --model is required (or QUIRE_MODEL)",
        "example: --max-num-seqs must be >= 1, got 0",
        "example: --share must be a finite number, got 'half'",
        "example: --limit needs a value",
        "example: QUIRE_CACHING must be true or false, got 'maybe'",
    ]


def test_a_flag_of_a_later_version_is_refused_as_a_variable_too() -> None:
    assert problems("--model", "m", QUIRE_TENSOR_PARALLEL_SIZE="2") == [
        "example: QUIRE_TENSOR_PARALLEL_SIZE: --tensor-parallel-size (several GPUs for one model) "
        "is not available in this version"
    ]


def test_variables_of_other_services_are_ignored() -> None:
    assert read("--model", "m", QUIRE_SCHEDULER="x", QUIRE_HOME="/x") == Example(model="m")


@pytest.mark.parametrize("text", ["1.5", "", "ten", "1e3", "9" * 5000])
def test_a_whole_number_must_be_one(text: str) -> None:
    (problem,) = problems("--model", "m", f"--max-num-seqs={text}")
    assert problem.startswith("example: --max-num-seqs ")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_a_number_must_be_finite(text: str) -> None:
    assert problems("--model", "m", f"--share={text}") == [
        f"example: --share must be a finite number, got {text!r}"
    ]


def test_a_negative_number_is_a_value_and_meets_the_rule() -> None:
    assert problems("--model", "m", "--max-num-seqs", "-1") == [
        "example: --max-num-seqs must be >= 1, got -1"
    ]


def test_a_huge_whole_number_is_no_crash() -> None:
    assert read("--model", "m", "--limit", "9" * 400).limit == int("9" * 400)


def test_a_stray_word_is_refused() -> None:
    assert problems("--model", "m", "stray") == ["example: unexpected argument 'stray'"]


def test_flags_are_not_abbreviated() -> None:
    assert problems("--model", "m", "--max-num", "3") == ["example: unknown flag --max-num"]


def test_help_names_flags_units_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "model to serve (required) [QUIRE_MODEL]" in text
    assert "addresses (default: 127.0.0.1:1) [QUIRE_LISTEN]" in text
    assert "share, 100% is 1 (default: 0.5) [QUIRE_SHARE]" in text
    assert "reuse prefixes (default: true) [QUIRE_CACHING]" in text
    assert "tokens [QUIRE_LIMIT]" in text
