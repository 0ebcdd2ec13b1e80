"""A config.json means what transformers takes it to mean; what is wrong with one is named."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from octavo.checkpoint.hf_config import parse_config
from octavo.errors import CheckpointError, UnknownArchitectureError
from octavo.models.loader import families
from tests.checkpoint.opening import OLD, SIZES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama grouped, tied, with biases": LlamaConfig(
        **SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama head_dim": LlamaConfig(**SIZES, head_dim=16, rms_norm_eps=1e-5, dtype="float16"),
    "llama llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3, eos_token_id=[5, 6]),
    "llama linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4}),
    "llama dynamic": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "llama yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=4),
    "mistral window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=24, head_dim=4),
    "mistral without window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, eos_token_id=7),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "qwen3 window": Qwen3Config(
        **SIZES, num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=1, head_dim=8
    ),
    "qwen2 window": Qwen2Config(
        **SIZES, num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2 layer types": Qwen2Config(
        **SIZES,
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def parse(path: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    return parse_config(path / "config.json", values, generation or {}, families())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_configuration_means_what_transformers_says(tmp_path: Path, name: str) -> None:
    reference = CONFIGS[name]
    reference.save_pretrained(tmp_path)
    config = parse(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    for field in [*SIZES, "model_type", "num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings"]:
        assert getattr(config, field) == getattr(reference, field), field
    assert config.bos_token_id == reference.bos_token_id
    eos = reference.eos_token_id
    assert config.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert config.head_dim == getattr(reference, "head_dim", reference.hidden_size // reference.num_attention_heads)
    assert config.mlp_bias == getattr(reference, "mlp_bias", False)
    assert config.attention_bias == getattr(reference, "attention_bias", reference.model_type == "qwen2")
    assert config.attention_output_bias == getattr(reference, "attention_bias", False)
    assert config.sliding_windows == expected_windows(reference)
    assert config.dtype == ("float16" if name == "llama head_dim" else "")
    assert reference.rope_parameters is not None
    for key, value in reference.rope_parameters.items():
        assert getattr(config.rope, key) == value, key


def expected_windows(reference: PreTrainedConfig) -> tuple[int | None, ...]:
    window = getattr(reference, "sliding_window", None)
    layer_types = getattr(reference, "layer_types", None) or ["sliding_attention"] * reference.num_hidden_layers
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_theta": None}}, LLAMA3),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"original_max_position_embeddings": 256}),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": None},
        ),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {"attention_factor": 1.0}),
    ],
)
def test_rotary_keys_from_before_transformers_5_are_read(
    tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    rope = parse(tmp_path, OLD | keys).rope
    assert {name: getattr(rope, name) for name in expected} == expected


GEMMA = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 7, "num_key_value_heads": 2}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR, "sliding_window_pattern": 3},
        {"rope_scaling": None, "query_pre_attn_scalar": 168, "sliding_window": 512, "attention_bias": True},
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
)
def test_gemma_3_means_what_transformers_says(tmp_path: Path, keys: dict[str, Any]) -> None:
    config, reference = parse(tmp_path, GEMMA | keys), Gemma3TextConfig(**copy.deepcopy(GEMMA | keys))
    for field in ["head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias"]:
        assert getattr(config, field) == getattr(reference, field), field
    assert config.hidden_act == reference.hidden_activation
    assert config.attention_scale == reference.query_pre_attn_scalar**-0.5
    assert config.rms_norm_offset == 1.0
    assert config.sliding_windows == expected_windows(reference)
    assert reference.rope_parameters is not None
    for layer_type, rope in (("full_attention", config.rope), ("sliding_attention", config.local_rope)):
        for key, value in reference.rope_parameters[layer_type].items():
            assert getattr(rope, key) == value, (layer_type, key)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is not one object for each type of layer"),
        ({"hidden_activation": "silu"}, "activation 'silu' is not supported; gelu_pytorch_tanh is"),
    ],
)
def test_what_gemma_3_does_not_have_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(tmp_path, GEMMA | keys)


def test_defaults_of_absent_keys_are_those_of_transformers(tmp_path: Path) -> None:
    mistral = parse(tmp_path, OLD | {"model_type": "mistral", "num_attention_heads": 8})
    reference = MistralConfig(**(SIZES | {"num_attention_heads": 8}))
    assert mistral.num_key_value_heads == reference.num_key_value_heads
    assert mistral.sliding_windows == (reference.sliding_window,) * 3


def test_generation_config_names_the_end_of_turn_tokens(tmp_path: Path) -> None:
    assert parse(tmp_path, OLD | {"eos_token_id": 3}, {"eos_token_id": [4, 5, 4]}).eos_token_ids == (4, 5)
    assert parse(tmp_path, OLD | {"eos_token_id": 3}, {"temperature": 1.0}).eos_token_ids == (3,)


def test_ids_that_are_no_token_are_left_out_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = parse(tmp_path, OLD | {"eos_token_id": 3, "bos_token_id": -1}, {"eos_token_id": -1})
    assert (config.eos_token_ids, config.bos_token_id) == ((3,), None)
    assert parse(tmp_path, OLD, {"eos_token_id": [-1, 4.0]}).eos_token_ids == (4,)
    assert "generation_config.json: eos_token_id is -1, which is no token" in caplog.text


def test_generation_config_has_sampling_defaults(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "min_p": None, "max_new_tokens": 64, "do_sample": True, "num_beams": 1}
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    assert parse(tmp_path, OLD, values).sampling_defaults == expected
    floats = parse(tmp_path, OLD, values | {"top_k": 20.0, "max_new_tokens": 64.0}).sampling_defaults
    assert floats == expected
    assert all(type(floats[name]) is int for name in ("top_k", "max_tokens"))
    assert parse(tmp_path, OLD, {}).sampling_defaults == {}
    assert parse(tmp_path, OLD, {"temperature": "hot"}).sampling_defaults == {"temperature": "hot"}  # not used, no harm


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 33}, "hidden_size is 33, which 4 attention heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "4 attention heads can't share 3"),
        ({"head_dim": 7}, "size of a head, 7"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; silu is"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type is 'longrope'; supported: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is not one flat object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_what_cannot_be_right_in_config_json_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        parse(tmp_path, OLD | keys)


def test_an_unknown_model_type_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownArchitectureError, match="'gpt_neox' is not supported; known: bert, gemma3_text, llama, mistral, qwen2"
    ):
        parse(tmp_path, OLD | {"model_type": "gpt_neox"})
