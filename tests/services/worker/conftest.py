"""A small random model on disk, loaded by the worker's own code, and what runs steps on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.dispatch import select_kernels
from kernels.interface import KernelSet, KVCacheSpec
from services.worker.models.registry import LoadedModel, load_model
from services.worker.plan import Attachment, NewRow, StepLimits, StepPlan
from services.worker.rows import RequestRows
from services.worker.runner import Runner
from tests.assets.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from tests.assets.checkpoints import RANDOM_CONFIG, random_tensors, write_config, write_shards

CPU = torch.device("cpu")

# Token whose embedding is not a number.
POISON = 5


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Where a scheduler of this test listens."""
    return f"unix://{tmp_path}/s.sock"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights."""
    folder = tmp_path_factory.mktemp("models") / "random-2-layers"
    config = {**RANDOM_CONFIG, "max_position_embeddings": 64}
    tensors = random_tensors(config, seed=1)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    # About half of all logits are above 0: it is neither the best nor among the best 40.
    tensors["lm_head.weight"][POISON] = 0
    make_byte_tokenizer(folder)
    write_config(folder, config)
    write_shards(folder, tensors, shards=1)
    return folder


@pytest.fixture(scope="session")
def poison() -> int:
    """The token that makes its request impossible to compute."""
    return POISON


@pytest.fixture(scope="session")
def limits() -> StepLimits:
    """Small enough that every limit is met."""
    return StepLimits(
        block_size=4,
        num_blocks=48,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        max_in_flight=2,
    )


@dataclass(frozen=True)
class TestBench:
    """The loaded model; makes runners with fresh caches."""

    __test__ = False

    loaded: LoadedModel
    kernels: KernelSet
    limits: StepLimits

    def attachment(self, **changes: object) -> Attachment:
        """What a scheduler would grant."""
        granted = Attachment(
            epoch=1,
            max_num_seqs=self.limits.max_num_seqs,
            num_slots=3 * self.limits.max_num_seqs,
            check_block_tables=False,
        )
        return replace(granted, **changes)

    def runner(
        self,
        attachment: Attachment | None = None,
        num_blocks: int | None = None,
        *,
        traced: bool = False,
    ) -> Runner:
        """A runner with empty rows and a cache of its own."""
        config = self.loaded.config
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self.limits.block_size,
            dtype=torch.float32,
        )
        cache = self.kernels.allocate_kv_cache(spec, num_blocks or self.limits.num_blocks, CPU)
        rows = RequestRows(attachment or self.attachment(), self.limits)
        return Runner(self.loaded.model, cache, rows, CPU, traced=traced)

    def alone(self, prompt: list[int], length: int) -> list[int]:
        """Greedy continuation of one request: prompt in one step, then a token a step."""
        runner, tokens = self.runner(), list(prompt)
        blocks = -(-(len(prompt) + length) // self.limits.block_size)
        for step_id in range(1, length + 1):
            first = step_id == 1
            row = NewRow(
                slot=0,
                token_ids=np.array(prompt, np.uint32),
                prompt_len=len(prompt),
                num_computed=0,
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                seed=0,
                traceparent="",
            )
            plan = StepPlan(
                epoch=1,
                step_id=step_id,
                released_slots=np.zeros(0, np.int64),
                new_rows=(row,) if first else (),
                slots=np.array([0]),
                num_tokens=np.array([len(prompt) if first else 1]),
                num_new_blocks=np.array([blocks if first else 0]),
                new_block_ids=np.arange(blocks if first else 0),
                block_table_digest=None,
            )
            tokens += runner.execute(plan).token_ids.tolist()
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def bench(model_folder: Path, limits: StepLimits) -> Iterator[TestBench]:
    """The model of `model_folder`, loaded once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels = select_kernels(CPU)
    loaded = load_model(
        model_folder, dtype=torch.float32, device=CPU, kernels=kernels, max_model_len=None
    )
    yield TestBench(loaded, kernels, limits)
    torch.set_num_threads(threads)
