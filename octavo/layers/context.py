"""StepContext: everything a model needs to know of the step it computes, passed as an argument."""

from dataclasses import dataclass

import torch

from octavo.kernels.ops import Ops

__all__ = ["StepContext"]


@dataclass(frozen=True, slots=True)
class StepContext:
    """T tokens of R requests, packed one request after the other."""

    ops: Ops
    dtype: torch.dtype
    """Of activations between ops."""
    positions: torch.Tensor  # [T] int32
    slot_mappings: tuple[torch.Tensor, ...]  # one a KV-cache group: [T] int32, where each token's key and value go
    block_tables: tuple[torch.Tensor, ...]  # one a group: [R, max_blocks] int32; a window need not have its first ones
    query_start: torch.Tensor  # [R + 1] int32: first token of each request
    seq_lens: torch.Tensor  # [R] int32: tokens of each request in the cache after this step
    kv_caches: list[torch.Tensor]  # one a layer, of `Ops.kv_cache_shape`; layers of different groups share them
