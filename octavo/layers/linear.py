"""Linear: one matrix product, of one checkpoint matrix or of several that share their input."""

from collections.abc import Sequence

import torch

from octavo.layers.context import StepContext
from octavo.layers.weights import WeightLoader

__all__ = ["Linear"]


class Linear:
    """y = x·Wᵀ + b. Matrices named together are stacked along their outputs and computed in one product."""

    def __init__(
        self, weights: WeightLoader, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool
    ) -> None:
        self.weight = weights.matrix([f"{name}.weight" for name in names], in_features, out_features)
        self.bias = weights.vector([f"{name}.bias" for name in names], out_features) if bias else None

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T, in] -> [T, out]
        return ctx.ops.linear(x, self.weight, self.bias, ctx.dtype)
