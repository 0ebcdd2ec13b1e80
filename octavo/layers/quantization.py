"""Weights as files store them, turned into dense tensors or quantised matrices: GGUF blocks, plain floats, GGUF's order
of rotary rows; and dense weights quantised here.

Works on bytes and shapes; knows neither files nor models.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CheckpointError
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.layers.gguf_blocks import FLOAT_TYPES, QUANTIZED_TYPES

__all__ = [
    "QUANTIZERS",
    "SUPPORTED_TYPES",
    "dequantize",
    "quantize_int4",
    "quantize_int8",
    "read_quantized",
    "unpermute_rope",
]

CHUNK_VALUES = 1 << 16
"""Values converted at a time: intermediates of 256 KiB stay in a core's cache, whatever the tensor."""

SUPPORTED_TYPES = (*FLOAT_TYPES, *QUANTIZED_TYPES)
INT8 = QUANTIZED_TYPES["Q8_0"].form
INT4 = QUANTIZED_TYPES["Q4_1"].form
SMALLEST_SCALE = 2.0**-24
"""Of float16; a group of zeros has it too."""


def dequantize(
    data: npt.NDArray[np.uint8],
    dtype_name: str,
    shape: tuple[int, ...],
    out_dtype: torch.dtype,
    *,
    name: str = "a tensor",
) -> torch.Tensor:
    """The tensor of `shape` whose bytes are `data` (one-dimensional, may be a read-only view of a mapped file).

    Computed in float32 and rounded once to `out_dtype`. Raises CheckpointError, naming the tensor as `name`, for a type
    that is not in SUPPORTED_TYPES.
    """
    if dtype_name not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"{name} is stored as {dtype_name}, which can't be computed with; supported are "
            f"{', '.join(SUPPORTED_TYPES)}."
        )
    out = torch.empty(math.prod(shape), dtype=out_dtype)
    if dtype_name in FLOAT_TYPES:
        for first, chunk in _chunks(data, FLOAT_TYPES[dtype_name].itemsize, CHUNK_VALUES):
            values = chunk.view(FLOAT_TYPES[dtype_name]).flatten()
            out[first : first + len(values)] = values
        return out.view(shape)
    block_type = QUANTIZED_TYPES[dtype_name]
    blocks_out = out.view(-1, block_type.block_size)
    for first, chunk in _chunks(data, block_type.block_bytes, CHUNK_VALUES // block_type.block_size):
        blocks_out[first : first + len(chunk)] = QuantizedMatrix(block_type.form, *block_type.read(chunk)).dequantized()
    return out.view(shape)


def read_quantized(data: npt.NDArray[np.uint8], dtype_name: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """The matrix that these blocks of one of QUANTIZED_TYPES hold, exactly as `dequantize` gives it in float32."""
    block_type = QUANTIZED_TYPES[dtype_name]
    form, num_blocks = block_type.form, math.prod(shape) // block_type.block_size
    values = torch.empty((num_blocks, block_type.block_size), dtype=torch.uint8)
    scales = torch.empty((num_blocks, block_type.block_size // form.group), dtype=form.scale_dtype)
    mins = torch.empty_like(scales) if form.has_mins else None
    for first, chunk in _chunks(data, block_type.block_bytes, 4 * CHUNK_VALUES // block_type.block_size):
        rows = slice(first, first + len(chunk))
        values[rows], scales[rows], chunk_mins = block_type.read(chunk)
        if mins is not None and chunk_mins is not None:
            mins[rows] = chunk_mins
    num_rows = shape[0]
    return QuantizedMatrix(
        form, values.view(shape), scales.view(num_rows, -1), None if mins is None else mins.view(num_rows, -1)
    )


def _chunks(data: npt.NDArray[np.uint8], item_bytes: int, num_items: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of its first item, [items, item_bytes] uint8), so many items at a time."""
    items = data.reshape(-1, item_bytes)
    for first in range(0, len(items), num_items):
        yield first, torch.from_numpy(items[first : first + num_items].copy())  # torch takes no read-only memory


def quantize_int8(weight: torch.Tensor) -> QuantizedMatrix:
    """weight [N, K] float32 in the form of Q8_0: in each group the largest magnitude becomes 127, the others are
    rounded to the nearest."""
    groups = _groups(weight, INT8)
    scales = _half_scales(groups.abs().amax(dim=-1, keepdim=True) / 127)
    values = (groups / scales.float()).round().clamp(-127, 127) + INT8.zero
    return _matrix(INT8, weight, values, scales, None)


def quantize_int4(weight: torch.Tensor) -> QuantizedMatrix:
    """weight [N, K] float32 in the form of Q4_1: in each group the sixteen values span the smallest to the largest."""
    groups = _groups(weight, INT4)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales, mins = _half_scales((high - low) / 15), (-low).half()
    values = ((groups + mins.float()) / scales.float()).round().clamp(0, 15)
    return _matrix(INT4, weight, values, scales, mins)


QUANTIZERS: dict[str, Callable[[torch.Tensor], QuantizedMatrix]] = {"int8": quantize_int8, "int4": quantize_int4}
"""By --quantization."""


def _groups(weight: torch.Tensor, form: QuantizedForm) -> torch.Tensor:
    """[N, K] -> [N, ceil(K / group), group]; the last column fills the last group, so that it widens no range."""
    missing = -weight.shape[1] % form.group
    padded = torch.cat((weight, weight[:, -1:].expand(-1, missing)), dim=1) if missing else weight
    return padded.view(len(weight), -1, form.group)


def _half_scales(scales: torch.Tensor) -> torch.Tensor:
    return scales.clamp(SMALLEST_SCALE, torch.finfo(torch.float16).max).half()


def _matrix(
    form: QuantizedForm, weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None
) -> QuantizedMatrix:
    flat = values.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous()
    return QuantizedMatrix(form, flat, scales.squeeze(-1), None if mins is None else mins.squeeze(-1))


def unpermute_rope(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows ordered for interleaved rotary pairs -> Hugging Face's halves. `weight` [num_heads · D, ...].

    In each head, rows 0, 2, 4, … become the first half and rows 1, 3, 5, … the second.
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
