"""RMSNorm, alone or with the residual addition that precedes it; PostLayerNorm, of the sum that it replaces."""

import torch

from octavo.layers.context import StepContext
from octavo.layers.weights import WeightLoader

__all__ = ["PostLayerNorm", "RMSNorm"]


class RMSNorm:
    """`offset` is added to the stored weight, once."""

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = weights.vector([f"{name}.weight"], [size]) + offset
        self.eps = eps

    def __call__(self, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T, H] float32 -> [T, H]
        return ctx.ops.rms_norm(residual, self.weight, self.eps, ctx.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [T, H] float32 += x [T, H], in place; returns its norm [T, H]."""
        return ctx.ops.add_rms_norm(x, residual, self.weight, self.eps, ctx.dtype)


class PostLayerNorm:
    """The layer norm after an addition, as the original transformer has it: the residual stream is what it gives."""

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float) -> None:
        self.weight = weights.vector([f"{name}.weight"], [size])
        self.bias = weights.vector([f"{name}.bias"], [size])
        self.eps = eps

    def add(self, x: torch.Tensor, residual: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [T, H] float32 = norm(residual + x [T, H]), in place; returns it as [T, H]."""
        return ctx.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, ctx.dtype)
