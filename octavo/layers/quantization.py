"""Weights as files store them, turned into dense tensors: GGUF block types, plain floats, GGUF's order of rotary rows.

Works on bytes and shapes; knows neither files nor models. Block layouts: ggml's `ggml-common.h`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from octavo.errors import CheckpointError
from octavo.kernels.ops import INT8_GROUP

__all__ = ["SUPPORTED_TYPES", "dequantize", "quantize_int8", "read_q8_0", "unpermute_rope"]

CHUNK_VALUES = 1 << 16
"""Values converted at a time: intermediates of 256 KiB stay in a core's cache, whatever the tensor."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How `block_size` values lie in `block_bytes` bytes. `decode` turns [blocks, block_bytes] uint8 into
    [blocks, block_size] of any float type that holds every value exactly."""

    block_size: int
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as [blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 16] -> [blocks, 32] float32 from 0 to 15: the low halves are the first 16 values."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=1).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8.0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """[blocks, bytes] -> [blocks, bytes · 8 / width] uint8: each run of bytes gives its lowest fields of `width` bits,
    then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1)
    runs = packed.unflatten(1, (-1, 1, run))
    return (runs >> shifts & (1 << width) - 1).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 4] -> [blocks, 32]: 16 where the bit is set, the lowest bit of the first byte first."""
    return _fields(packed, 1, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (values.float() - 16.0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _scaled(values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """values [blocks, 256] and a scale (and minimum) for each group of them, [blocks, groups] -> [blocks, 256]."""
    grouped = scales.unsqueeze(-1) * values.float().unflatten(1, (scales.shape[1], -1))
    return (grouped if minimums is None else grouped - minimums.unsqueeze(-1)).flatten(1)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = (blocks[:, :16] & 0x0F).float(), (blocks[:, :16] >> 4).float()
    return _scaled(_fields(blocks[:, 16:80], 2, 32), _half(blocks, 80) * scales, _half(blocks, 82) * minimums)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    values = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return _scaled(values.float() - 4.0, _half(blocks, 108) * (scales.float() - 32.0))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, 12] -> scales and minimums, [blocks, 8] float32 from 0 to 63: the lower six bits of the first eight
    bytes are the first four of each; the last four have their lower four bits in the last four bytes."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 0x3F, third & 0x0F | first >> 2 & 0x30), dim=1)
    minimums = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=1)
    return scales.float(), minimums.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = _k_scales(blocks[:, 4:16])
    return _scaled(_fields(blocks[:, 16:], 4, 32), _half(blocks, 0) * scales, _half(blocks, 2) * minimums)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minimums = _k_scales(blocks[:, 4:16])
    values = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _scaled(values, _half(blocks, 0) * scales, _half(blocks, 2) * minimums)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    values = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(values.float() - 32.0, _half(blocks, 208) * scales)


BLOCK_TYPES = {
    "F32": BlockType(1, 4, lambda blocks: blocks.view(torch.float32)),
    "F16": BlockType(1, 2, lambda blocks: blocks.view(torch.float16)),
    "BF16": BlockType(1, 2, lambda blocks: blocks.view(torch.bfloat16)),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}
SUPPORTED_TYPES = tuple(BLOCK_TYPES)


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
    block_type = BLOCK_TYPES.get(dtype_name)
    if block_type is None:
        raise CheckpointError(
            f"{name} is stored as {dtype_name}, which can't be computed with; supported are {', '.join(BLOCK_TYPES)}."
        )
    num_blocks = math.prod(shape) // block_type.block_size
    assert data.size == num_blocks * block_type.block_bytes, (name, data.size, shape, dtype_name)
    blocks = data.reshape(num_blocks, block_type.block_bytes)
    out = torch.empty((num_blocks, block_type.block_size), dtype=out_dtype)
    step = CHUNK_VALUES // block_type.block_size
    for start in range(0, num_blocks, step):
        chunk = torch.from_numpy(blocks[start : start + step].copy())  # torch takes no read-only memory
        out[start : start + step] = block_type.decode(chunk)
    return out.view(shape)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] float32 -> values [N, K] int8 and scales [N, ceil(K / INT8_GROUP)] float32: in each group the
    largest magnitude becomes 127, the others are rounded to the nearest."""
    num_rows, num_cols = weight.shape
    groups = F.pad(weight, (0, -num_cols % INT8_GROUP)).view(num_rows, -1, INT8_GROUP)
    scales = groups.abs().amax(dim=-1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    values = (groups * inverse.unsqueeze(-1)).round().to(torch.int8)
    return values.view(num_rows, -1)[:, :num_cols].contiguous(), scales


def read_q8_0(data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and scales that Q8_0 blocks hold, as `quantize_int8` gives them: the same weights, exactly."""
    blocks = torch.from_numpy(data.reshape(-1, BLOCK_TYPES["Q8_0"].block_bytes).copy())
    values = blocks[:, 2:].contiguous().view(torch.int8)
    return values.view(shape), _half(blocks, 0).view(shape[0], -1)


def unpermute_rope(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows ordered for interleaved rotary pairs -> Hugging Face's halves. `weight` [num_heads · D, ...].

    In each head, rows 0, 2, 4, … become the first half and rows 1, 3, 5, … the second.
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
