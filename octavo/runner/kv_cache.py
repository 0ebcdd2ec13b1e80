"""The KV pool: a zeroed cache tensor for each place in a group, committed page by page as blocks are first written."""

import mmap

import numpy as np
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels.ops import Ops

__all__ = ["allocate_kv_caches", "zeros_on_demand"]

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def allocate_kv_caches(
    ops: Ops, model: ModelConfig, num_blocks: int, block_size: int, kv_cache_dtype: str, device: torch.device
) -> list[torch.Tensor]:
    """The cache of each layer, of `Ops.kv_cache_shape`, filled with zeros. Layers in the same place of their groups
    share one: no block is used by two groups at once."""
    dtype = KV_DTYPES[kv_cache_dtype]
    shape = ops.kv_cache_shape(num_blocks, block_size, model.num_key_value_heads, model.head_dim, dtype)
    place_of = {layer: place for group in model.kv_groups for place, layer in enumerate(group.layers)}
    caches = [
        zeros_on_demand(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        for _ in range(max(place_of.values()) + 1)
    ]
    return [caches[place_of[layer]] for layer in range(model.num_hidden_layers)]


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel hands out when first written: an idle pool costs nothing, and no start-up time."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # attention jumps from block to block: fewer address translations
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
