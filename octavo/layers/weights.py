"""WeightLoader: a checkpoint's tensors, read, dequantised, stacked and packed as a model asks for them.

The one place that compares what a model expects with what the files hold: a missing or surplus tensor or a wrong shape
is an error that names it. Knows no architecture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops, Weight
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.matrix_source import FindSource, MatrixSource, stored_matrix
from octavo.layers.quantization import QUANTIZERS, dequantize, unpermute_rope
from octavo.layers.sharding import ONE_RANK, Ranks, Shard

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
    """Hands out weights by name, once each. `on_bytes` is told the checkpoint bytes read, for a progress bar.

    A layer says a weight's shape and how it is cut among ranks; `find_source` knows how files store a matrix.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        weight_format: WeightFormat,
        on_bytes: Callable[[int], None] = lambda _: None,
        ranks: Ranks = ONE_RANK,
        find_source: FindSource = stored_matrix,
    ) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.format = weight_format
        self.ranks = ranks
        self._on_bytes = on_bytes
        self._find_source = find_source
        self._unused = set(checkpoint.tensors)

    def matrix(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        shard: Shard = "replicated",
        num_padding_rows: int = 0,
    ) -> Weight:
        """This rank's part of the matrices [out, in] of `names`, stacked along their outputs, as the device wants it.

        `num_padding_rows` are stored after the others and left out.
        """
        parts = []
        for name, size in zip(names, out_features, strict=True):
            source = self._source(name, (size + num_padding_rows, in_features))
            columns = self.ranks.columns(shard, in_features, self._group(source))
            parts.append(_Part(source, self.ranks.rows(shard, size), columns))
        return self._stack(parts)

    def vector(self, names: Sequence[str], sizes: Sequence[int], shard: Shard = "replicated") -> torch.Tensor:
        """The vectors of `names`, one after the other, in float32: biases and norms are added to accumulators."""
        wholes = [self._read(name, (size,)) for name, size in zip(names, sizes, strict=True)]
        return self.ops.place(torch.cat([whole[self.ranks.rows(shard, len(whole))] for whole in wholes]))

    def table(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix [rows, size] in float32, whose rows are looked up and never multiplied."""
        return self.ops.place(self._read(name, shape))

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise CheckpointError if the files hold tensors that the model did not ask for."""
        surplus = sorted(self._unused - set(ignored))
        if surplus:
            shown = ", ".join(surplus[:5]) + (f" and {len(surplus) - 5} more" if len(surplus) > 5 else "")
            raise CheckpointError(
                f"{self.checkpoint.path}: {len(surplus)} tensors that model type "
                f"{self.checkpoint.config.model_type!r} does not use: {shown}."
            )

    def _stack(self, parts: Sequence["_Part"]) -> Weight:
        if self.format.quantization in QUANTIZERS:
            return self._pack_quantized([self._quantize(part) for part in parts])
        dtype = self.format.dtype
        if self.format.quantization == "gguf":
            has_blocks = [part.source.form is not None for part in parts]
            if all(has_blocks):
                return self._pack_quantized([part.quantized() for part in parts])
            if any(has_blocks):
                dtype = torch.float32  # holds all of them exactly
        dense = [part.dense(dtype) for part in parts]
        return self.ops.pack(dense[0] if len(dense) == 1 else torch.cat(dense))

    def _quantize(self, part: "_Part") -> QuantizedMatrix:
        """The checkpoint's own blocks where they have the form asked for, else quantised here."""
        if self._keeps(part.source):
            return part.quantized()
        return QUANTIZERS[self.format.quantization](part.dense(torch.float32))

    def _keeps(self, source: MatrixSource) -> bool:
        """Whether the file's blocks stay as they are."""
        own = OWN_BLOCKS.get(self.format.quantization)
        return source.form is not None and (own is None or source.form == QUANTIZED_TYPES[own].form)

    def _pack_quantized(self, parts: Sequence[QuantizedMatrix]) -> Weight:
        matrix = parts[0] if len(parts) == 1 else QuantizedMatrix.stacked(parts)
        return self.ops.pack_quantized(matrix, self.format.int8_activations)

    def _group(self, source: MatrixSource) -> int:
        """Columns that a scale is for; 1 where the matrix becomes dense."""
        if self.format.quantization == "none":
            return 1
        if source.form is not None and self._keeps(source):
            return source.form.group
        own = OWN_BLOCKS.get(self.format.quantization)
        return 1 if own is None else QUANTIZED_TYPES[own].form.group

    def _source(self, name: str, shape: tuple[int, int]) -> MatrixSource:
        source = self._find_source(self.checkpoint, name)
        if source is None:
            self._fail_missing(name)
        self._check_shape(name, source.shape, shape)
        for tensor in source.tensors:
            self._take(tensor)
        return source

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A stored tensor in float32."""
        info = self.checkpoint.tensors.get(name)
        if info is None:
            self._fail_missing(name)
        self._check_shape(name, info.shape, shape)
        self._take(info)
        tensor = dequantize(self.checkpoint.read(name), info.dtype, info.shape, torch.float32, name=name)
        return unpermute_rope(tensor, info.rope_interleaved_heads) if info.rope_interleaved_heads else tensor

    def _take(self, info: TensorInfo) -> None:
        self._unused.discard(info.name)
        self._on_bytes(info.num_bytes)

    def _fail_missing(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self.checkpoint.path}: tensor {name!r} is missing.")

    def _check_shape(self, name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if stored != expected:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {list(stored)}; its configuration asks for "
                f"{list(expected)}."
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows and columns of a matrix that a rank has."""

    source: MatrixSource
    rows: slice
    columns: slice

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.source.dense(self.rows, self.columns, dtype)

    def quantized(self) -> QuantizedMatrix:
        return self.source.quantized(self.rows, self.columns)
