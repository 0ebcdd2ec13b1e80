"""Attention: rotary embedding, KV write and paged attention of one layer."""

import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.layers.context import StepContext
from octavo.layers.norm import RMSNorm

__all__ = ["Attention"]


class Attention:
    """Grouped-query attention over the paged cache of one layer, within the layer's sliding window if it has one.

    Scores are multiplied by `scale`, by default head_dim ** -0.5. The norms of query and key heads share their eps.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        cos_sin: torch.Tensor,
        scale: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.layer = layer
        self.cos_sin = cos_sin
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = scale or config.head_dim**-0.5
        assert q_norm is None or k_norm is None or q_norm.eps == k_norm.eps
        self.norms = (
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            1e-6 if q_norm is None else q_norm.eps,
        )
        groups = config.kv_groups
        self.group = next(index for index, group in enumerate(groups) if layer in group.layers)
        self.window = groups[self.group].window

    def __call__(self, qkv: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T, (Hq + 2·Hkv)·D] -> [T, Hq·D]
        kv_cache = ctx.kv_caches[self.layer]
        slot_mapping, block_table = ctx.slot_mappings[self.group], ctx.block_tables[self.group]
        q = ctx.ops.rope_write_kv(
            qkv, ctx.positions, self.cos_sin, kv_cache, slot_mapping, self.num_heads, self.num_kv_heads, *self.norms
        )
        return ctx.ops.paged_attention(q, kv_cache, block_table, ctx.query_start, ctx.seq_lens, self.scale, self.window)
