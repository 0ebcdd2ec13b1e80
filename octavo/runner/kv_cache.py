"""Which KV caches a model needs, and which of them each layer uses.

Layers in the same place of their groups share a cache: no block is used by two groups at once.
"""

from collections.abc import Sequence

import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.devices.device import KVLayout

__all__ = ["kv_layout", "layer_caches"]

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def kv_layout(
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: str,
    num_tier_blocks: int = 0,
    tier_folder: str = "",
) -> KVLayout:
    """dtype: as --kv-cache-dtype names it."""
    return KVLayout(
        num_caches=max(_places(model).values()) + 1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        dtype=KV_DTYPES[dtype],
        num_tier_blocks=num_tier_blocks,
        tier_folder=tier_folder,
    )


def layer_caches(model: ModelConfig, caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The cache of each layer."""
    place_of = _places(model)
    return [caches[place_of[layer]] for layer in range(model.num_hidden_layers)]


def _places(model: ModelConfig) -> dict[int, int]:
    """Each layer's place in its group."""
    return {layer: place for group in model.kv_groups for place, layer in enumerate(group.layers)}
