"""The cpu device's ops: allocates results and calls the native kernels of csrc/cpu, which check what they are given.

Every result row depends on that row's inputs alone, bit for bit. Threads and instruction set belong
to the process, not to an instance.
"""

import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu._cpu import isa, num_threads, set_isa, set_num_threads, supported_isas
from octavo.kernels.ops import ATTENTION_PARTITION, QUANT_BLOCK, Ops, Weight
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.kernels.sampling import DRAW_BYTES

__all__ = ["CpuOps", "isa", "num_threads", "set_isa", "set_num_threads", "supported_isas"]

assert (_cpu.ATTENTION_PARTITION, _cpu.QUANT_BLOCK) == (ATTENTION_PARTITION, QUANT_BLOCK), "csrc/cpu/ops.h disagrees"
assert DRAW_BYTES == _cpu.SAMPLE_ROW_BYTES, "csrc/cpu/ops.h disagrees"


class CpuOps(Ops):
    """Native kernels over packed weights and a cache whose keys lie in tiles of 16 positions (csrc/cpu/ops.h)."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def pack(self, weight: torch.Tensor) -> Weight:
        weight = weight.contiguous()
        packed = torch.empty(_cpu.packed_size(weight), dtype=weight.dtype)
        _cpu.pack(weight, packed)
        return Weight(packed, weight.shape[0], weight.shape[1])

    def pack_quantized(self, matrix: QuantizedMatrix, int8_activations: bool = True) -> Weight:
        codes = form_codes(matrix.form)
        packed = torch.empty(_cpu.packed_quantized_bytes(codes, matrix.values), dtype=torch.uint8)
        scales = (matrix.scales,) if matrix.mins is None else (matrix.scales, matrix.mins)
        _cpu.pack_quantized(codes, matrix.values, *scales, packed)
        return Weight(packed, matrix.values.shape[0], matrix.values.shape[1], matrix.form, int8_activations)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        _cpu.check_cache_sizes(block_size, head_dim)
        return super().kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def embedding(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        out = torch.empty((token_ids.shape[0], weight.num_cols), dtype=torch.float32)
        if weight.form is None:
            _cpu.embedding(weight.num_rows, weight.num_cols, weight.data, token_ids, out)
        else:
            form = form_codes(weight.form)
            _cpu.embedding_quantized(form, weight.num_rows, weight.num_cols, weight.data, token_ids, out)
        return out

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty((x.shape[0], weight.num_rows), dtype=out_dtype)
        _multiply(x, weight, bias, None, out)
        return out

    def most_likely(self, x: torch.Tensor, weight: Weight, draws: torch.Tensor) -> None:
        _multiply(x, weight, None, draws)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=out_dtype)
        _cpu.rms_norm(None, x, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=out_dtype)
        _cpu.rms_norm(residual, x, weight, eps, out)
        return out

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=out_dtype)
        _cpu.add_layer_norm(x, residual, weight, bias, eps, out)
        return out

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _cpu.gelu(x, out)
        return out

    def mean_rows(self, x: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
        out = torch.empty((row_start.shape[0] - 1, x.shape[1]), dtype=torch.float32)
        _cpu.mean_rows(x, row_start, out)
        return out

    def l2_normalize(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        _cpu.l2_normalize(x, out)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
        _cpu.silu_mul(out, gate_up)
        return out

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
        _cpu.gelu_tanh_mul(out, gate_up)
        return out

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        _cpu.scale(x, factor, out)
        return out

    def gather_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.empty((indices.shape[0], x.shape[1]), dtype=x.dtype)
        _cpu.gather_rows(x, indices, out)
        return out

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> torch.Tensor:
        q = torch.empty((qkv.shape[0], num_heads, cos_sin.shape[1]), dtype=qkv.dtype)
        index = (positions, slot_mapping)
        _cpu.rope_write_kv(num_heads, num_kv_heads, cos_sin, kv_cache, qkv, *index, q_norm, k_norm, norm_eps, q)
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype)
        _cpu.paged_attention(q, kv_cache, block_table, query_start, seq_lens, scale, window, out)
        return out

    def encoder_attention(
        self, qkv: torch.Tensor, query_start: torch.Tensor, num_heads: int, scale: float
    ) -> torch.Tensor:
        num_tokens, size = qkv.shape
        out = torch.empty((num_tokens, size // 3), dtype=qkv.dtype)
        _cpu.encoder_attention(num_heads, size // (3 * num_heads), qkv, query_start, scale, out)
        return out

    def sample_rows(self, logits: torch.Tensor, draws: torch.Tensor, masks: torch.Tensor) -> None:
        _cpu.sample_rows(logits, draws, masks)


def form_codes(form: QuantizedForm) -> tuple[int, int, int, bool, bool]:
    """The form as csrc/cpu/ops.h has it."""
    return form.bits, form.group, form.zero, form.has_mins, form.scale_dtype == torch.float32


def _multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, *outputs: torch.Tensor | None) -> None:
    """outputs: the rows to draw; or None, and then the tensor of all results."""
    matrix = (weight.num_rows, weight.num_cols, weight.data)
    if weight.form is None:
        _cpu.linear(*matrix, x, bias, *outputs)
    else:
        _cpu.linear_quantized(form_codes(weight.form), *matrix, weight.int8_activations, x, bias, *outputs)
