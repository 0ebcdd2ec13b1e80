"""resolve(): from options and facts to every value the engine runs with, each with its reason."""

import dataclasses
from typing import Any

import pytest

from octavo.checkpoint.model_config import ModelConfig, PoolingConfig, RopeConfig
from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.plan.facts import Facts
from octavo.plan.memory import kv_bytes_per_token
from octavo.resolve import resolve, resolve_num_threads

GIB = 2**30
LLAMA_2_7B = ModelConfig(
    model_type="llama",
    vocab_size=32_000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    dtype="float16",
)


def facts(**changes: Any) -> Facts:
    values: dict[str, Any] = {
        "model": LLAMA_2_7B,
        "provider": "cpu",
        "num_threads": 2,
        "free_memory_bytes": 64 * GIB,
        "num_parameters": 6_738_415_616,
        "flops_per_s": 40e12,
    }
    return Facts(**(values | changes))


def test_kv_bytes_per_token_are_the_published_figures() -> None:
    assert kv_bytes_per_token(LLAMA_2_7B, "float16") == 512 * 1024
    llama_2_70b = dataclasses.replace(LLAMA_2_7B, num_hidden_layers=80, num_key_value_heads=8)
    assert kv_bytes_per_token(llama_2_70b, "float16") == 320 * 1024


def test_a_quantised_cache_holds_about_twice_the_blocks() -> None:
    blocks = {
        dtype: resolve(
            EngineConfig(model="m", kv_cache_dtype=dtype, kv_cache_memory_bytes=8 * GIB), facts()
        ).scheduler.num_blocks
        for dtype in ("float16", "int8", "fp8", "fp8_e4m3")
    }
    assert blocks["int8"] == blocks["fp8"] == blocks["fp8_e4m3"]
    assert blocks["int8"] / blocks["float16"] == pytest.approx(2 * 128 / (128 + 4), rel=0.001)


def test_defaults_are_derived_and_explained() -> None:
    resolved = resolve(EngineConfig(model="m"), facts())
    assert (resolved.weights.dtype, resolved.kv.dtype, resolved.runtime.max_model_len) == ("float16", "float16", 4096)
    # Half of what is free beside the weights: less than 128 requests of 4096 tokens need.
    pool_bytes = resolved.scheduler.num_blocks * 16 * 512 * 1024
    assert pool_bytes == pytest.approx((64 * GIB - 2 * 6_738_415_616) / 2, rel=0.01)
    assert {name for name, _ in resolved.reasons} == {
        "--dtype",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
    }


def test_the_pool_is_never_larger_than_every_request_at_full_length_needs() -> None:
    resolved = resolve(EngineConfig(model="m", max_num_seqs=2, max_model_len=1000), facts())
    assert resolved.scheduler.num_blocks == 2 * 63


def test_the_pool_follows_the_options_that_size_it() -> None:
    by_bytes = resolve(EngineConfig(model="m", kv_cache_memory_bytes=GIB), facts())
    assert by_bytes.scheduler.num_blocks == GIB // (16 * 512 * 1024)
    by_share = resolve(EngineConfig(model="m", gpu_memory_utilization=0.5), facts())
    assert by_share.scheduler.num_blocks == (32 * GIB - 2 * 6_738_415_616) // (16 * 512 * 1024)


def test_the_token_budget_is_a_step_of_200_ms_by_measurement() -> None:
    tokens_per_s = 40e12 / (2 * 6_738_415_616)
    assert (
        resolve(EngineConfig(model="m"), facts()).scheduler.max_num_batched_tokens == int(tokens_per_s * 0.2) // 16 * 16
    )
    slow = resolve(EngineConfig(model="m"), facts(flops_per_s=1e9))
    assert slow.scheduler.max_num_batched_tokens == 128  # one token for each of max_num_seqs
    assert resolve(EngineConfig(model="m", max_num_batched_tokens=77), facts()).scheduler.max_num_batched_tokens == 77


def test_quantised_checkpoints_are_computed_in_bfloat16_unless_told() -> None:
    quantised = facts(model=dataclasses.replace(LLAMA_2_7B, dtype="Q4_0"))
    assert resolve(EngineConfig(model="m"), quantised).weights.dtype == "bfloat16"
    half = resolve(EngineConfig(model="m", dtype="half", kv_cache_dtype="float32"), quantised)
    assert (half.weights.dtype, half.kv.dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "--block-size must be a positive multiple of 16, got 24"),
        ({"block_size": 0}, "multiple of 16, got 0"),
        ({"dtype": "int3"}, "--dtype must be one of auto, .* got 'int3'"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization must be from 0.01 to 1.0, got 1.5"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 9000 is more than the 4096 positions"):
        resolve(EngineConfig(model="m", max_model_len=9000), facts())


