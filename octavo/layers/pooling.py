"""Pooling: one vector a request, of its tokens' hidden states."""

import torch

from octavo.checkpoint.model_config import PoolingConfig
from octavo.kernels.ops import Ops

__all__ = ["Pooling"]


class Pooling:
    def __init__(self, config: PoolingConfig) -> None:
        self.config = config

    def __call__(
        self, hidden_states: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor, ops: Ops
    ) -> torch.Tensor:
        """The vectors [S, H] of `pooled`, brought to length 1 where the model's are."""
        pooled = self.pooled(hidden_states, rows, query_start, ops)
        return ops.l2_normalize(pooled) if self.config.normalize else pooled

    def pooled(
        self, hidden_states: torch.Tensor, rows: torch.Tensor, query_start: torch.Tensor, ops: Ops
    ) -> torch.Tensor:
        """hidden_states [T, H] -> [S, H]: of the tokens `rows` [S] int32, or for the mean of all R requests, S = R.

        query_start [R + 1] int32. For the mean every request must be in the step whole.
        """
        if self.config.mode == "mean":
            return ops.mean_rows(hidden_states, query_start)
        return ops.gather_rows(hidden_states, rows)
