"""Runs a model over one sequence without scheduler or runner: logits at every position."""

import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.devices.reference.device import ReferencePool
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.models.loader import CausalLM
from octavo.runner.kv_cache import kv_layout, layer_caches

__all__ = ["sequence_logits"]

BLOCK_SIZE = 16


def sequence_logits(
    model: CausalLM,
    ops: Ops,
    config: ModelConfig,
    token_ids: list[int],
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    kv_cache_dtype: str | None = None,
) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] float32, computed `chunk` tokens at a time (default: all at once), with a KV
    cache of `kv_cache_dtype` (default: as dtype)."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    num_groups = len(config.kv_groups)
    cache_dtype = kv_cache_dtype or str(dtype).removeprefix("torch.")
    layout = kv_layout(config, num_blocks * num_groups, BLOCK_SIZE, cache_dtype)
    caches = layer_caches(config, ReferencePool(ops, layout).caches)
    order = torch.arange(num_blocks * num_groups, dtype=torch.int32).flip(0)  # blocks in another order than positions
    tables = order.view(num_blocks, num_groups).T.contiguous()
    logits = []
    for start in range(0, len(token_ids), chunk or len(token_ids)):
        ids = torch.tensor(token_ids[start : start + (chunk or len(token_ids))], dtype=torch.int32)
        positions = torch.arange(start, start + len(ids), dtype=torch.int32)
        ctx = StepContext(
            ops=ops,
            dtype=dtype,
            positions=positions,
            slot_mappings=tuple(
                t[positions.long() // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE for t in tables
            ),
            block_tables=tuple(t.unsqueeze(0) for t in tables),
            query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
            seq_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
            kv_caches=caches,
        )
        with torch.inference_mode():
            rows = torch.arange(len(ids), dtype=torch.int32)
            logits.append(model.logits(model(ids, ctx), rows, ctx))
    return torch.cat(logits)
