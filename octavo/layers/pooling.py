"""Pooling: one vector a request, of its tokens' hidden states."""

import torch

from octavo.checkpoint.model_config import PoolingConfig
from octavo.layers.context import StepContext

__all__ = ["Pooling"]


class Pooling:
    def __init__(self, config: PoolingConfig) -> None:
        self.config = config

    def __call__(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden_states [T, H] -> [S, H]: of the tokens `rows` [S] int32, or for the mean of all R requests, S = R.

        For the mean every request must be in the step whole.
        """
        if self.config.mode == "mean":
            pooled = ctx.ops.mean_rows(hidden_states, ctx.query_start)
        else:
            pooled = ctx.ops.gather_rows(hidden_states, rows)
        return ctx.ops.l2_normalize(pooled) if self.config.normalize else pooled