def test_rotary_scaling_lengthens_the_context() -> None:
    yarn = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
    scaled = facts(model=dataclasses.replace(LLAMA_2_7B, rope=yarn))
    assert resolve(EngineConfig(model="m"), scaled).runtime.max_model_len == 16_384
    llama3 = RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=512)
    scaled = facts(model=dataclasses.replace(LLAMA_2_7B, rope=llama3))
    assert resolve(EngineConfig(model="m"), scaled).runtime.max_model_len == 4096


def test_a_pool_without_room_says_what_was_free_and_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"12\.55 GiB.*--gpu-memory-utilization or --kv-cache-memory-bytes"):
        resolve(EngineConfig(model="m"), facts(free_memory_bytes=12 * GIB))


OWN = {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("options", "defaults"),
    [
        ({}, OWN),
        ({"generation_config": "none"}, {}),
        ({"generation_config": "vllm"}, {}),
        (
            {"override_generation_config": '{"temperature": 0, "max_new_tokens": 9}'},
            OWN | {"temperature": 0, "max_tokens": 9},
        ),
        ({"generation_config": "none", "override_generation_config": '{"min_p": 0.1}'}, {"min_p": 0.1}),
    ],
)
def test_sampling_defaults_are_the_model_s_unless_told_otherwise(options: Any, defaults: dict[str, float]) -> None:
    model = dataclasses.replace(LLAMA_2_7B, sampling_defaults=OWN)
    resolved = resolve(EngineConfig(model="m", **options), facts(model=model))
    assert resolved.runtime.sampling_defaults == defaults
    shown = dict(resolved.reasons).get("--generation-config", "")
    assert all(f"{name} {value}" in shown for name, value in defaults.items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"beams": 3}', "can't set 'beams'"),
        ('{"top_k": 1.5}', "top_k must be"),
        ('{"temperature": -1}', "temperature must be a number from 0 to 100, got -1"),
    ],
)
def test_sampling_defaults_of_the_users_that_are_out_of_range_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model="m", override_generation_config=override), facts())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 0 to 100, got -1"),
        ({"top_p": "high"}, "top_p must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
    ],
)
def test_a_senseless_default_of_the_models_is_left_out_with_a_warning(
    own: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = dataclasses.replace(LLAMA_2_7B, sampling_defaults=own | {"min_p": 0.1})
    assert resolve(EngineConfig(model="m"), facts(model=model)).runtime.sampling_defaults == {"min_p": 0.1}
    assert message in caplog.text


MINILM = ModelConfig(
    model_type="bert",
    vocab_size=30_522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=32,
    max_position_embeddings=512,
    is_encoder=True,
    hidden_act="gelu",
    dtype="float32",
    pooling=PoolingConfig(mode="cls", normalize=False),
    max_sequence_length=256,
)


def encoder_facts(**changes: Any) -> Facts:
    return facts(model=MINILM, num_parameters=22_713_216, **changes)


def test_an_encoder_pools_as_its_files_say_and_has_no_kv_pool() -> None:
    resolved = resolve(EngineConfig(model="m"), encoder_facts())
    assert resolved.runtime.pooling == MINILM.pooling
    assert (
        resolved.scheduler.group_windows,
        resolved.scheduler.num_blocks,
        resolved.scheduler.enable_prefix_caching,
    ) == ((), 0, False)
    assert resolved.scheduler.kv_capacity_tokens == resolved.scheduler.max_num_batched_tokens
    assert ("--runner", "pooling: an encoder") in resolved.reasons
    without_files = dataclasses.replace(MINILM, pooling=None)
    assert resolve(EngineConfig(model="m"), facts(model=without_files)).runtime.pooling == PoolingConfig(mode="mean")


def test_an_encoder_s_texts_are_as_long_as_sentence_transformers_allows_unless_told() -> None:
    assert resolve(EngineConfig(model="m"), encoder_facts()).runtime.max_model_len == 256
    assert resolve(EngineConfig(model="m", max_model_len=512), encoder_facts()).runtime.max_model_len == 512
    with pytest.raises(ConfigError, match="513 is more than the 512 positions"):
        resolve(EngineConfig(model="m", max_model_len=513), encoder_facts())


def test_an_encoder_s_step_has_room_for_its_longest_text() -> None:
    resolved = resolve(EngineConfig(model="m", max_num_batched_tokens=64), encoder_facts())
    assert resolved.scheduler.max_num_batched_tokens == 256
    assert dict(resolved.reasons)["--max-num-batched-tokens"].startswith("256: raised")
    slow = resolve(EngineConfig(model="m", max_num_seqs=8), encoder_facts(flops_per_s=1e6))
    assert slow.scheduler.max_num_batched_tokens == 256


def test_the_measured_budget_of_an_encoder_leaves_out_the_embedding_that_is_only_looked_up() -> None:
    resolved = resolve(EngineConfig(model="m"), encoder_facts(flops_per_s=1e11))
    assert resolved.scheduler.max_num_batched_tokens == int(1e11 / (2 * (22_713_216 - 30_522 * 384)) * 0.2) // 16 * 16


def test_an_encoder_whose_weights_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights need 0\.08 GiB and 0\.05 GiB are free"):
        resolve(EngineConfig(model="m"), encoder_facts(free_memory_bytes=50 << 20))


def test_an_encoder_does_not_generate() -> None:
    with pytest.raises(ConfigError, match="--runner generate: bert is an encoder"):
        resolve(EngineConfig(model="m", runner="generate"), encoder_facts())


def test_a_decoder_pools_when_told_or_when_its_files_say_so() -> None:
    assert resolve(EngineConfig(model="m"), facts()).runtime.pooling is None
    told = resolve(EngineConfig(model="m", runner="pooling"), facts())
    assert (told.runtime.pooling, told.scheduler.group_windows) == (PoolingConfig(mode="last"), (0,))
    by_files = facts(model=dataclasses.replace(LLAMA_2_7B, pooling=PoolingConfig(mode="last", normalize=False)))
    assert resolve(EngineConfig(model="m"), by_files).runtime.pooling == PoolingConfig(mode="last", normalize=False)
    assert resolve(EngineConfig(model="m", runner="generate"), by_files).runtime.pooling is None


def test_a_decoder_that_pools_anything_but_its_last_token_is_refused() -> None:
    mean = facts(model=dataclasses.replace(LLAMA_2_7B, pooling=PoolingConfig(mode="mean")))
    with pytest.raises(ConfigError, match=r"mean pooling.*last token only"):
        resolve(EngineConfig(model="m"), mean)


def test_blocks_are_kept_unless_another_quantization_is_asked_for() -> None:
    blocks = facts(model=dataclasses.replace(LLAMA_2_7B, dtype="Q4_K"), packed_bytes=4 * GIB)
    kept = resolve(EngineConfig(model="m"), blocks)
    assert (kept.weights.quantization, kept.weights.int8_activations, kept.weights.dtype) == ("gguf", True, "bfloat16")
    assert "--quantization" in dict(kept.reasons)
    assert resolve(EngineConfig(model="m", quantization="none"), blocks).weights.quantization == "none"
    assert resolve(EngineConfig(model="m"), facts()).weights.quantization == "none"
    narrow = resolve(EngineConfig(model="m"), facts(free_memory_bytes=13 * GIB))
    packed = resolve(EngineConfig(model="m", quantization="int4"), facts(free_memory_bytes=13 * GIB))
    assert packed.scheduler.num_blocks > narrow.scheduler.num_blocks


def test_activations_keep_their_type_where_asked() -> None:
    wide = resolve(EngineConfig(model="m", quantization="int8", activation_dtype="float32"), facts())
    assert (wide.weights.dtype, wide.weights.int8_activations) == ("float32", False)
    assert resolve(
        EngineConfig(model="m", quantization="int8", activation_dtype="int8"), facts()
    ).weights.int8_activations
    with pytest.raises(ConfigError, match="float32 and --dtype bfloat16 differ"):
        resolve(EngineConfig(model="m", activation_dtype="float32", dtype="bfloat16"), facts())
    with pytest.raises(ConfigError, match="needs quantised weights"):
        resolve(EngineConfig(model="m", activation_dtype="int8"), facts())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory_bytes": 10 << 40}, r"--kv-cache-memory-bytes asks for 10240\.00 GiB; 64\.00 GiB are free"),
        ({"max_num_seqs": 10_000_000}, "A step needs about .*64.00 GiB free.*--max-num-seqs"),
        ({"max_num_batched_tokens": 1_000_000_000}, "A step needs about .*Lower --max-num-batched-tokens"),
        ({"swap_space": 1e9}, "does not fit into the 0.00 GiB free"),
        ({"block_size": 16 << 30}, "has no room for one block"),
    ],
)
def test_more_than_the_machine_has_is_refused_with_what_it_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model="m", **options), facts())


def test_an_encoder_s_step_has_to_fit_too() -> None:
    with pytest.raises(ConfigError, match="A step needs about"):
        resolve(EngineConfig(model="m", max_num_batched_tokens=1_000_000_000), encoder_facts())


def test_the_pool_leaves_room_for_what_a_step_computes_with() -> None:
    wide = resolve(EngineConfig(model="m", max_num_batched_tokens=300_000), facts(free_memory_bytes=56 * GIB))
    pool_bytes = wide.scheduler.num_blocks * wide.scheduler.block_bytes
    assert 0 < pool_bytes < (56 * GIB - 2 * 6_738_415_616) / 2 - 10 * GIB


def test_more_threads_than_the_machine_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-threads must be at most 64 on this machine, where 2 CPUs"):
        resolve_num_threads(EngineConfig(model="m", num_threads=1_000_000_000), 2)
    assert resolve_num_threads(EngineConfig(model="m", num_threads=8), 2) == 8
    assert resolve_num_threads(EngineConfig(model="m"), 2) == 2
