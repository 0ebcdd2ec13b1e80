"""MatrixSource: one matrix [out_features, in_features] of a checkpoint, dense or quantised, whole or in slices.

A source knows how a format stores a matrix, in one tensor or in several; what becomes of it, the loader decides.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.checkpoint.stored_bytes import slice_bytes
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.layers.gguf_blocks import FLOAT_TYPES, QUANTIZED_TYPES
from octavo.layers.quantization import dequantize, read_quantized, unpermute_rope

__all__ = ["FindSource", "MatrixSource", "StoredMatrix", "stored_matrix"]


class MatrixSource(Protocol):
    """Slices put together are the whole, bit for bit. Columns are cut at multiples of the form's group."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The stored tensors that the matrix is made of."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """[out_features, in_features]; a stack of matrices has its rows one matrix after the other."""
        ...

    @property
    def form(self) -> QuantizedForm | None:
        """How the file has the matrix quantised; None: it is dense."""
        ...

    def dense(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """Those rows and columns, rounded once to `dtype`."""
        ...

    def quantized(self, rows: slice, columns: slice) -> QuantizedMatrix:
        """Those rows and columns as the file has them quantised."""
        ...


FindSource = Callable[[Checkpoint, str], MatrixSource | None]
"""The source of the matrix of a name; None where the checkpoint has none."""


def stored_matrix(checkpoint: Checkpoint, name: str) -> MatrixSource | None:
    """A matrix that is one stored tensor: floats, or GGUF's blocks."""
    info = checkpoint.tensors.get(name)
    return None if info is None else StoredMatrix(checkpoint, info)


class StoredMatrix:
    """One tensor; only the bytes of a slice are read. Rows in GGUF's rotary order are given in Hugging Face's."""

    def __init__(self, checkpoint: Checkpoint, info: TensorInfo) -> None:
        self._checkpoint, self._info = checkpoint, info
        block_type = QUANTIZED_TYPES.get(info.dtype)
        self.form = None if block_type is None else block_type.form
        float_type = FLOAT_TYPES.get(info.dtype)
        float_bytes = 1 if float_type is None else float_type.itemsize  # other types are refused when they are read
        self._block_size = 1 if block_type is None else block_type.block_size
        self._block_bytes = float_bytes if block_type is None else block_type.block_bytes

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (self._info,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    def dense(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        data, shape, inner = self._read(rows, columns)
        return dequantize(data, self._info.dtype, shape, dtype, name=self._info.name)[:, inner].contiguous()

    def quantized(self, rows: slice, columns: slice) -> QuantizedMatrix:
        data, shape, inner = self._read(rows, columns)
        return read_quantized(data, self._info.dtype, shape).columns(inner)

    def _read(self, rows: slice, columns: slice) -> tuple[npt.NDArray[np.uint8], tuple[int, int], slice]:
        """The bytes of the blocks that hold the slice, their shape, and the slice's columns within them."""
        size, num_columns = self._block_size, self._info.shape[-1]
        num_rows = math.prod(self._info.shape[:-1])
        first, last = columns.start // size, -(-columns.stop // size)
        start, stop = first * size, min(last * size, num_columns)
        blocks = slice(first, None if stop == num_columns else last)
        whole = self._checkpoint.read(self._info.name)
        data = slice_bytes(whole, num_rows, self._stored_rows(rows), blocks, self._block_bytes)
        return data, (rows.stop - rows.start, stop - start), slice(columns.start - start, columns.stop - start)

    def _stored_rows(self, rows: slice) -> slice | npt.NDArray[np.int64]:
        heads = self._info.rope_interleaved_heads
        if not heads:
            return rows
        order: npt.NDArray[np.int64] = unpermute_rope(torch.arange(self._info.shape[0]), heads)[rows].numpy()
        return order
