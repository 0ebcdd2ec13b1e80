"""WeightLoader: a checkpoint's tensors, read, dequantised, stacked and packed as a model asks for them.

The one place that compares what a model expects with what the files hold: a missing or surplus tensor or a wrong shape
is an error that names it. Knows no architecture.
"""

from collections.abc import Callable, Sequence

import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops, Weight
from octavo.layers.quantization import dequantize, unpermute_rope

__all__ = ["WeightLoader"]


class WeightLoader:
    """Hands out weights by name, once each. `on_bytes` is told the checkpoint bytes read, for a progress bar."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.dtype = dtype
        self._on_bytes = on_bytes
        self._unused = set(checkpoint.tensors)

    def matrix(self, names: Sequence[str], in_features: int, out_features: Sequence[int]) -> Weight:
        """The matrices [out, in] of `names`, stacked along their outputs, in the provider's layout."""
        parts = [
            self._read(name, (out, in_features), self.dtype) for name, out in zip(names, out_features, strict=True)
        ]
        return self.ops.pack(parts[0] if len(parts) == 1 else torch.cat(parts))

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        """The vectors of `names`, one after the other, in float32: biases and norms are added to accumulators."""
        return torch.cat([self._read(n, (size,), torch.float32) for n, size in zip(names, sizes, strict=True)])

    def table(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix [rows, size] in float32, whose rows are looked up and never multiplied."""
        return self._read(name, shape, torch.float32)

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise CheckpointError if the files hold tensors that the model did not ask for."""
        surplus = sorted(self._unused - set(ignored))
        if surplus:
            shown = ", ".join(surplus[:5]) + (f" and {len(surplus) - 5} more" if len(surplus) > 5 else "")
            raise CheckpointError(
                f"{self.checkpoint.path}: {len(surplus)} tensors that model type "
                f"{self.checkpoint.config.model_type!r} does not use: {shown}."
            )

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {name!r} is missing.")
        if info.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {list(info.shape)}; its configuration asks for "
                f"{list(shape)}."
            )
        self._unused.discard(name)
        tensor = dequantize(self.checkpoint.read(name), info.dtype, info.shape, dtype, name=name)
        self._on_bytes(info.num_bytes)
        return unpermute_rope(tensor, info.rope_interleaved_heads) if info.rope_interleaved_heads else tensor
