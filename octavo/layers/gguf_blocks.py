"""GGUF's block types: how values, scales and minima lie in a block. Layouts: ggml's `ggml-common.h`.

Every reader turns blocks [num_blocks, block_bytes] uint8 into what `QuantizedMatrix` is made of. Knows no tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kernels.quantized import QuantizedForm

__all__ = ["FLOAT_TYPES", "QUANTIZED_TYPES", "BlockType", "Blocks"]

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""values [num_blocks, block_size] uint8; scales [num_blocks, block_size / group] and, where there are any, minima, both
of the form's scale_dtype."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How `block_size` values lie in `block_bytes` bytes, and the form that they have."""

    block_size: int
    block_bytes: int
    form: QuantizedForm
    read: Callable[[torch.Tensor], Blocks]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """[blocks, bytes] -> [blocks, bytes · 8 / width] uint8: each run of bytes gives its lowest fields of `width` bits,
    then the next ones."""
    runs = packed.reshape(len(packed), -1, run)
    return torch.stack([runs >> shift & (1 << width) - 1 for shift in range(0, 8, width)], dim=2).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 4] -> [blocks, 32]: 16 where the bit is set, the lowest bit of the first byte first."""
    return _fields(packed, 1, 1) << 4


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 2:], 4, 16), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None  # from signed to 128 more


def _q2_k(blocks: torch.Tensor) -> Blocks:
    scales, mins = (
        _half(blocks, 80).float() * (blocks[:, :16] & 0x0F),
        _half(blocks, 82).float() * (blocks[:, :16] >> 4),
    )
    return _fields(blocks[:, 16:80], 2, 32), scales, mins


def _q3_k(blocks: torch.Tensor) -> Blocks:
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    values = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return values, _half(blocks, 108).float() * (scales.float() - 32.0), None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of Q4_K and Q5_K, [blocks, 8] float32: two float16, each times eight integers of six bits.

    Of the twelve bytes the lower six bits of the first eight are the first four integers of each kind; the last four
    have their lower four bits in the last four bytes.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 0x3F, third & 0x0F | first >> 2 & 0x30), dim=1)
    mins = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=1)
    return _half(blocks, 0).float() * scales, _half(blocks, 2).float() * mins


def _q4_k(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 16:], 4, 32), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4, *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Blocks:
    values = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return values, _half(blocks, 208).float() * blocks[:, 192:208].contiguous().view(torch.int8), None


_HALF, _WIDE = torch.float16, torch.float32

QUANTIZED_TYPES = {
    "Q4_0": BlockType(32, 18, QuantizedForm(4, 32, 8, False, _HALF), _q4_0),
    "Q4_1": BlockType(32, 20, QuantizedForm(4, 32, 0, True, _HALF), _q4_1),
    "Q5_0": BlockType(32, 22, QuantizedForm(8, 32, 16, False, _HALF), _q5_0),
    "Q5_1": BlockType(32, 24, QuantizedForm(8, 32, 0, True, _HALF), _q5_1),
    "Q8_0": BlockType(32, 34, QuantizedForm(8, 32, 128, False, _HALF), _q8_0),
    "Q2_K": BlockType(256, 84, QuantizedForm(4, 16, 0, True, _WIDE), _q2_k),
    "Q3_K": BlockType(256, 110, QuantizedForm(4, 16, 4, False, _WIDE), _q3_k),
    "Q4_K": BlockType(256, 144, QuantizedForm(4, 32, 0, True, _WIDE), _q4_k),
    "Q5_K": BlockType(256, 176, QuantizedForm(8, 32, 0, True, _WIDE), _q5_k),
    "Q6_K": BlockType(256, 210, QuantizedForm(8, 16, 32, False, _WIDE), _q6_k),
}
"""A K type's scales are products of a float16 and a small integer: exact in float32, not in float16."""
