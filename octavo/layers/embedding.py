"""Embedding and LMHead: token ids to the residual stream, and the residual stream to logits."""

import torch

from octavo.kernels.ops import Weight
from octavo.kernels.sampling import SampleRows
from octavo.layers.context import StepContext
from octavo.layers.weights import WeightLoader

__all__ = ["Embedding", "LMHead"]


class Embedding:
    """Rows of a matrix, times `scale`."""

    def __init__(self, weights: WeightLoader, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.weight = weights.matrix([f"{name}.weight"], hidden_size, [vocab_size])
        self.scale = scale

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] -> [T, H] float32
        rows = ctx.ops.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else ctx.ops.scale(rows, self.scale)


class LMHead:
    """Logits of chosen rows. Shares the embedding's matrix where the model ties them."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden_states [T, H], rows [S] int32 -> [S, V] float32."""
        return ctx.ops.linear(ctx.ops.gather_rows(hidden_states, rows), self.weight, None, torch.float32)

    def most_likely(self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: SampleRows, ctx: StepContext) -> None:
        """The likeliest token of each row [S], into `draws` [S]."""
        ctx.ops.most_likely(ctx.ops.gather_rows(hidden_states, rows), self.weight, draws)
