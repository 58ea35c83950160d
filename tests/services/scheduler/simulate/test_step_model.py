"""Step models: the formula, the shipped ones, and what is wrong with a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.scheduler.simulate.step_model import (
    SHIPPED,
    InputError,
    StepModel,
    load_model,
    write_model,
)

GOOD = """
name: small
base_us: 1000
per_token_us: 10
per_row_us: 5.5
per_context_us: 0.25
blocks: 64
block_size: 16
max_num_seqs: 8
max_num_batched_tokens: 256
max_model_len: 512
sources:
  - measured
"""


def test_a_step_costs_base_tokens_rows_and_context(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(GOOD)
    model = load_model(str(path))
    assert model.step_us(tokens=20, rows=4, context=400) == 1000 + 200 + 22 + 100
    assert model.sources == ("measured",)


def test_a_step_that_computes_nothing_takes_a_microsecond() -> None:
    assert load_model("smollm2-2cpu").step_us(tokens=0, rows=0, context=0) == 1


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = replace(load_model("smollm2-2cpu"), name="again", sources=("one", "two"))
    write_model(model, tmp_path / "again.yaml")
    assert load_model(str(tmp_path / "again.yaml")) == model


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_models_say_their_sources(path: Path) -> None:
    model = load_model(path.stem)
    assert model.name == path.stem
    assert len(model.sources) >= 3


def test_the_70b_model_says_what_was_published() -> None:
    model = load_model("llama-70b-8xh100")
    # 70.6e9 parameters in BF16 are read at 74 % of 8 × 3.35 TB/s, plus 4.05 ms of the rest.
    assert model.base_us == pytest.approx(141.2e9 / (8 * 3.35e12 * 0.74) * 1e6 + 4055, rel=0.001)
    # 2 operations a parameter at 43.9 % of 8 × 989.4 TFLOPS.
    assert model.per_token_us == pytest.approx(141.2e9 / (8 * 989.4e12 * 0.439) * 1e6, rel=0.005)
    assert model.per_context_us == pytest.approx(327_680 / (8 * 3.35e12 * 0.9) * 1e6, rel=0.005)
    assert model.blocks * model.block_size * 327_680 < 8 * 80e9 * 0.9 - 141.2e9


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("base_us: -1", "base_us: must be between 0 and 2147483648, got -1"),
        ("base_us: fast", "base_us: must be a number of microseconds, got 'fast'"),
        ("base_us: .nan", "base_us: must be between 0 and 2147483648, got nan"),
        ("base_us: true", "base_us: must be a number of microseconds, got True"),
        (f"base_us: 0x{'f' * 100}", "base_us: must be between 0 and 2147483648, got a number of"),
        (
            f"blocks: 0x{'f' * 5000}",
            "blocks: must be between 1 and 16777216, got a number of 20000",
        ),
        ("blocks: 0", "blocks: must be between 1 and 16777216, got 0"),
        ("max_num_seqs: 20000", "max_num_seqs: must be between 1 and 16384, got 20000"),
        ("blocks: 1.5", "blocks: must be a whole number, got 1.5"),
        ("name: 7", "name: must be a text, got 7"),
        (r'name: "\ud800"', "name: is no Unicode text"),
        (f"name: 0x{'f' * 500}", "name: must be a text, got a number of 2000 bits"),
        ("name: &a [*a]", "name: must be a text, got a list"),
        ("blocks: 2001-01-01", "blocks: must be a whole number, got a date"),
        ("base_us: 1.0e+999999999", "base_us: must be between 0 and 2147483648, got inf"),
        ("sources: here", "sources: must be a list of texts"),
        ("speed: 9", "speed: no such field"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, line: str, wrong: str) -> None:
    field = line.partition(":")[0]
    kept = [one for one in GOOD.splitlines() if not one.startswith((field, "  -", "sources"))]
    path = tmp_path / "bad.yaml"
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(InputError) as error:
        load_model(str(path))
    assert error.value.message.startswith(f"{path}: {wrong}")


def test_missing_fields_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("blocks: 64\n", "").replace("base_us: 1000\n", ""))
    with pytest.raises(InputError, match="base_us, blocks: missing"):
        load_model(str(path))


def test_a_model_whose_steps_take_no_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("1000", "0").replace("10\n", "0\n").replace("5.5", "0"))
    path.write_text(path.read_text().replace("0.25", "0"))
    with pytest.raises(InputError, match="one of them must be above 0"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: [", "not YAML"),
        ("[" * 3000, "not YAML"),
        (f"base_us: {'9' * 5000}", "not YAML"),
        ("base_us: 2001-99-99", "not YAML"),
        (f"base_us: 1{':1' * 3000}.5", "not YAML: int too large"),
        ("name: !!binary abc", "not YAML: failed to decode base64"),
        ("name: !!bool maybe", "not YAML: a value is not what its tag says"),
        ("name: !!int ''", "not YAML: a value is not what its tag says"),
        ("name: !!timestamp soon", "not YAML: a value is not what its tag says"),
        ('name: "\\UFFFFFFFF"', "not YAML"),
        ("- 1", "must be a mapping of fields, got list"),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=wrong):
        load_model(str(path))


def test_a_model_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"--model gpt: No such file .*llama-70b-8xh100"):
        load_model("gpt")


def test_a_worker_announces_the_limits_of_its_model() -> None:
    model = StepModel(
        name="x",
        base_us=1.0,
        per_token_us=0.0,
        per_row_us=0.0,
        per_context_us=0.0,
        blocks=3,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=6,
        max_model_len=7,
    )
    spec = model.spec("w")
    assert (spec.num_blocks, spec.block_size, spec.max_num_seqs) == (3, 4, 5)
    assert (spec.max_num_batched_tokens, spec.max_model_len, spec.max_in_flight) == (6, 7, 2)
