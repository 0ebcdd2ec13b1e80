"""The KV pool: a zeroed cache tensor for each place in a group, committed page by page as blocks are first written."""

import mmap

import numpy as np
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels.ops import Ops

__all__ = ["allocate_kv_caches"]


def allocate_kv_caches(
    ops: Ops, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """The cache of each layer, of `Ops.kv_cache_shape`, filled with zeros. Layers in the same place of their groups
    share one: no block is used by two groups at once."""
    shape = ops.kv_cache_shape(num_blocks, block_size, model.num_key_value_heads, model.head_dim)
    place_of = {layer: place for group in model.kv_groups for place, layer in enumerate(group.layers)}
    caches = [
        _zeros_on_demand(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        for _ in range(max(place_of.values()) + 1)
    ]
    return [caches[place_of[layer]] for layer in range(model.num_hidden_layers)]


def _zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel hands out when first written: an idle pool costs nothing, and no start-up time."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
