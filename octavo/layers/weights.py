"""WeightLoader: a checkpoint's tensors, read, dequantised, stacked and packed as a model asks for them.

The one place that compares what a model expects with what the files hold: a missing or surplus tensor or a wrong shape
is an error that names it. Knows no architecture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops, Weight
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.quantization import QUANTIZERS, dequantize, read_quantized, unpermute_rope

__all__ = ["WeightFormat", "WeightLoader", "packed_bytes", "quantized_form"]

OWN_BLOCKS = {"int8": "Q8_0", "int4": "Q4_1"}
"""Block types that have the form of --quantization already."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What a model's weights become when they are loaded."""

    dtype: torch.dtype
    """The type of dense matrices and of activations between ops."""
    quantization: str = "none"
    """none; int8, int4; or gguf, which keeps a file's blocks as they are and quantises nothing else."""
    int8_activations: bool = True
    """Quantised matrices quantise what they multiply, too."""


def quantized_form(quantization: str, block_type: str) -> QuantizedForm | None:
    """Of most matrices, where the checkpoint's are of `block_type`; None for dense ones."""
    if quantization == "none":
        return None
    main = block_type if block_type in QUANTIZED_TYPES else "Q8_0"
    return QUANTIZED_TYPES[OWN_BLOCKS.get(quantization, main)].form


def packed_bytes(tensor: TensorInfo) -> int:
    """About what the tensor takes once packed, its blocks kept."""
    if tensor.dtype not in QUANTIZED_TYPES:
        return tensor.num_bytes
    return int(math.prod(tensor.shape) * QUANTIZED_TYPES[tensor.dtype].form.bytes_per_weight)


class WeightLoader:
    """Hands out weights by name, once each. `on_bytes` is told the checkpoint bytes read, for a progress bar."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        weight_format: WeightFormat,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.format = weight_format
        self._on_bytes = on_bytes
        self._unused = set(checkpoint.tensors)

    def matrix(self, names: Sequence[str], in_features: int, out_features: Sequence[int]) -> Weight:
        """The matrices [out, in] of `names`, stacked along their outputs, in the provider's layout."""
        return self._matrix(names, list(zip(names, [(out, in_features) for out in out_features], strict=True)))

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        """The vectors of `names`, one after the other, in float32: biases and norms are added to accumulators."""
        return torch.cat([self._read(name, (size,), torch.float32) for name, size in zip(names, sizes, strict=True)])

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

    def _matrix(self, names: Sequence[str], shapes: Sequence[tuple[str, tuple[int, int]]]) -> Weight:
        if self.format.quantization in QUANTIZERS:
            return self._pack_quantized([self._quantize(name, shape) for name, shape in shapes])
        if self.format.quantization == "gguf":
            has_blocks = [self._has_blocks(name) for name in names]
            if all(has_blocks):
                return self._pack_quantized([self._read_blocks(name, shape) for name, shape in shapes])
            if any(has_blocks):  # float32 holds all of them exactly
                return self.ops.pack(_stacked([self._read(name, shape, torch.float32) for name, shape in shapes]))
        return self.ops.pack(_stacked([self._read(name, shape, self.format.dtype) for name, shape in shapes]))

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        info = self._take(name, shape)
        tensor = dequantize(self.checkpoint.read(name), info.dtype, info.shape, dtype, name=name)
        return unpermute_rope(tensor, info.rope_interleaved_heads) if info.rope_interleaved_heads else tensor

    def _has_blocks(self, name: str) -> bool:
        return name in self.checkpoint.tensors and self.checkpoint.tensors[name].dtype in QUANTIZED_TYPES

    def _read_blocks(self, name: str, shape: tuple[int, int]) -> QuantizedMatrix:
        info = self._take(name, shape)
        matrix = read_quantized(self.checkpoint.read(name), info.dtype, shape)
        heads = info.rope_interleaved_heads
        if not heads:
            return matrix
        mins = None if matrix.mins is None else unpermute_rope(matrix.mins, heads)
        values, scales = unpermute_rope(matrix.values, heads), unpermute_rope(matrix.scales, heads)
        return QuantizedMatrix(matrix.form, values, scales, mins)

    def _quantize(self, name: str, shape: tuple[int, int]) -> QuantizedMatrix:
        """The checkpoint's own blocks where they have the form asked for, else quantised here."""
        quantize = QUANTIZERS[self.format.quantization]
        if self._has_blocks(name) and self.checkpoint.tensors[name].dtype == OWN_BLOCKS[self.format.quantization]:
            return self._read_blocks(name, shape)
        return quantize(self._read(name, shape, torch.float32))

    def _pack_quantized(self, parts: Sequence[QuantizedMatrix]) -> Weight:
        matrix = parts[0] if len(parts) == 1 else QuantizedMatrix.stacked(parts)
        return self.ops.pack_quantized(matrix, self.format.int8_activations)

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
