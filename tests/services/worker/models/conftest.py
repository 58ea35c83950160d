import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.dispatch import select_kernels
from services.worker.models.registry import LoadedModel, load_model

# Importing the oracle warns about things that are not ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoConfig, AutoModelForCausalLM

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def kernels():
    return select_kernels(CPU)


@pytest.fixture(scope="session")
def load(kernels):
    """Loads a folder in float32 on the CPU."""

    def load(path: Path, **options) -> LoadedModel:
        asked = {"dtype": torch.float32, "max_model_len": None} | options
        return load_model(path, device=CPU, kernels=kernels, **asked)

    return load


@pytest.fixture(scope="session")
def oracle():
    """Logits of a folder by `transformers`: float32, eager attention, one row at a time."""

    def logits(folder: Path, rows: list[list[int]]) -> list[Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.inference_mode():
            return [model(torch.tensor([row])).logits[0] for row in rows]

    return logits


@pytest.fixture(scope="session")
def save_by_transformers():
    """Writes a random model as `transformers` does today, with its spelling of the settings."""

    def save(folder: Path, kind: str, **settings) -> Path:
        config = AutoConfig.for_model(kind, **settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder, max_shard_size="200KB")
        return folder

    return save


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices this small are computed fastest by one thread, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
