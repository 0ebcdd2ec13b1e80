"""What an op's result may be: exact values in float64 with an error bound an element, and inputs to compute them from.

A bound is the sum of what a provider may lose: float32 rounding of each step, in proportion to the magnitudes that went
in, and one rounding to the result's dtype. It holds for any order of additions, so it knows no provider.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.kernels.ops import QUANT_BLOCK, Ops
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.kernels.quantized_kv import LARGEST_QUANTIZED, quantize_kv

__all__ = [
    "Expected",
    "KVInputs",
    "assert_within",
    "expected_add_layer_norm",
    "expected_attention",
    "expected_gelu",
    "expected_gelu_tanh_mul",
    "expected_l2_normalize",
    "expected_linear",
    "expected_linear_int8",
    "expected_mean",
    "expected_rms_norm",
    "expected_rotation",
    "expected_silu_mul",
    "random_quantized",
]

FLOAT32_ROUNDING = 2.0**-24
DTYPE_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance between neighbours, relative to the value."""
HALF_WORD = 0.5 / 32767 * (1 + 2.0**-12)
"""Half a step of numbers rounded to 16 bits, whose largest magnitude is 1."""
SMALLEST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}
"""What may be lost near zero: flushed denormals, or half of float16's smallest step."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The exact result, float64, and how far from it each element may lie before it is rounded to the op's dtype."""

    value: torch.Tensor
    error: torch.Tensor


def assert_within(actual: torch.Tensor, expected: Expected) -> None:
    """Raise unless every element of `actual` lies within the bound, given its own dtype."""
    assert actual.shape == expected.value.shape, (actual.shape, expected.value.shape)
    rounding = DTYPE_ROUNDING[actual.dtype]
    allowed = expected.error + rounding * (expected.value.abs() + expected.error) + SMALLEST[actual.dtype]
    excess = (actual.double() - expected.value).abs() / allowed
    worst = excess.flatten().argmax()
    if not excess.flatten()[worst] <= 1.0:
        got, wanted = actual.flatten()[worst].item(), expected.value.flatten()[worst].item()
        raise AssertionError(f"{got} instead of {wanted}: {excess.max().item():.3g} times the error allowed")


def chain_error(length: int) -> float:
    """Relative error of a sum of `length` products, as a multiple of Σ|terms|: roundings partly cancel, so √length."""
    return (4 + 2 * math.sqrt(length)) * FLOAT32_ROUNDING


def expected_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Expected:
    x, weight = x.double(), weight.double()
    value, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    return Expected(value, magnitude * chain_error(x.shape[1]))


