"""Every way in which a safetensors folder can be wrong is one line that names the file."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.models.config import ModelError
from tests.assets.checkpoints import make_random_checkpoint
from tests.services.worker.models.paged_run import PagedRun

ROW = [1, 250, 33, 9, 9, 120]
SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    return make_random_checkpoint(tmp_path / "model")


@pytest.fixture
def refusal(folder, load):
    """The message with which loading `folder` is refused."""

    def refusal(path=folder, **options) -> str:
        with pytest.raises(ModelError) as caught:
            load(path, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return refusal


@pytest.fixture
def rewrite(folder):
    """Changes the tensors of the file that holds `name`."""

    def rewrite(name, change):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = folder / index["weight_map"][name]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        return file

    return rewrite


def logits(folder, load, kernels):
    return PagedRun(load(folder), kernels, [ROW]).step({0: len(ROW)})[0]


def test_shards_or_one_file_are_the_same_model(folder, tmp_path, load, kernels):
    single = make_random_checkpoint(tmp_path / "single", shards=1)
    assert torch.equal(logits(folder, load, kernels), logits(single, load, kernels))


def test_stored_bfloat16_computes_in_float32(tmp_path, load, kernels, oracle):
    folder = make_random_checkpoint(tmp_path, dtype=torch.bfloat16)
    torch.testing.assert_close(
        logits(folder, load, kernels), oracle(folder, [ROW])[0], atol=1e-4, rtol=1e-4
    )


def test_a_missing_tensor(folder, refusal, rewrite):
    file = rewrite(NORM, lambda tensors: tensors.pop(NORM))
    assert refusal() == f"{file}: tensor {NORM} of the index is missing"


def test_a_tensor_missing_from_file_and_index(folder, refusal, rewrite):
    rewrite(NORM, lambda tensors: tensors.pop(NORM))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][NORM]
    index.write_text(json.dumps(content))
    assert refusal() == f"{folder}: tensor {NORM} is missing"


def test_a_surplus_tensor_in_a_file(refusal, rewrite):
    file = rewrite(NORM, lambda tensors: tensors.update(extra=torch.zeros(2)))
    assert refusal() == f"{file}: has tensor extra, which the index puts in no file"


def test_surplus_tensors(tmp_path, refusal):
    folder = make_random_checkpoint(tmp_path / "single", shards=1)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"x.a": torch.zeros(1), "x.b": torch.zeros(1)}, file)
    said = refusal(folder)
    assert said.startswith(f"{file}: tensor x.")
    assert said.endswith("does not belong to this architecture (and 1 more)")


def test_a_tensor_in_two_files(folder, refusal, rewrite):
    rewrite(EMBEDDING, lambda tensors: tensors.update({NORM: torch.zeros(64)}))
    assert f"has tensor {NORM}, which the index puts in" in refusal()


def test_a_misshaped_tensor(refusal, rewrite):
    file = rewrite(NORM, lambda tensors: tensors.update({NORM: torch.zeros(65)}))
    assert refusal() == (f"{file}: tensor {NORM} has shape [65], the configuration asks for [64]")


def test_a_tensor_of_another_type(refusal, rewrite):
    def change(tensors):
        tensors[NORM] = tensors[NORM].to(torch.int8)

    file = rewrite(NORM, change)
    assert refusal() == f"{file}: tensor {NORM} has type I8; supported are F32, F16, BF16"


def test_a_missing_shard(folder, refusal):
    (folder / SHARD).unlink()
    wanted = f"{folder / SHARD}: named by model.safetensors.index.json, but not there"
    assert refusal() == wanted


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_cut_short(folder, refusal, kept):
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:kept])
    assert refusal().startswith(f"{folder / SHARD}: damaged or cut short: ")


@pytest.mark.parametrize(
    "header", [b"not json", b'{"a": 1}', struct.pack("<Q", 2**62)], ids=["text", "shape", "length"]
)
def test_a_file_with_a_damaged_header(folder, refusal, header):
    length = header if len(header) == 8 else struct.pack("<Q", len(header)) + header
    (folder / SHARD).write_bytes(length + bytes(4096))
    assert refusal().startswith(f"{folder / SHARD}: damaged or cut short: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON, or cut short: "),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "is not JSON, or cut short: "),
        ('{"weight_map": {"a": "%s"}}' % ("b" * 5000), "is not the name of a file beside it"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "is not the name of a file beside it"),
        ('{"weight_map": {"a": 3}}', "is not the name of a file beside it"),
    ],
)
def test_a_damaged_index(folder, refusal, content, said):
    (folder / "model.safetensors.index.json").write_text(content)
    message = refusal()
    assert message.startswith(f"{folder / 'model.safetensors.index.json'}: ")
    assert said in message


def test_shards_without_an_index(folder, refusal):
    (folder / "model.safetensors.index.json").unlink()
    assert refusal() == f"{folder}: has 3 safetensors files, but no model.safetensors.index.json"


def test_files_the_index_does_not_name_are_not_read(folder, load, kernels):
    before = logits(folder, load, kernels)
    (folder / "consolidated.safetensors").write_bytes(b"whatever")
    (folder / "pytorch_model.bin").write_bytes(b"whatever")
    assert torch.equal(logits(folder, load, kernels), before)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(folder, refusal, name):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / name).write_bytes(pickle.dumps({}))
    assert refusal() == (
        f"{folder / name}: pickled weights can run code and are not read; convert the model to "
        "safetensors"
    )


def test_a_folder_without_weights(folder, refusal):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert refusal() == f"{folder}: has no weights; *.safetensors or one *.gguf is needed"


def test_no_folder(tmp_path, refusal):
    assert (
        refusal(tmp_path / "none")
        == f"{tmp_path / 'none'}: is no folder of a model and no GGUF file"
    )


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_is_not_there_or_damaged(folder, refusal, content):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert refusal().startswith(f"{folder / 'config.json'}: ")


class TestHeads:
    """Tied or not, with a head in the file or without."""

    def test_tied_with_an_equal_head(self, tmp_path, load, kernels):
        folder = make_random_checkpoint(tmp_path, changes={"tie_word_embeddings": True}, shards=1)
        before = logits(folder, load, kernels)
        tensors = load_file(folder / "model.safetensors")
        tensors[HEAD] = tensors[EMBEDDING].clone()
        save_file(tensors, folder / "model.safetensors")
        assert torch.equal(logits(folder, load, kernels), before)

    def test_tied_with_another_head(self, folder, refusal):
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = True
        (folder / "config.json").write_text(json.dumps(config))
        said = refusal()
        assert f"tensor {HEAD} differs from {EMBEDDING}" in said
        assert "tie_word_embeddings" in said

    def test_untied_without_a_head(self, tmp_path, refusal):
        folder = make_random_checkpoint(tmp_path, changes={"tie_word_embeddings": True}, shards=1)
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config))
        assert refusal(folder) == f"{folder / 'model.safetensors'}: tensor {HEAD} is missing"


def test_old_rotary_buffers_are_ignored(folder, load, rewrite):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    file = rewrite(NORM, lambda tensors: tensors.update({name: torch.zeros(8)}))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = file.name
    index.write_text(json.dumps(content))
    assert load(folder).config.num_layers == 2
