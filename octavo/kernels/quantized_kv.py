"""Keys and values in eight bits: how a vector of one head is rounded, and its row of bytes in the reference's cache.

Knows neither blocks nor attention.
"""

import torch

__all__ = ["KV_SCALE_BYTES", "LARGEST_QUANTIZED", "cache_rows", "quantize_kv", "read_rows"]

LARGEST_QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest magnitude of a key or a value becomes in a KV cache of these types."""

KV_SCALE_BYTES = 4
"""Of the float32 scale that each key and each value of a head has in such a cache."""


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] float -> values [..., D] dtype and scales [..., 1] float32: the largest magnitude becomes that of
    LARGEST_QUANTIZED, the others are rounded to the nearest. A row with a NaN or an infinity gets a NaN for a scale.
    """
    most = LARGEST_QUANTIZED[dtype]
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 2.0**-118, largest.new_tensor(most) / largest, 0.0)
    scaled = x.double() * inverse
    scaled = scaled.round() if dtype == torch.int8 else scaled.float()
    return scaled.nan_to_num(0.0, 0.0, 0.0).to(dtype), torch.where(largest.isfinite(), largest / most, torch.nan)


def cache_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., D] float32 as a cache of dtype stores it: [..., bytes] uint8."""
    if dtype not in LARGEST_QUANTIZED:
        return x.to(dtype).view(torch.uint8)
    values, scales = quantize_kv(x, dtype)
    return torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def read_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [..., D] float32 of what `cache_rows` gave."""
    if dtype not in LARGEST_QUANTIZED:
        return rows.view(dtype).float()
    values, scales = rows[..., :-KV_SCALE_BYTES].view(dtype), rows[..., -KV_SCALE_BYTES:].contiguous()
    return values.float() * scales.view(torch.float32)
