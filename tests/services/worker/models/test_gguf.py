"""GGUF files: the same model as its safetensors twin, exact dequantization, refusals by name."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from services.worker.models.config import ModelError
from services.worker.models.gguf import GgufFile
from tests.assets.checkpoints import make_random_checkpoint
from tests.assets.gguf_checkpoint import make_gguf_checkpoint
from tests.services.worker.models.paged_run import PagedRun

ROW = [1, 250, 33, 9, 9, 120, 0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_random_checkpoint(tmp_path_factory.mktemp("a2"))


@pytest.fixture
def file(source, tmp_path):
    return make_gguf_checkpoint(source, tmp_path / "model" / "tiny.gguf")


def logits(path, load, kernels):
    return PagedRun(load(path), kernels, [ROW]).step({0: len(ROW)})[0]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["head", "tied"])
def test_the_same_model_as_its_safetensors_twin(tmp_path, load, kernels, changes):
    source = make_random_checkpoint(tmp_path / "source", changes=changes)
    file = make_gguf_checkpoint(source, tmp_path / "gguf" / "tiny.gguf")
    assert torch.equal(logits(file.parent, load, kernels), logits(source, load, kernels))


def test_qwen2_has_biases_and_no_turned_rows(tmp_path, load, kernels):
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    source = make_random_checkpoint(tmp_path / "source", changes=changes)
    file = make_gguf_checkpoint(source, tmp_path / "gguf" / "tiny.gguf")
    assert torch.equal(logits(file, load, kernels), logits(source, load, kernels))


def test_what_transformers_reads(tmp_path, load, kernels, oracle, source):
    """Quantized the same way, the safetensors twin of the dequantized file is the oracle."""
    file = make_gguf_checkpoint(source, tmp_path / "gguf" / "tiny.gguf", kind=Kind.Q8_0)
    exact, near = logits(source, load, kernels), logits(file, load, kernels)
    assert not torch.equal(exact, near)
    assert (exact - near).abs().mean() < 0.1


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.TQ2_0]
)
def test_dequantization_equals_the_package_to_the_bit(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    values[1, :256] = 0
    packed = gguf.quantize(values, kind)
    got = written(tmp_path, packed, kind).tensor("x")
    assert np.array_equal(got.numpy(), gguf.dequantize(packed, kind))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_float_types(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    packed = gguf.quantize(values, kind)
    got = written(tmp_path, packed, kind).tensor("x")
    assert torch.equal(got.float(), torch.from_numpy(gguf.dequantize(packed, kind)).view(5, 7))


def written(folder, packed, kind):
    writer = GGUFWriter(folder / "x.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(folder / "x.gguf")


def test_metadata_is_read_and_long_arrays_are_skipped(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("many", [f"word {number}" for number in range(1000)])
    writer.add_array("numbers", list(range(1000)))
    writer.add_array("few", ["a", "b"])
    writer.add_float32("real", 0.5)
    writer.add_bool("yes", True)
    writer.add_int32("minus", -3)
    writer.add_string("text", "grün")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "x.gguf").metadata
    assert metadata["many"] == 1000
    assert metadata["numbers"] == 1000
    assert metadata["few"] == ["a", "b"]
    assert metadata["real"] == 0.5
    assert metadata["yes"] is True
    assert metadata["minus"] == -3
    assert metadata["text"] == "grün"


def test_rope_divisors_of_the_file_are_used(tmp_path, load, kernels, source):
    """Converters store the frequency rule of Llama 3 as one divisor per frequency."""
    changes = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    scaled = make_random_checkpoint(tmp_path / "scaled", changes=changes)
    file = make_gguf_checkpoint(
        source,
        tmp_path / "gguf" / "tiny.gguf",
        extra_tensors={"rope_freqs.weight": torch.full((8,), 4.0)},
    )
    assert torch.equal(logits(file, load, kernels), logits(scaled, load, kernels))


def test_description(file, load):
    config = load(file).config
    assert config.eos_token_ids == (258, 257)
    assert (config.vocab_size, config.max_model_len) == (263, 2048)


def test_generation_config_beside_the_file_wins(file, load):
    (file.parent / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(file.parent).config.eos_token_ids == (3, 4)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.9, 0.9999])
def test_a_file_cut_short(file, load, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_header_never_escapes_as_another_error(file, load):
    content = file.read_bytes()
    start = GgufFile(file).data_start
    draw = np.random.default_rng(0)
    messages = []
    for _ in range(300):
        damaged = bytearray(content)
        for place in draw.integers(0, start, size=3):
            damaged[place] = draw.integers(0, 256)
        file.write_bytes(damaged)
        try:
            load(file)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert not [message for message in messages if "\n" in message]


def test_files_that_are_none(tmp_path, load):
    (tmp_path / "a.gguf").write_bytes(b"hello, this is text")
    with pytest.raises(ModelError, match=r"a\.gguf: not a GGUF file"):
        load(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x09\0\0\0" + bytes(16))
    with pytest.raises(ModelError, match="GGUF version 9; supported are 2 and 3"):
        load(tmp_path)


def test_two_files_or_two_formats_are_ambiguous(file, source, load):
    (file.parent / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="has safetensors and GGUF weights; remove one of them"):
        load(file.parent)
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"has 2 GGUF files \(other.gguf, tiny.gguf\); leave exactly one"
    ):
        load(file.parent)


def test_missing_and_surplus_tensors(tmp_path, load, source):
    config_of_three = make_random_checkpoint(tmp_path / "three", changes={"num_hidden_layers": 3})
    file = make_gguf_checkpoint(
        source, tmp_path / "a" / "a.gguf", extra_tensors={"blk.0.attn_sinks.weight": torch.ones(4)}
    )
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_sinks\.weight does not belong"):
        load(file)
    file = make_gguf_checkpoint(config_of_three, tmp_path / "b" / "b.gguf")
    whole = file.read_bytes()
    count = (3).to_bytes(4, "little")
    key = b"llama.block_count" + (4).to_bytes(4, "little")
    file.write_bytes(whole.replace(key + count, key + (4).to_bytes(4, "little")))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.3\..* is missing \(and 8 more\)"):
        load(file)


def test_types_that_cannot_be_dequantized(tmp_path):
    file = written(tmp_path, np.zeros((2, 56), dtype=np.int8), Kind.I8)
    with pytest.raises(ModelError, match=r"x\.gguf: tensor x has type I8, which is not supp"):
        file.tensor("x")


def test_rope_divisors_of_another_length(tmp_path, load, source):
    file = make_gguf_checkpoint(
        source, tmp_path / "a.gguf", extra_tensors={"rope_freqs.weight": torch.ones(5)}
    )
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has 5 values, .* asks for 8"):
        load(file)
