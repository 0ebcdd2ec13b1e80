"""CpuPool: KV caches in memory that is committed page by page as blocks are first written, and the tier behind them."""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.devices.cpu.tier_file import TierFile, TierLayout
from octavo.devices.device import CopyResult, Draw, Forward, KVLayout, StepSize
from octavo.devices.host_buffers import StepArrays
from octavo.kernels.ops import Ops

__all__ = ["CpuPool", "PopulatedForward", "zeros_on_demand"]

NOTHING_COPIED = CopyResult([], 0.0)


class CpuPool:
    def __init__(self, ops: Ops, layout: KVLayout) -> None:
        self.num_blocks = layout.num_blocks
        sizes = (layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype)
        shape = ops.kv_cache_shape(layout.num_blocks + layout.num_tier_blocks, *sizes)
        self.tier: TierFile | None = None
        if layout.num_tier_blocks:
            block_bytes = int(np.prod(shape[1:])) * layout.dtype.itemsize
            dtype = str(layout.dtype).removeprefix("torch.")
            tier_layout = TierLayout(
                layout.num_tier_blocks, layout.block_size, dtype, layout.num_caches * (block_bytes,)
            )
            self.tier = TierFile(layout.tier_folder, tier_layout, layout.num_blocks)
        self.caches = [self._cache(place, layout.dtype, shape) for place in range(layout.num_caches)]

    def _cache(self, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return zeros_on_demand(shape, dtype) if self.tier is None else self.tier.cache(place, dtype, shape)

    def copy(self, copies: Sequence[tuple[int, int]]) -> CopyResult:
        """Those between pool and tier, then those within the pool."""
        within = [copy for copy in copies if max(copy) < self.num_blocks]
        between = copies[: len(copies) - len(within)]
        copied = self.tier.copy(between) if self.tier is not None else NOTHING_COPIED
        for cache in self.caches:
            for source, destination in within:
                cache[destination].copy_(cache[source])
        return copied

    def measure_copy_rate(self) -> float:
        return 1.0 if self.tier is None else self.tier.measure()


class PopulatedForward:
    """A forward over a pool with a tier: blocks in the file are brought into memory before attention reads them."""

    def __init__(self, forward: Forward, tier: TierFile, arrays: StepArrays, block_size: int) -> None:
        self._forward = forward
        self._tier = tier
        self._arrays = arrays
        self._block_size = block_size
        self.hidden_states = forward.hidden_states
        self.sampled_logits = forward.sampled_logits
        self.logits = forward.logits

    def run(self, size: StepSize, draw: Draw = "no") -> None:
        self._tier.populate(self._blocks_read(size.num_requests))
        self._forward.run(size, draw)

    def _blocks_read(self, num_requests: int) -> npt.NDArray[np.int32]:
        """Ids of the blocks that the step's attention reads."""
        seq_lens = self._arrays.seq_lens[:num_requests]
        num_blocks = -(-int(seq_lens.max(initial=0)) // self._block_size)
        tables = np.stack([table[:num_requests, :num_blocks] for table in self._arrays.block_tables])
        return tables[:, np.arange(num_blocks) * self._block_size < seq_lens[:, None]]


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel hands out when first written: an idle pool costs nothing, and no start-up time."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # attention jumps from block to block: fewer address translations
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
