"""The native kernels' promise: a row's bits depend on that row alone, on every instruction set the same bits."""

from collections.abc import Callable

import pytest
import torch

from octavo.devices.cpu import ops as cpu
from octavo.devices.cpu.ops import CpuOps
from octavo.kernels.quantized import QuantizedForm
from tests.kernels.expected import KVInputs, random_quantized

FORMS = [
    QuantizedForm(4, 32, 8, False, torch.float16),
    QuantizedForm(4, 16, 0, True, torch.float32),
    QuantizedForm(8, 32, 0, True, torch.float16),
    QuantizedForm(8, 16, 32, False, torch.float32),
    QuantizedForm(8, 32, 128, False, torch.float16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHE_DTYPES = [*DTYPES, torch.int8, torch.float8_e4m3fn]
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def row_ops(ops: CpuOps, dtype: torch.dtype) -> dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
    """Ops on rows: the row's length, and the op on x [T, length] of dtype."""
    packed = ops.pack(torch.randn(70, 100).to(dtype))
    bias, norm, shift = torch.randn(70), torch.randn(100), torch.randn(100)
    quantized = {}
    for index, form in enumerate(FORMS):
        matrix = random_quantized(form, 70, 100)
        for int8 in (True, False):
            weight = ops.pack_quantized(matrix, int8_activations=int8)
            name = f"form {index}, {'int8' if int8 else 'weight-only'}"
            quantized[name] = (100, lambda x, weight=weight: ops.linear(x, weight, bias, dtype))
    return quantized | {
        "linear": (100, lambda x: ops.linear(x, packed, bias, dtype)),
        "rms_norm": (100, lambda x: ops.rms_norm(x.float(), norm, 1e-5, dtype)),
        "add_rms_norm": (100, lambda x: ops.add_rms_norm(x, x.float() * 3, norm, 1e-5, dtype)),
        "add_layer_norm": (100, lambda x: ops.add_layer_norm(x, x.float() * 3, norm, shift, 1e-5, dtype)),
        "l2_normalize": (100, ops.l2_normalize),
        "gelu": (101, ops.gelu),
        "silu_mul": (202, ops.silu_mul),
        "gelu_tanh_mul": (202, ops.gelu_tanh_mul),
        "scale": (101, lambda x: ops.scale(x.float(), 25.25)),
        "rope_write_kv with norms": (4 * 48, lambda x: rotated_queries(ops, x)),
    }


def rotated_queries(ops: CpuOps, x: torch.Tensor) -> torch.Tensor:
    """Of two query heads of 48, normed before; one key-value head."""
    norm, angles = torch.linspace(0.5, 2, 48), torch.linspace(-1, 1, 24).unsqueeze(0)
    cache = torch.zeros(ops.kv_cache_shape(-(-len(x) // 16), 16, 1, 48, torch.float32))
    slots, positions = torch.arange(len(x), dtype=torch.int32), torch.zeros(len(x), dtype=torch.int32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return ops.rope_write_kv(x, positions, cos_sin, cache, slots, 2, 1, norm, norm, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_equals_the_row_in_any_batch(native: CpuOps, dtype: torch.dtype) -> None:
    for name, (length, op) in row_ops(native, dtype).items():
        x = torch.randn(64, length).to(dtype)
        alone = torch.cat([op(row) for row in x.split(1)])
        for num_rows in range(1, 65):
            assert same_bits(op(x[:num_rows].clone()), alone[:num_rows]), (name, num_rows)
            assert same_bits(op(x[64 - num_rows :].clone()), alone[64 - num_rows :]), (name, num_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_thread_equals_two(native: CpuOps, dtype: torch.dtype) -> None:
    inputs = KVInputs.random([1500, 70, 3], [1, 70, 2], 4, 2, 32, dtype)
    caches = [inputs.cache(native, cache_dtype) for cache_dtype in (dtype, torch.int8)]
    attentions = [(1, lambda _, cache=cache: inputs.attend(native, cache)) for cache in caches]
    for length, op in [*row_ops(native, dtype).values(), *attentions]:
        x = torch.randn(200, length).to(dtype)
        cpu.set_num_threads(1)
        one = op(x)
        cpu.set_num_threads(2)
        for _ in range(3):
            assert same_bits(op(x), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_give_the_same_bits(dtype: torch.dtype) -> None:
    results = []
    before = cpu.isa()
    for isa in cpu.supported_isas():
        cpu.set_isa(isa)
        torch.manual_seed(0)
        ops = CpuOps()
        outs = [op(torch.randn(67, length).to(dtype)) for length, op in row_ops(ops, dtype).values()]
        inputs = KVInputs.random([700, 70, 3], [1, 70, 2], 6, 2, 48, dtype, window=600)
        caches = [inputs.cache(ops, cache_dtype) for cache_dtype in (dtype, torch.int8, torch.float8_e4m3fn)]
        starts = torch.tensor([0, 30, 67], dtype=torch.int32)
        x = torch.randn(67, 3 * 2 * 48).to(dtype)
        outs += [ops.encoder_attention(x, starts, 2, 0.3), ops.mean_rows(x, starts)]
        results.append([*outs, *caches, *(inputs.attend(ops, cache) for cache in caches)])
    cpu.set_isa(before)
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weight_only_products_are_those_of_the_unpacked_matrix(native: CpuOps, form: QuantizedForm) -> None:
    matrix = random_quantized(form, 70, 100)
    packed, unpacked = native.pack_quantized(matrix, int8_activations=False), native.pack(matrix.dequantized())
    x = torch.randn(19, 100)
    assert same_bits(native.linear(x, packed, None, torch.float32), native.linear(x, unpacked, None, torch.float32))


@pytest.mark.parametrize("window", [0, 50, 530])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_attention_in_chunks_equals_attention_at_once(
    native: CpuOps, window: int, group: int, cache_dtype: torch.dtype
) -> None:
    length = 600
    whole = KVInputs.random([length], [length], 2 * group, 2, 16, torch.bfloat16, window=window)
    cache = whole.cache(native, cache_dtype)
    expected = whole.attend(native, cache)
    for chunk in (1, 7, 64, 512):
        for end in {chunk, 17 * chunk, 511, 512, 513, length}:
            if not chunk <= end <= length:
                continue
            part = KVInputs([end], [chunk], [whole.q[0][:end]], whole.keys, whole.values, 16, whole.scale, window)
            assert same_bits(part.attend(native, cache), expected[end - chunk : end]), (chunk, end)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_attention_of_a_request_does_not_depend_on_the_batch(native: CpuOps, cache_dtype: torch.dtype) -> None:
    batch = KVInputs.random([40, 700, 1, 64, 513], [1, 5, 1, 64, 1], 9, 3, 32, torch.bfloat16)
    together = batch.attend(native, batch.cache(native, cache_dtype))
    start = 0
    for r, (length, count) in enumerate(zip(batch.lengths, batch.num_queries, strict=True)):
        one = KVInputs(
            [length], [count], [batch.q[r]], [batch.keys[r]], [batch.values[r]], 16, batch.scale, batch.window
        )
        assert same_bits(one.attend(native, one.cache(native, cache_dtype)), together[start : start + count])
        start += count


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoder_attention_and_mean_of_a_request_do_not_depend_on_the_batch(native: CpuOps, dtype: torch.dtype) -> None:
    sizes = [40, 1, 700, 64, 513, 17]
    qkv = torch.randn(sum(sizes), 3 * 4 * 32).to(dtype)
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    attended, means = native.encoder_attention(qkv, starts, 4, 0.2), native.mean_rows(qkv, starts)
    for part, rows, mean in zip(qkv.split(sizes), attended.split(sizes), means, strict=True):
        alone = torch.tensor([0, len(part)], dtype=torch.int32)
        assert same_bits(native.encoder_attention(part, alone, 4, 0.2), rows)
        assert same_bits(native.mean_rows(part, alone)[0], mean)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_attention_does_not_depend_on_the_block_size(native: CpuOps, window: int, cache_dtype: torch.dtype) -> None:
    results = []
    for block_size in (16, 32, 64):
        inputs = KVInputs.random([700, 33], [3, 33], 4, 2, 32, torch.float32, block_size=block_size, window=window)
        results.append(inputs.attend(native, inputs.cache(native, cache_dtype)))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_blocks_fallen_out_of_the_window_are_not_read(native: CpuOps, cache_dtype: torch.dtype) -> None:
    inputs = KVInputs.random([1200], [9], 4, 2, 32, torch.float32, window=100)
    cache = inputs.cache(native, cache_dtype, fill=NAN)
    present = inputs.attend(native, cache)
    table = inputs.block_table()
    first_seen = 1200 - 9 - 100 + 1
    table[0, : first_seen // 16] = -1
    assert not present.isnan().any()
    assert same_bits(inputs.attend(native, cache, table), present)


@pytest.mark.parametrize("stale", [NAN, float("inf")])
def test_what_lies_behind_a_request_in_its_last_block_is_not_read(native: CpuOps, stale: float) -> None:
    for cache_dtype in CACHE_DTYPES:
        inputs = KVInputs.random([1, 19, 530, 50], [1, 19, 1, 4], 6, 2, 16, torch.bfloat16)
        clean = inputs.attend(native, inputs.cache(native, cache_dtype))
        assert same_bits(inputs.attend(native, inputs.cache(native, cache_dtype, fill=stale)), clean)


def test_a_nan_stays_in_its_row(native: CpuOps) -> None:
    for dtype in DTYPES:
        for name, (length, op) in row_ops(native, dtype).items():
            x = torch.randn(20, length).to(dtype)
            clean = op(x)
            x[7, 3] = NAN
            dirty = op(x)
            assert dirty[7].isnan().any(), name
            keep = torch.arange(20) != 7
            assert same_bits(dirty[keep], clean[keep]), name


def test_a_nan_token_spoils_its_own_request_from_there_on(native: CpuOps) -> None:
    inputs = KVInputs.random([40, 40], [40, 40], 3, 1, 16, torch.bfloat16)
    clean = inputs.attend(native, inputs.cache(native, torch.bfloat16))
    inputs.keys[0][11] = NAN
    inputs.values[0][11] = NAN
    dirty = inputs.attend(native, inputs.cache(native, torch.bfloat16))
    assert dirty[11:40].isnan().all()
    assert same_bits(dirty[:11], clean[:11])
    assert same_bits(dirty[40:], clean[40:])


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_quantised_cache_cannot_hold_spoils_its_own_request_from_there_on(
    native: CpuOps, cache_dtype: torch.dtype, bad: float
) -> None:
    for which in ("keys", "values"):
        inputs = KVInputs.random([40], [40], 2, 1, 16, torch.float32)
        getattr(inputs, which)[0][11, 0, 3] = bad
        out = inputs.attend(native, inputs.cache(native, cache_dtype))
        assert out[11:].isnan().all()
        assert not out[:11].isnan().any()


def test_the_callers_floating_point_mode_neither_matters_nor_changes(native: CpuOps) -> None:
    packed = native.pack(torch.full((16, 16), 1e-20))
    x = torch.full((40, 16), 1e-20)  # products are denormal
    results = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        results.append(native.linear(x, packed, None, torch.float32))
        kept = (torch.tensor([1e-40]) * 1.0).item() == 0.0
        torch.set_flush_denormal(False)
        assert kept == flush
    assert same_bits(results[0], results[1])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 17, 64, 130])
def test_products_of_bf16_have_the_same_bits_on_all_instruction_sets(num_rows: int) -> None:
    """Some multiply pairs of columns in one instruction. Denormals are flushed by all, before and after."""
    before = cpu.isa()
    for num_cols in (1, 2, 31, 33, 100, 576):
        x, weight = torch.randn(num_rows, num_cols), torch.randn(150, num_cols)
        x[:, ::7] *= 2.0**-80
        weight[:, ::7] *= 2.0 ** -torch.randint(40, 60, weight[:, ::7].shape)
        weight[:, ::11] = 1e-39  # a denormal
        bias, results = torch.randn(150), []
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            ops = CpuOps()
            packed = ops.pack(weight.bfloat16())
            results += [ops.linear(x.bfloat16(), packed, b, torch.float32) for b in (None, bias)]
        assert all(same_bits(result, results[i % 2]) for i, result in enumerate(results)), num_cols
    cpu.set_isa(before)
