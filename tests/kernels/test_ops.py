"""Every op of every provider, on every dtype and on odd sizes, against float64."""

import inspect

import pytest
import torch

from octavo.devices.cpu.ops import CpuOps
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm
from tests.kernels.expected import (
    Expected,
    KVInputs,
    assert_within,
    expected_add_layer_norm,
    expected_attention,
    expected_gelu,
    expected_gelu_tanh_mul,
    expected_l2_normalize,
    expected_linear,
    expected_linear_int8,
    expected_mean,
    expected_rms_norm,
    expected_rotation,
    expected_silu_mul,
    random_quantized,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED_CACHES = [torch.int8, torch.float8_e4m3fn]
FORMS = [
    QuantizedForm(bits, group, zero, has_mins, dtype)
    for bits, zeros in ((4, (0, 8)), (8, (16, 128)))
    for group, dtype in ((32, torch.float16), (32, torch.float32), (16, torch.float32))
    for zero, has_mins in zip(zeros, (True, False), strict=True)
]
INT8 = QuantizedForm(8, 32, 128, False, torch.float16)
MATRICES = [(1, 1, 1), (1, 576, 960), (2, 33, 50), (5, 7, 17), (8, 64, 48), (13, 100, 31), (70, 48, 100)]  # M, K, N


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exact(value: torch.Tensor) -> Expected:
    return Expected(value.double(), torch.zeros_like(value, dtype=torch.float64))


def test_the_native_provider_overrides_every_op() -> None:
    public = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
    assert public <= vars(CpuOps).keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", MATRICES)
def test_linear(ops: Ops, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    num_tokens, num_cols, num_rows = size
    weight = torch.randn(num_rows, num_cols).to(dtype)
    packed = ops.pack(weight)
    for x_dtype, out_dtype in ((dtype, dtype), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        x = torch.randn(num_tokens, num_cols).to(x_dtype)
        for bias in (None, torch.randn(num_rows)):
            y = ops.linear(x, packed, bias, out_dtype)
            assert y.dtype == out_dtype
            assert_within(y, expected_linear(x, weight, bias))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 576, 70), (2, 33, 50), (13, 100, 31), (65, 48, 100)])
def test_linear_over_quantised_weights(ops: Ops, form: QuantizedForm, size: tuple[int, int, int]) -> None:
    num_tokens, num_cols, num_rows = size
    matrix = random_quantized(form, num_rows, num_cols)
    packed, weight_only = ops.pack_quantized(matrix), ops.pack_quantized(matrix, int8_activations=False)
    for dtype, out_dtype, bias in (
        (torch.float32, torch.float32, torch.randn(num_rows)),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.float32, None),
    ):
        x = torch.randn(num_tokens, num_cols).to(dtype)
        y = ops.linear(x, packed, bias, out_dtype)
        assert y.dtype == out_dtype
        assert_within(y, expected_linear_int8(x, matrix, bias))
        y = ops.linear(x, weight_only, bias, out_dtype)
        assert y.dtype == out_dtype
        assert_within(y, expected_linear(x, matrix.dequantized(), bias))


def test_activations_that_eight_bits_hold_are_multiplied_as_they_are(ops: Ops) -> None:
    x = torch.randint(-127, 128, (9, 3, 32)).float()
    x[:, :, 5] = 127.0  # so that a step is the power of two below
    x = (x * 2.0 ** torch.randint(-20, 20, (9, 3, 1))).view(9, 96)
    x[2, 32:64] = 0.0
    for form in FORMS:
        matrix = random_quantized(form, 50, 96)
        actual = ops.linear(x, ops.pack_quantized(matrix), None, torch.float32)
        shift = torch.zeros(1) if matrix.mins is None else matrix.mins.abs().amax()
        expected = expected_linear(x, matrix.dequantized(), None)
        terms = expected_linear(x.abs(), matrix.dequantized().abs() + 2 * shift, None).error
        assert_within(actual, Expected(expected.value, terms))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -(2.0**111)])
def test_a_row_that_eight_bits_cannot_hold_is_nan_and_no_other_is(ops: Ops, bad: float) -> None:
    for form in (INT8, FORMS[0]):
        packed = ops.pack_quantized(random_quantized(form, 40, 70))
        x = torch.randn(4, 70)
        clean = ops.linear(x, packed, None, torch.float32)
        x[2, 69] = bad
        y = ops.linear(x, packed, None, torch.float32)
        assert y[2].isnan().all()
        assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_cols", [1, 17, 64, 80])
