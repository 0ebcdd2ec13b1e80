"""The KV pool's tensors."""

import pytest
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.devices.registry import open_device
from octavo.plan.memory import kv_bytes_per_token
from octavo.runner.kv_cache import kv_layout

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=32,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    max_position_embeddings=64,
    dtype="bfloat16",
)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "float16", "fp8", "int8"])
def test_caches_take_the_bytes_that_the_pool_was_planned_with(device: str, kv_cache_dtype: str) -> None:
    caches = open_device(device).make_kv_pool(kv_layout(MODEL, 7, 32, kv_cache_dtype)).caches
    assert sum(cache.nbytes for cache in caches) == 7 * 32 * kv_bytes_per_token(MODEL, kv_cache_dtype)
    assert all(cache.is_contiguous() and not cache.view(torch.uint8).any() for cache in caches)
