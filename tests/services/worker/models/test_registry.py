import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.models.config import ModelError
from tests.assets.checkpoints import RANDOM_CONFIG, make_random_checkpoint, random_tensors
from tests.assets.gguf_checkpoint import make_gguf_checkpoint


def test_the_digest_is_the_model(tmp_path, load):
    first = load(make_random_checkpoint(tmp_path / "a")).digest
    again = load(make_random_checkpoint(tmp_path / "b")).digest
    other = load(make_random_checkpoint(tmp_path / "c", seed=1)).digest
    assert len(bytes.fromhex(first)) == 32
    assert first == again
    assert first != other


def test_the_digest_sees_a_change_of_weights_that_no_header_shows(tmp_path, load):
    folder = make_random_checkpoint(tmp_path, shards=1)
    before = load(folder).digest
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one * 1.5 for name, one in tensors.items()}, folder / "model.safetensors")
    assert load(folder).digest != before


def test_the_digest_does_not_see_limits_and_end_tokens(tmp_path, load):
    folder = make_random_checkpoint(tmp_path)
    before = load(folder).digest
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert load(folder, max_model_len=64).digest == before


def test_the_digest_sees_the_configuration(tmp_path, load):
    folder = make_random_checkpoint(tmp_path)
    before = load(folder).digest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert load(folder).digest != before
    assert load(folder, dtype=torch.bfloat16).digest != load(folder).digest


def test_a_gguf_file_has_one_too(tmp_path, load):
    source = make_random_checkpoint(tmp_path / "a")
    file = make_gguf_checkpoint(source, tmp_path / "g" / "a.gguf")
    assert load(file).digest == load(file.parent).digest != load(source).digest


def test_the_limit_is_the_model_len(tmp_path, load):
    folder = make_random_checkpoint(tmp_path)
    assert load(folder, max_model_len=77).config.max_model_len == 77
    assert load(folder).config.eos_token_ids == (258, 256)


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(tmp_path, load):
    folder = make_random_checkpoint(tmp_path / "a")
    file = make_gguf_checkpoint(folder, tmp_path / "g" / "a.gguf")
    numbers = sum(tensor.numel() for tensor in random_tensors(RANDOM_CONFIG, 0).values())
    for path in (folder, file):
        said = f"{path}: its weights need 0 MiB in float32, 0 MiB are free"
        with pytest.raises(ModelError, match=re.escape(said)):
            load(path, memory_bytes=4 * numbers - 1)
        assert load(path, memory_bytes=4 * numbers).config.num_layers == 2
