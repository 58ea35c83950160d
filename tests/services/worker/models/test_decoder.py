"""The decoder against `transformers`, which is the oracle: same logits, however a row is cut."""

import random

import pytest
import torch

from services.worker.models.config import RopeConfig
from services.worker.models.layers import rotary_frequencies
from tests.assets.byte_tokenizer import VOCAB_SIZE
from tests.assets.checkpoints import make_random_checkpoint, make_successor_checkpoint
from tests.services.worker.models.paged_run import PagedRun

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no_groups": {"num_key_value_heads": 4},
    "one_key_head": {"num_key_value_heads": 1},
    "head_dim_is_not_hidden_by_heads": {"hidden_size": 40, "head_dim": 16},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3_rope": {"rope_scaling": LLAMA3},
    "llama3_rope_new_spelling": {
        "rope_parameters": {**LLAMA3, "rope_theta": 5000.0},
        "rope_theta": None,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 8,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2_window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
}


def rows_of(*lengths):
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def distance(logits, wanted):
    return (logits.log_softmax(-1) - wanted.log_softmax(-1)).abs().max().item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_random_checkpoint(tmp_path_factory.mktemp("a2"))


ROWS = rows_of(1, 37, 20, 64, 5)
SCHEDULES = {
    "prefill": [{row: len(ids)} for row, ids in enumerate(ROWS)],
    "prefill_together": [{row: len(ids) for row, ids in enumerate(ROWS)}],
    "chunks": [{0: 1}]
    + [{1: 8}] * 4
    + [{1: 5}]
    + [{2: 3, 3: 7}] * 6
    + [{2: 2, 3: 22}]
    + [{4: 2}, {4: 3}],
    "decode": [{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}]
    + [{1: 1, 2: 1, 3: 1, 4: 1}] * 4
    + [{1: 1, 2: 1, 3: 1}] * 15
    + [{1: 1, 3: 1}] * 17
    + [{3: 1}] * 27,
    "mixed": [{1: 20, 2: 1}]
    + [{1: 1, 2: 1, 3: 9}] * 7
    + [{0: 1, 1: 1, 2: 12, 3: 1, 4: 4}, {1: 9, 4: 1}],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_logits_of_the_oracle(folder, load, kernels, oracle, name):
    run = PagedRun(load(folder), kernels, ROWS)
    got = run.all_logits(SCHEDULES[name])
    for logits, wanted in zip(got, oracle(folder, ROWS), strict=True):
        assert distance(logits, wanted[: len(logits)]) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_every_supported_shape_matches_the_oracle(tmp_path, load, kernels, oracle, name):
    folder = make_random_checkpoint(tmp_path, changes=MODELS[name], seed=1)
    rows = rows_of(45, 11)
    run = PagedRun(load(folder), kernels, rows)
    got = run.all_logits([{0: 30, 1: 2}, {0: 1, 1: 8}, {0: 13, 1: 1}, {0: 1}])
    for logits, wanted in zip(got, oracle(folder, rows), strict=True):
        assert distance(logits, wanted) <= TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen2 tied"])
def test_folders_that_transformers_writes(
    tmp_path, load, kernels, oracle, save_by_transformers, kind
):
    folder = save_by_transformers(
        tmp_path,
        kind.split()[0],
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings="tied" in kind,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    loaded = load(folder)
    assert loaded.config.rope.theta == 700.0
    got = PagedRun(loaded, kernels, ROWS[1:2]).step({0: 37})[0]
    assert distance(got, oracle(folder, ROWS[1:2])[0]) <= TOLERANCE


def test_only_the_asked_rows_come_back(folder, load, kernels):
    whole = PagedRun(load(folder), kernels, ROWS[1:3]).step({0: 37, 1: 20})
    last = PagedRun(load(folder), kernels, ROWS[1:3]).step({0: 37, 1: 20}, logits="last")
    for row in (0, 1):
        torch.testing.assert_close(last[row], whole[row][-1:], atol=1e-5, rtol=1e-5)
        assert last[row].dtype == torch.float32


def test_a_step_may_sample_nothing(folder, load, kernels):
    loaded = load(folder)
    run = PagedRun(loaded, kernels, ROWS[1:2])
    run.step({0: 30}, logits="none")
    whole = PagedRun(loaded, kernels, ROWS[1:2]).step({0: 37})[0]
    torch.testing.assert_close(run.step({0: 7})[0], whole[30:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_near_float32(folder, load, kernels, dtype):
    exact = PagedRun(load(folder), kernels, ROWS[1:2]).step({0: 37})[0]
    near = PagedRun(load(folder, dtype=dtype), kernels, ROWS[1:2]).step({0: 37})[0]
    assert near.dtype == torch.float32
    assert (near - exact).abs().mean() < 0.15


def test_the_successor_model_says_its_chain(tmp_path, load, kernels):
    folder = make_successor_checkpoint(tmp_path, successors={262: 65, 70: 10})
    run = PagedRun(load(folder), kernels, [[262], [3, 70]], room=16)
    chunks = {0: 1, 1: 2}
    for _ in range(8):
        logits = run.step(chunks, logits="last")
        for row, values in logits.items():
            best = values[0].topk(2)
            assert best.values[0] - best.values[1] > 16
            run.rows[row].append(int(best.indices[0]))
        chunks = {0: 1, 1: 1}
    assert run.rows[0][1:] == [65, 66, 67, 68, 69, 70, 10, 11]
    assert run.rows[1][2:] == [10, 11, 12, 13, 14, 15, 16, 17]


def test_linear_rope_divides_all_frequencies():
    plain = rotary_frequencies(RopeConfig(), 16)
    assert torch.equal(rotary_frequencies(RopeConfig(kind="linear", factor=4.0), 16), plain / 4)


def test_divisors_win():
    plain = rotary_frequencies(RopeConfig(), 4)
    assert torch.equal(
        rotary_frequencies(RopeConfig(divisors=(2.0, 8.0)), 4), plain / torch.tensor([2, 8])
    )
