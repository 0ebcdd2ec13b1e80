"""The KV pool: a zeroed cache tensor for each place in a group, committed page by page as blocks are first written; and
the tier behind it."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels.ops import Ops
from octavo.resolve import ResolvedConfig
from octavo.runner.tier_file import TierFile, TierLayout

__all__ = ["allocate_kv_caches", "copy_blocks", "make_tier_file", "zeros_on_demand"]

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def make_tier_file(ops: Ops, model: ModelConfig, config: ResolvedConfig) -> TierFile | None:
    """The tier that the configuration asks for, in a file."""
    if not config.scheduler.num_swap_blocks:
        return None
    dtype = KV_DTYPES[config.kv.dtype]
    shape = ops.kv_cache_shape(1, config.scheduler.block_size, model.num_key_value_heads, model.head_dim, dtype)
    sizes = (int(np.prod(shape)) * dtype.itemsize,) * (max(_places(model).values()) + 1)
    layout = TierLayout(config.scheduler.num_swap_blocks, config.scheduler.block_size, config.kv.dtype, sizes)
    return TierFile(config.kv.folder, layout, config.scheduler.num_blocks)


def allocate_kv_caches(
    ops: Ops,
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str,
    device: torch.device,
    tier: TierFile | None = None,
) -> list[torch.Tensor]:
    """The cache of each layer, of `Ops.kv_cache_shape`, filled with zeros, and behind them the tier's blocks. Layers in
    the same place of their groups share one: no block is used by two groups at once."""
    dtype = KV_DTYPES[kv_cache_dtype]
    num_blocks += 0 if tier is None else tier.layout.num_blocks
    shape = ops.kv_cache_shape(num_blocks, block_size, model.num_key_value_heads, model.head_dim, dtype)

    def cache(place: int) -> torch.Tensor:
        if tier is not None:
            return tier.cache(place, dtype, shape)
        return zeros_on_demand(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

    place_of = _places(model)
    caches = [cache(place) for place in range(max(place_of.values()) + 1)]
    return [caches[place_of[layer]] for layer in range(model.num_hidden_layers)]


def _places(model: ModelConfig) -> dict[int, int]:
    """Each layer's place in its group."""
    return {layer: place for group in model.kv_groups for place, layer in enumerate(group.layers)}


def copy_blocks(kv_caches: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """In every layer, in order: (source, destination)."""
    for cache in {cache.data_ptr(): cache for cache in kv_caches}.values():
        for source, destination in copies:
            cache[destination].copy_(cache[source])


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel hands out when first written: an idle pool costs nothing, and no start-up time."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # attention jumps from block to block: fewer address translations
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
