"""Linear: one matrix product, of one checkpoint matrix or of several that share their input."""

from collections.abc import Sequence

import torch

from octavo.layers.context import StepContext
from octavo.layers.sharding import Shard
from octavo.layers.weights import WeightLoader

__all__ = ["Linear"]


class Linear:
    """y = x·Wᵀ + b. Matrices named together are stacked along their outputs and computed in one product.

    `shard` says how ranks share it: by columns each computes some of the outputs, by rows a part of each sum.
    """

    def __init__(
        self,
        weights: WeightLoader,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        shard: Shard,
    ) -> None:
        self.weight = weights.matrix([f"{name}.weight" for name in names], in_features, out_features, shard)
        whole = weights.vector([f"{name}.bias" for name in names], out_features, shard) if bias else None
        self.bias = whole if weights.ranks.adds_bias(shard) else None

    def __call__(self, x: torch.Tensor, ctx: StepContext, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out], in the activations' dtype by default."""
        return ctx.ops.linear(x, self.weight, self.bias, out_dtype or ctx.dtype)
