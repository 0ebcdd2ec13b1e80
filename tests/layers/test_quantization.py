"""Dequantised values equal the gguf package's bit for bit; rotary rows end up in transformers' order."""

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from octavo.devices.cpu.ops import CpuOps
from octavo.errors import CheckpointError
from octavo.kernels.quantized import QuantizedMatrix
from octavo.layers import quantization
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.quantization import (
    SUPPORTED_TYPES,
    dequantize,
    quantize_int4,
    quantize_int8,
    read_quantized,
    unpermute_rope,
)
from tests.layers.block_bytes import BLOCK_BYTES, HALVES, finite_blocks, random_bytes

SCALES = np.array([0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, 6.1e-5, np.inf, -np.inf, np.nan], np.float16)


@pytest.mark.parametrize("dtype_name", SUPPORTED_TYPES)
@pytest.mark.parametrize("shape", [(256,), (1, 512), (7, 768), (33, 2, 1024)])
def test_random_bytes_decode_as_in_the_gguf_package(dtype_name: str, shape: tuple[int, ...]) -> None:
    data = random_bytes(dtype_name, int(np.prod(shape)), seed=len(shape))
    data.flags.writeable = False
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(
            data.reshape(-1, BLOCK_BYTES[dtype_name][1]), gguf.GGMLQuantizationType[dtype_name]
        )
    actual = dequantize(data, dtype_name, shape, torch.float32)
    assert actual.shape == shape
    np.testing.assert_array_equal(actual.numpy(), expected.reshape(shape))


@pytest.mark.parametrize("dtype_name", HALVES)
def test_extreme_scales_decode_as_in_the_gguf_package(dtype_name: str) -> None:
    block_size, block_bytes = BLOCK_BYTES[dtype_name]
    blocks = random_bytes(dtype_name, len(SCALES) ** 2 * block_size, seed=3).reshape(-1, block_bytes)
    for index, start in enumerate(HALVES[dtype_name]):
        scales = np.tile(SCALES, len(SCALES)) if index else np.repeat(SCALES, len(SCALES))
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype_name])
    actual = dequantize(blocks.reshape(-1), dtype_name, expected.shape, torch.float32)
    np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype_name", SUPPORTED_TYPES)
def test_other_output_types_are_float32_rounded_once(dtype_name: str, out_dtype: torch.dtype) -> None:
    data = random_bytes(dtype_name, 1024, seed=5)
    expected = dequantize(data, dtype_name, (4, 256), torch.float32).to(out_dtype)
    np.testing.assert_array_equal(
        dequantize(data, dtype_name, (4, 256), out_dtype).float().numpy(), expected.float().numpy()
    )


@pytest.mark.parametrize("dtype_name", SUPPORTED_TYPES)
def test_chunks_do_not_change_the_result(dtype_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(dtype_name, 1024, seed=7)
    whole = dequantize(data, dtype_name, (32, 32), torch.float32)
    monkeypatch.setattr(quantization, "CHUNK_VALUES", 3 * BLOCK_BYTES[dtype_name][0])
    np.testing.assert_array_equal(dequantize(data, dtype_name, (32, 32), torch.float32).numpy(), whole.numpy())


def test_an_unsupported_type_is_named_with_the_tensor_and_what_is_supported() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored as IQ4_XS.*F32, F16, BF16, Q4_0, .*Q6_K"):
        dequantize(np.zeros(136, np.uint8), "IQ4_XS", (1, 256), torch.float32, name="lm_head.weight")


@pytest.mark.parametrize("shape", [(6 * 8, 5), (6 * 8,)])
def test_rotary_rows_are_reordered_as_transformers_does(shape: tuple[int, ...]) -> None:
    weight = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    processor = LlamaTensorProcessor(config={"num_attention_heads": 6, "num_key_value_heads": 6})
    expected = processor.process(weight, name="blk.0.attn_q.weight").weights
    np.testing.assert_array_equal(unpermute_rope(torch.from_numpy(weight), num_heads=6).numpy(), expected)


def test_reordering_puts_even_rows_before_odd_rows_in_each_head() -> None:
    assert unpermute_rope(torch.arange(12), num_heads=2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize("dtype_name", QUANTIZED_TYPES)
def test_packed_blocks_stand_for_what_the_gguf_package_dequantises(dtype_name: str) -> None:
    shape = (37, 512)
    blocks = finite_blocks(dtype_name, shape, seed=11)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype_name]).reshape(shape)
    matrix = read_quantized(blocks.reshape(-1), dtype_name, shape)
    np.testing.assert_array_equal(matrix.dequantized().numpy(), expected)
    ops = CpuOps()
    packed = ops.pack_quantized(matrix, int8_activations=False)
    rows = ops.embedding(torch.arange(37, dtype=torch.int32), packed)
    np.testing.assert_array_equal(rows.numpy(), expected)
    columns = ops.linear(torch.eye(512), packed, None, torch.float32)
    np.testing.assert_array_equal(columns.numpy().T, expected)


@pytest.mark.parametrize("dtype_name", QUANTIZED_TYPES)
def test_packed_blocks_take_what_their_form_says(dtype_name: str) -> None:
    matrix = read_quantized(finite_blocks(dtype_name, (32, 256), 3).reshape(-1), dtype_name, (32, 256))
    packed = CpuOps().pack_quantized(matrix)
    assert packed.data.numel() == 32 * 256 * matrix.form.bytes_per_weight


def test_mixed_blocks_are_stacked_exactly() -> None:
    """As query, key and value in Q4_K, Q4_K and Q6_K."""
    parts = [
        read_quantized(finite_blocks(name, (7, 256), seed).reshape(-1), name, (7, 256))
        for seed, name in enumerate(QUANTIZED_TYPES)
    ]
    for first in parts:
        for second in parts:
            stacked = QuantizedMatrix.stacked([first, second])
            assert torch.equal(stacked.dequantized(), torch.cat([first.dequantized(), second.dequantized()]))
            assert stacked.form == first.form or first is not second


@pytest.mark.parametrize("num_cols", [7, 32, 100])
def test_quantised_weights_lie_within_half_a_step(num_cols: int) -> None:
    weight = torch.randn(11, num_cols, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    for quantize in (quantize_int8, quantize_int4):
        matrix = quantize(weight)
        steps = matrix.scales.float().repeat_interleave(32, dim=1)[:, :num_cols]
        assert matrix.values.shape == weight.shape
        rounded = 2**-10 * weight.abs().amax()  # scales and minima are float16
        assert ((matrix.dequantized() - weight).abs() <= steps * 0.5 + rounded).all()
    assert (quantize_int8(weight).values.to(torch.int16) - 128).abs().max() == 127