def expected_linear_int8(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> Expected:
    """An activation may move by half a step of its block, on top of what `expected_linear` allows of the larger terms
    that a weight is the difference of."""
    num_tokens, num_cols = x.shape
    weight = matrix.dequantized().double()
    blocks = F.pad(x.double(), (0, -num_cols % QUANT_BLOCK)).view(num_tokens, -1, QUANT_BLOCK)
    half_steps = blocks.abs().amax(dim=-1).repeat_interleave(QUANT_BLOCK, dim=1)[:, :num_cols] / 254
    exact = expected_linear(x, weight, bias)
    mins = torch.zeros(1) if matrix.mins is None else matrix.mins
    terms = weight.abs() + 2 * mins.abs().double().amax()
    moved = half_steps * (1 + 2.0**-20) @ weight.abs().T
    return Expected(
        exact.value, exact.error + moved + (x.double().abs() + half_steps) @ terms.T * chain_error(num_cols)
    )


def random_quantized(form: QuantizedForm, num_rows: int, num_cols: int) -> QuantizedMatrix:
    """Every value that a form can hold, with scales of few enough bits."""
    shape = (num_rows, -(-num_cols // form.group))
    values = torch.randint(0, 1 << form.bits, (num_rows, num_cols), dtype=torch.uint8)
    scales = (torch.rand(shape) * 0.02).half().to(form.scale_dtype)
    mins = (torch.randn(shape) * 0.1).to(form.scale_dtype) if form.has_mins else None
    return QuantizedMatrix(form, values, scales, mins)


def expected_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Expected:
    x = x.double()
    value = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()
    return Expected(value, value.abs() * chain_error(x.shape[1]))


def expected_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Expected:
    total = (residual + x.float()).double()
    mean, size = total.mean(dim=-1, keepdim=True), total.shape[1]
    centered = total - mean
    scale = 1.0 / (centered.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    centered_error = (total.abs().mean(dim=-1, keepdim=True) + total.abs()) * chain_error(size)
    relative_error = chain_error(size) + centered_error.square().mean(dim=-1, keepdim=True).sqrt() * scale
    norm_error = centered_error * scale + (centered * scale).abs() * relative_error
    value = centered * scale * weight.double() + bias.double()
    return Expected(value, norm_error * weight.double().abs() + (value.abs() + bias.double().abs()) * FLOAT32_ROUNDING)


def expected_gelu(x: torch.Tensor) -> Expected:
    x = x.double()
    value = x * 0.5 * torch.erfc(-x * 0.5**0.5)
    return Expected(value, value.abs() * (8 + 2 * x.square()) * FLOAT32_ROUNDING + x.abs() * 2.0**-126)


def expected_mean(x: torch.Tensor) -> Expected:
    """Of the rows x [n, H]."""
    x = x.double()
    return Expected(x.mean(dim=0), x.abs().mean(dim=0) * chain_error(x.shape[0]))


def expected_l2_normalize(x: torch.Tensor) -> Expected:
    x = x.double()
    value = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return Expected(value, value.abs() * chain_error(x.shape[1]))


def expected_silu_mul(gate_up: torch.Tensor) -> Expected:
    gate, up = gate_up.double().chunk(2, dim=-1)
    value = gate * torch.sigmoid(gate) * up
    beyond_float32 = (gate * up).abs() * 2.0**-127  # lost where e^-gate is infinite
    return Expected(value, value.abs() * 8 * FLOAT32_ROUNDING + beyond_float32)


def expected_gelu_tanh_mul(gate_up: torch.Tensor) -> Expected:
    gate, up = gate_up.double().chunk(2, dim=-1)
    exponent = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    value = gate * torch.sigmoid(exponent) * up
    beyond_float32 = (gate * up).abs() * 2.0**-126  # lost where e^-exponent is infinite
    return Expected(value, value.abs() * (8 + 6 * exponent.abs()) * FLOAT32_ROUNDING + beyond_float32)


def expected_rotation(heads: torch.Tensor, cos_sin: torch.Tensor) -> Expected:
    """heads [T, heads, D], cos_sin [T, D]: cosines, then sines."""
    first, second = heads.double().chunk(2, dim=-1)
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, dim=-1)
    value = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    first, second, cos, sin = first.abs(), second.abs(), cos.abs(), sin.abs()
    magnitude = torch.cat((first * cos + second * sin, second * cos + first * sin), dim=-1)
    return Expected(value, magnitude * 3 * FLOAT32_ROUNDING)


def in_cache(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of dtype holds of keys or values x [..., D], float64."""
    if dtype in DTYPE_ROUNDING:
        return x.to(dtype).double()
    values, scales = quantize_kv(x, dtype)
    return values.double() * scales.double()


def expected_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    causal: bool = True,
    words: bool = False,
) -> Expected:
    """q [Q, Hq, D]: the last Q positions of one request; keys, values [L, Hkv, D]. Result [Q, Hq · D].

    words: queries, and weights with values' scales, may be rounded to 16 bits, as `Ops.paged_attention` says.
    """
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    query = q.double().transpose(0, 1)  # [Hq, Q, D]
    key = keys.double().transpose(0, 1).repeat_interleave(group, dim=0)  # [Hq, L, D]
    value = values.double().transpose(0, 1).repeat_interleave(group, dim=0)
    distance = torch.arange(length - num_queries, length).unsqueeze(1) - torch.arange(length)
    hidden = (distance < 0) & causal
    if window > 0:
        hidden |= distance >= window
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    query_error = query.abs() * chain_error(head_dim)
    if words:
        query_error = query_error + query.abs().amax(dim=-1, keepdim=True) * HALF_WORD
    score_error = (query_error @ key.abs().transpose(1, 2) * abs(scale)).masked_fill(hidden, 0.0)
    score_error = score_error.amax(dim=-1, keepdim=True)  # moves each weight by this much
    magnitude = weights @ value.abs()
    error = magnitude * (2 * score_error + 2 * chain_error(length))
    if words:  # a weight moves by half a step of the largest one, in terms of values scaled to 1
        value_scale = value.abs().amax(dim=-1, keepdim=True)
        largest = (weights * value_scale.transpose(1, 2)).amax(dim=-1, keepdim=True)
        error += largest * HALF_WORD * (~hidden).double() @ (value.abs() / value_scale.clamp_min(1e-300))
    return Expected(flatten_heads(weights @ value), flatten_heads(error))


def flatten_heads(x: torch.Tensor) -> torch.Tensor:
    """[heads, Q, D] -> [Q, heads · D]"""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


@dataclass(frozen=True, slots=True)
class KVInputs:
    """A batch of requests for `paged_attention`, whose keys and values can be written to any provider's cache.

    lengths: each request's tokens; num_queries: how many of them, the last ones, have queries in this step.
    """

    lengths: list[int]
    num_queries: list[int]
    q: list[torch.Tensor]  # a request: [length, Hq, D], of which the last num_queries are asked for
    keys: list[torch.Tensor]  # a request: [length, Hkv, D]
    values: list[torch.Tensor]
    block_size: int
    scale: float
    window: int

    @staticmethod
    def random(
        lengths: list[int],
        num_queries: list[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        window: int = 0,
        seed: int = 0,
    ) -> "KVInputs":
        rng = torch.Generator().manual_seed(seed)

        def heads(count: int) -> list[torch.Tensor]:
            return [torch.randn(length, count, head_dim, generator=rng).to(dtype) for length in lengths]

        q, keys, values = heads(num_heads), heads(num_kv_heads), heads(num_kv_heads)
        return KVInputs(lengths, num_queries, q, keys, values, block_size, head_dim**-0.5, window)

    @property
    def blocks_per_request(self) -> int:
        return -(-max(self.lengths) // self.block_size)

    def block_table(self) -> torch.Tensor:
        """Requests' blocks interleaved, from block 1 on: block 0 is the null block."""
        count = len(self.lengths)
        blocks = 1 + torch.arange(self.blocks_per_request * count, dtype=torch.int32)
        return blocks.view(self.blocks_per_request, count).T.contiguous()

    def cache(self, ops: Ops, dtype: torch.dtype, fill: float = 0.0) -> torch.Tensor:
        """A cache full of `fill`, then with all keys and values written to it, unrotated. A quantised one is full of
        NaN where `fill` is not 0."""
        num_kv_heads, head_dim = self.keys[0].shape[1:]
        num_blocks = 1 + self.blocks_per_request * len(self.lengths)
        shape = ops.kv_cache_shape(num_blocks, self.block_size, num_kv_heads, head_dim, dtype)
        if dtype in LARGEST_QUANTIZED and fill != 0.0:
            cache = torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)  # whose scales are NaN
        else:
            cache = torch.full(shape, fill, dtype=dtype)
        unrotated = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1)
        table = self.block_table()
        for r, length in enumerate(self.lengths):
            position = torch.arange(length)
            slots = table[r, position // self.block_size] * self.block_size + (position % self.block_size)
            kv = torch.cat((self.keys[r], self.values[r]), dim=1).flatten(1).contiguous()
            zeros = torch.zeros(length, dtype=torch.int32)
            ops.rope_write_kv(kv, zeros, unrotated, cache, slots.to(torch.int32), 0, num_kv_heads)
        return cache

    def attend(self, ops: Ops, cache: torch.Tensor, block_table: torch.Tensor | None = None) -> torch.Tensor:
        """One call for all requests: [Σ num_queries, Hq · D]."""
        rows = [q[length - count :] for q, length, count in zip(self.q, self.lengths, self.num_queries, strict=True)]
        starts = torch.tensor([0, *self.num_queries]).cumsum(0).to(torch.int32)
        table = self.block_table() if block_table is None else block_table
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return ops.paged_attention(torch.cat(rows), cache, table, starts, lengths, self.scale, self.window)

    def expected(self, cache_dtype: torch.dtype) -> Expected:
        """Of `attend`, with keys and values as rounded to the cache's dtype."""
        parts = [
            expected_attention(
                self.q[r][length - self.num_queries[r] :],
                in_cache(self.keys[r], cache_dtype),
                in_cache(self.values[r], cache_dtype),
                self.scale,
                self.window,
                words=cache_dtype == torch.int8,
            )
            for r, length in enumerate(self.lengths)
        ]
        return Expected(torch.cat([p.value for p in parts]), torch.cat([p.error for p in parts]))
