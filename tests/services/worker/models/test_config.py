import pytest
import torch

from services.worker.models.config import ModelError, read_gguf_config, read_hf_config
from tests.assets.checkpoints import RANDOM_CONFIG


def read(generation=None, max_model_len=None, **changes):
    raw = {**RANDOM_CONFIG, **changes}
    return read_hf_config(
        {name: value for name, value in raw.items() if value != "absent"},
        generation or {},
        dtype=torch.float32,
        max_model_len=max_model_len,
    )


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": 300,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 8,
    "tokenizer.ggml.eom_token_id": 7,
}


def read_gguf(generation=None, max_model_len=None, **changes):
    metadata = {**GGUF, **{name.replace("__", "."): value for name, value in changes.items()}}
    return read_gguf_config(
        {name: value for name, value in metadata.items() if value is not None},
        generation or {},
        dtype=torch.float32,
        max_model_len=max_model_len,
        tied=True,
    )


def test_what_is_read():
    config = read()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.eos_token_ids == (258,)
    assert config.windows == (None, None)
    assert config.dtype == torch.float32


def test_defaults_of_what_may_be_absent():
    config = read(num_key_value_heads="absent", head_dim="absent")
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [
        (5, {}, (5,)),
        ([5, 6], {}, (5, 6)),
        (5, {"eos_token_id": [9, 5, 9]}, (9, 5)),
        (5, {"eos_token_id": 0}, (0,)),
        (5, {"eos_token_id": None}, (5,)),
        (None, {}, ()),
    ],
)
def test_the_end_tokens_of_generation_config_win(in_config, in_generation, ids):
    assert read(in_generation, eos_token_id=in_config).eos_token_ids == ids


@pytest.mark.parametrize("ids", ["</s>", [-1], [1.5], 263, True, {}, [[1]]])
def test_end_tokens_that_are_none(ids):
    with pytest.raises(ModelError, match="eos"):
        read(eos_token_id=ids)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Gemma2ForCausalLM", None])
def test_other_architectures_are_refused_by_name(architecture):
    with pytest.raises(ModelError) as caught:
        read(architectures=[architecture])
    assert repr(architecture) in str(caught.value)
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM" in str(caught.value)


def test_no_architecture_at_all():
    with pytest.raises(ModelError, match="architecture 'llama' is not supported"):
        read(architectures="absent")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"qk_norm": True}, "qk_norm"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key heads"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"hidden_size": 0}, "hidden_size must be in 1..2147483647, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be in 1..4096, got 1000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        ({"hidden_size": 65, "head_dim": "absent"}, "head_dim is missing"),
    ],
)
def test_what_would_change_the_numbers_is_refused(changes, named):
    with pytest.raises(ModelError) as caught:
        read(**changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neutral_settings_of_related_architectures_pass():
    assert read(
        embedding_multiplier=1.0,
        final_logit_softcapping=None,
        qk_norm=False,
        rope_interleaved=False,
    )


@pytest.mark.parametrize("asked", [1, 100, 2048])
def test_the_length_may_be_lowered(asked):
    assert read(max_model_len=asked).max_model_len == asked
    assert read().max_model_len == 2048


@pytest.mark.parametrize("asked", [0, -1, 2049])
def test_the_length_may_not_be_raised(asked):
    with pytest.raises(ModelError, match=rf"--max-model-len: must be in 1..2048, .* got {asked}"):
        read(max_model_len=asked)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": value}, "rms_norm_eps must be a finite number in [0, 1), got")
        for value in (-1, 1, float("nan"), float("inf"))
    ]
    + [({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, got 1000000")]
    + [
        ({"rope_theta": value}, "rope_theta must be a finite number > 0, got")
        for value in (0, -1, float("nan"), float("inf"))
    ]
    + [
        ({"rope_scaling": {"type": "linear", "factor": value}}, "factor must be a finite number >")
        for value in (0, -2.0, float("nan"))
    ]
    + [
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "> low_freq_factor 4, got 4.0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor must be a finite"),
        ({"rope_scaling": 0}, "rope_scaling must be an object, got 0"),
        ({"rope_parameters": []}, "rope_parameters must be an object, got []"),
        ({"bos_token_id": 263}, "bos id 263 is not below the vocabulary size 263"),
        ({"bos_token_id": "x"}, "config.json: bos_token_id must be whole numbers >= 0, got 'x'"),
        ({"vocab_size": 10**400}, "vocab_size must be in 1..16777216, got 1000"),
    ],
)
def test_absurd_numbers(changes, named):
    with pytest.raises(ModelError) as caught:
        read(**changes)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 0},
        {"sliding_window": "x"},
        {"sliding_window": 2.5},
        {"sliding_window": 8, "layer_types": 5},
        {"sliding_window": 8, "layer_types": [[], {}]},
    ],
)
def test_windows_that_are_none(changes):
    with pytest.raises(ModelError, match=r"sliding_window must be|layer_types must name 2 of"):
        read(architectures=["MistralForCausalLM"], **changes)


def test_windows():
    mistral = {"architectures": ["MistralForCausalLM"]}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1}
    assert read(sliding_window=8).windows == (None, None)
    assert read(**mistral, sliding_window=8).windows == (8, 8)
    assert read(**mistral, sliding_window=None).windows == (None, None)
    assert read(**mistral).windows == (4096, 4096)
    assert read(**qwen, sliding_window=8).windows == (None, None)
    assert read(**qwen, sliding_window=8, use_sliding_window=True).windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert read(**mistral, sliding_window=8, layer_types=kinds).windows == (8, None)
    with pytest.raises(ModelError, match="layer_types"):
        read(**mistral, sliding_window=8, layer_types=["chunked_attention"] * 2)


def test_gguf():
    config = read_gguf()
    assert config.vocab_size == 300
    assert config.num_kv_heads == 4
    assert config.eos_token_ids == (7, 8)
    assert config.tie_word_embeddings
    assert read_gguf({"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert read_gguf(llama__vocab_size=310).vocab_size == 310
    assert read_gguf(llama__attention__sliding_window=16).windows == (16, 16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma2"}, "GGUF architecture 'gemma2'"),
        ({"general__architecture": None}, "GGUF architecture None"),
        ({"llama__expert_count": 8}, "expert"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count 8"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        (
            {"llama__attention__head_count": [4, 2]},
            "llama.attention.head_count must be a whole number",
        ),
        ({"tokenizer__ggml__tokens": None}, "llama.vocab_size is missing"),
    ],
)
def test_gguf_refusals(changes, named):
    with pytest.raises(ModelError) as caught:
        read_gguf(**changes)
    assert named in str(caught.value)