def test_embedding_of_quantised_weights_is_exact(ops: Ops, form: QuantizedForm, num_cols: int) -> None:
    matrix = random_quantized(form, 37, num_cols)
    token_ids = torch.randint(0, 37, (23,), dtype=torch.int32)
    actual = ops.embedding(token_ids, ops.pack_quantized(matrix))
    assert torch.equal(actual, matrix.dequantized()[token_ids.long()])


def test_a_form_that_the_kernels_lack_is_refused() -> None:
    with pytest.raises(ValueError, match="don't have the form"):
        CpuOps().pack_quantized(random_quantized(QuantizedForm(8, 16, 0, False, torch.float16), 16, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_cols", [1, 17, 64])
def test_embedding(ops: Ops, dtype: torch.dtype, num_cols: int) -> None:
    weight = torch.randn(37, num_cols).to(dtype)
    ids = torch.tensor([36, 0, 15, 16, 0], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack(weight)), weight[ids.long()].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (3, 16), (2, 100), (65, 576)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, weight = torch.randn(size) * 3, torch.randn(size[1])
    y = ops.rms_norm(x, weight, 1e-5, dtype)
    assert y.dtype == dtype
    assert_within(y, expected_rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (3, 16), (2, 100), (65, 576)])
def test_add_rms_norm(ops: Ops, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(size).to(dtype), torch.randn(size), torch.randn(size[1])
    total = residual + x.float()
    y = ops.add_rms_norm(x, residual, weight, 1e-5, dtype)
    assert torch.equal(residual, total)
    assert_within(y, expected_rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (3, 16), (2, 100), (65, 384)])
def test_add_layer_norm(ops: Ops, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual = torch.randn(size).to(dtype), torch.randn(size) * 3 + 5
    weight, bias = torch.randn(size[1]), torch.randn(size[1])
    expected = expected_add_layer_norm(x, residual, weight, bias, 1e-12)
    y = ops.add_layer_norm(x, residual, weight, bias, 1e-12, dtype)
    assert y.dtype == dtype
    assert torch.equal(y, residual.to(dtype))
    assert y.data_ptr() != residual.data_ptr()
    assert_within(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_over_the_whole_range(ops: Ops, dtype: torch.dtype) -> None:
    """Relative accuracy in the left tail too, where 1 + erf would have lost it."""
    ends = torch.tensor([-1e30, -50.0, 50.0, 1e30]) if dtype != torch.float16 else torch.tensor([-5e4, 5e4])
    x = torch.cat((torch.linspace(-14, 14, 9999), torch.linspace(-1e-3, 1e-3, 999), torch.zeros(1), ends)).to(dtype)
    assert_within(ops.gelu(x.unsqueeze(0)), expected_gelu(x.unsqueeze(0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 17, 384])
def test_mean_rows_and_l2_normalize(ops: Ops, dtype: torch.dtype, hidden_size: int) -> None:
    sizes = [1, 40, 2, 300]
    x = (torch.randn(sum(sizes), hidden_size) + 1).to(dtype)
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    means = ops.mean_rows(x, starts)
    for mean, rows in zip(means, x.split(sizes), strict=True):
        assert_within(mean, expected_mean(rows))
    assert_within(ops.l2_normalize(x), expected_l2_normalize(x))
    assert torch.count_nonzero(ops.l2_normalize(torch.zeros(3, hidden_size, dtype=dtype))) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 16), (12, 32), (3, 64), (2, 48), (1, 256)])
def test_encoder_attention(ops: Ops, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    sizes = [1, 33, 16, 530, 2]  # one longer than a partition
    num_heads, head_dim = heads
    qkv = torch.randn(sum(sizes), 3 * num_heads * head_dim).to(dtype)
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    out = ops.encoder_attention(qkv, starts, num_heads, head_dim**-0.5)
    assert out.dtype == dtype
    for rows, result in zip(qkv.split(sizes), out.split(sizes), strict=True):
        q, k, v = rows.view(-1, 3, num_heads, head_dim).unbind(1)
        assert_within(result, expected_attention(q, k, v, head_dim**-0.5, 0, causal=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (3, 17), (33, 1536)])
def test_silu_mul(ops: Ops, dtype: torch.dtype, size: tuple[int, int]) -> None:
    gate_up = (torch.randn(size[0], 2 * size[1]) * 5).to(dtype)
    assert_within(ops.silu_mul(gate_up), expected_silu_mul(gate_up))


def test_silu_mul_over_the_whole_range_of_exp(ops: Ops) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 9999), torch.linspace(-1e-3, 1e-3, 999)))
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    assert_within(ops.silu_mul(gate_up), expected_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (3, 17), (33, 2048)])
def test_gelu_tanh_mul(ops: Ops, dtype: torch.dtype, size: tuple[int, int]) -> None:
    gate_up = (torch.randn(size[0], 2 * size[1]) * 3).to(dtype)
    assert_within(ops.gelu_tanh_mul(gate_up), expected_gelu_tanh_mul(gate_up))


