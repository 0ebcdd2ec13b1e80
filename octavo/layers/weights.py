"""WeightLoader: a checkpoint's tensors, read, dequantised, stacked and packed as a model asks for them.

The one place that compares what a model expects with what the files hold: a missing or surplus tensor or a wrong shape
is an error that names it. Knows no architecture.
"""

from collections.abc import Callable, Sequence

import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops, Weight
from octavo.layers.quantization import dequantize, quantize_int8, read_q8_0, unpermute_rope

__all__ = ["WeightLoader"]


class WeightLoader:
    """Hands out weights by name, once each. `on_bytes` is told the checkpoint bytes read, for a progress bar."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        on_bytes: Callable[[int], None] = lambda _: None,
        quantization: str = "none",
    ) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.dtype = dtype
        self.quantization = quantization
        self._on_bytes = on_bytes
        self._unused = set(checkpoint.tensors)

    def matrix(self, names: Sequence[str], in_features: int, out_features: Sequence[int]) -> Weight:
        """The matrices [out, in] of `names`, stacked along their outputs, in the provider's layout."""
        shapes = [(out, in_features) for out in out_features]
        if self.quantization == "int8":
            parts = [self._read_int8(name, shape) for name, shape in zip(names, shapes, strict=True)]
            values, scales = zip(*parts, strict=True)
            return self.ops.pack_int8(_stacked(values), _stacked(scales))
        return self.ops.pack(_stacked([self._read(n, s, self.dtype) for n, s in zip(names, shapes, strict=True)]))

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
        info = self._take(name, shape)
        tensor = dequantize(self.checkpoint.read(name), info.dtype, info.shape, dtype, name=name)
        return unpermute_rope(tensor, info.rope_interleaved_heads) if info.rope_interleaved_heads else tensor

    def _read_int8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a matrix: the checkpoint's own where it has such, else quantised here."""
        if name not in self.checkpoint.tensors or self.checkpoint.tensors[name].dtype != "Q8_0":
            return quantize_int8(self._read(name, shape, torch.float32))
        info = self._take(name, shape)
        values, scales = read_q8_0(self.checkpoint.read(name), shape)
        if not info.rope_interleaved_heads:
            return values, scales
        return unpermute_rope(values, info.rope_interleaved_heads), unpermute_rope(scales, info.rope_interleaved_heads)

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """The tensor's place, once it is known to be what the model expects."""
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {name!r} is missing.")
        if info.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {list(info.shape)}; its configuration asks for "
                f"{list(shape)}."
            )
        self._unused.discard(name)
        self._on_bytes(info.num_bytes)
        return info


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