def test_gelu_tanh_mul_over_the_whole_range(ops: Ops) -> None:
    """Relative accuracy in the left tail too, where 1 + tanh would have lost it."""
    gate = torch.cat((torch.linspace(-12, 12, 9999), torch.linspace(-1e-3, 1e-3, 999), torch.tensor([-1e30, 1e30])))
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    assert_within(ops.gelu_tanh_mul(gate_up), expected_gelu_tanh_mul(gate_up))


def test_scale(ops: Ops) -> None:
    x = torch.randn(33, 640)
    assert torch.equal(ops.scale(x, 25.25), x * 25.25)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
def test_gather_rows(ops: Ops, dtype: torch.dtype) -> None:
    x = (torch.randn(9, 37) * 100).to(dtype)
    indices = torch.tensor([8, 0, 0, 3], dtype=torch.int32)
    assert torch.equal(ops.gather_rows(x, indices), x[indices.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_rope_rotates_queries(ops: Ops, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> None:
    num_tokens, num_heads, num_kv_heads = 21, 3, 1
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    positions = torch.arange(num_tokens, dtype=torch.int32).flip(0)
    cos_sin = torch.randn(num_tokens, head_dim)
    cache = torch.zeros(ops.kv_cache_shape(3, 16, num_kv_heads, head_dim, cache_dtype), dtype=cache_dtype)
    slots = torch.arange(num_tokens, dtype=torch.int32) + 16
    q = ops.rope_write_kv(heads.flatten(1), positions, cos_sin, cache, slots, num_heads, num_kv_heads)
    assert q.dtype == dtype
    assert_within(q, expected_rotation(heads[:, :num_heads], cos_sin[positions.long()]))
    assert torch.count_nonzero(cache[0]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 256])
def test_rope_norms_queries_and_keys_first(ops: Ops, dtype: torch.dtype, head_dim: int) -> None:
    """Queries against their norm in float64, rotated; keys against queries that are the same heads."""
    num_tokens = 21
    heads = (torch.randn(num_tokens, 1, head_dim) * 5).to(dtype)
    q_norm, cos_sin = torch.randn(head_dim), torch.randn(num_tokens, head_dim)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    cache = torch.zeros(ops.kv_cache_shape(2, 16, 1, head_dim, torch.float32))
    qkv = heads.repeat(1, 3, 1).flatten(1)
    q = ops.rope_write_kv(qkv, positions, cos_sin, cache, positions, 1, 1, q_norm, q_norm, 1e-6)
    normed = expected_rms_norm(heads.flatten(0, 1), q_norm, 1e-6)
    rotated = expected_rotation(normed.value.unsqueeze(1), cos_sin)
    first, second = normed.error.chunk(2, dim=-1)
    cos, sin = cos_sin.abs().double().chunk(2, dim=-1)
    moved = torch.cat((first * cos + second * sin, second * cos + first * sin), dim=-1).unsqueeze(1)
    assert_within(q, Expected(rotated.value, rotated.error + moved))
    plain = torch.zeros_like(cache)
    as_key = torch.cat((heads, q, heads), dim=1).flatten(1)
    unrotated = torch.cat((torch.ones(num_tokens, head_dim // 2), torch.zeros(num_tokens, head_dim // 2)), dim=1)
    ops.rope_write_kv(as_key, positions, unrotated, plain, positions, 1, 1)
    if dtype == torch.float32:
        assert torch.equal(cache, plain)


def test_rope_rotates_keys_as_queries(ops: Ops) -> None:
    """One query head equal to the one key head: attention over a single token gives its value, its score q·k = |q|²."""
    num_tokens, head_dim = 20, 32
    head = torch.randn(num_tokens, 1, head_dim)
    value = torch.randn(num_tokens, 1, head_dim)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    angle = torch.outer(torch.arange(num_tokens), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    cache = torch.zeros(ops.kv_cache_shape(2, 32, 1, head_dim, torch.float32))
    q = ops.rope_write_kv(torch.cat((head, head, value), 1).flatten(1), positions, cos_sin, cache, positions, 1, 1)
    table, starts = torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, num_tokens], dtype=torch.int32)
    out = ops.paged_attention(q, cache, table, starts, torch.tensor([num_tokens], dtype=torch.int32), 1.0, 0)
    rotated = expected_rotation(head, cos_sin).value.float()
    inputs = KVInputs([num_tokens], [num_tokens], [rotated], [rotated], [value], 32, 1.0, 0)
    assert_within(out, inputs.expected(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1, 16), (6, 2, 32), (9, 3, 64), (5, 5, 48), (24, 2, 16), (4, 1, 256)])
def test_paged_attention(ops: Ops, dtype: torch.dtype, cache_dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    for window in (0, 7, 40):
        inputs = KVInputs.random([1, 33, 100, 16], [1, 9, 1, 16], *heads, dtype, window=window)
        out = inputs.attend(ops, inputs.cache(ops, cache_dtype))
        assert out.dtype == dtype
        assert_within(out, inputs.expected(cache_dtype))


@pytest.mark.parametrize("cache_dtype", QUANTIZED_CACHES)
@pytest.mark.parametrize("heads", [(1, 1, 16), (9, 3, 64), (5, 5, 48)])
def test_paged_attention_over_a_quantised_cache(
    ops: Ops, cache_dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    """A request of one token gives its value as the cache has it."""
    for dtype in DTYPES:
        for window in (0, 7):
            inputs = KVInputs.random([1, 33, 100, 16], [1, 9, 1, 16], *heads, dtype, window=window)
            assert_within(inputs.attend(ops, inputs.cache(ops, cache_dtype)), inputs.expected(cache_dtype))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, *QUANTIZED_CACHES])
@pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 192, 256])
def test_paged_attention_of_every_head_size(ops: Ops, cache_dtype: torch.dtype, head_dim: int) -> None:
    inputs = KVInputs.random([50, 20], [3, 1], 4, 2, head_dim, torch.bfloat16, window=33)
    assert_within(inputs.attend(ops, inputs.cache(ops, cache_dtype)), inputs.expected(cache_dtype))


@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTIZED_CACHES])
@pytest.mark.parametrize("window", [0, 300, 600])
def test_paged_attention_across_partitions(ops: Ops, window: int, cache_dtype: torch.dtype) -> None:
    inputs = KVInputs.random([1100, 513, 512], [1, 3, 20], 4, 2, 16, torch.float32, block_size=32, window=window)
    assert_within(inputs.attend(ops, inputs.cache(ops, cache_dtype)), inputs.expected(cache_dtype))


@pytest.mark.parametrize("cache_dtype", QUANTIZED_CACHES)
def test_keys_and_values_of_any_magnitude_are_quantised_each_by_its_own(ops: Ops, cache_dtype: torch.dtype) -> None:
    inputs = KVInputs.random([40], [4], 2, 2, 32, torch.float32)
    inputs.keys[0].mul_(torch.logspace(-30, 0, 40).view(-1, 1, 1))
    inputs.values[0].mul_(torch.logspace(4, -4, 40).view(-1, 1, 1))
    inputs.values[0][7, 1] = 0.0
    assert_within(inputs.attend(ops, inputs.cache(ops, cache_dtype)), inputs.expected(cache_dtype))


def test_paged_attention_with_scores_far_apart(ops: Ops) -> None:
    """Weights between e^-200 and 1: nothing overflows, and what underflows is zero."""
    inputs = KVInputs.random([600], [4], 2, 1, 16, torch.float32)
    inputs.keys[0].mul_(torch.linspace(-60, 60, 600).view(-1, 1, 1))
    assert_within(inputs.attend(ops, inputs.cache(ops, torch.float32)), inputs.expected(torch.float32))


def test_no_tokens_give_no_rows(ops: Ops) -> None:
    packed = ops.pack(torch.randn(20, 8))
    assert ops.linear(torch.empty(0, 8), packed, None, torch.float32).shape == (0, 20)
    assert ops.embedding(torch.empty(0, dtype=torch.int32), packed).shape == (0, 8)
    assert ops.gather_rows(torch.randn(4, 3), torch.empty(0, dtype=torch.int32)).shape == (0, 3)
    assert ops.silu_mul(torch.empty(0, 8)).shape == (0, 4)
