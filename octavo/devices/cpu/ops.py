"""The `cpu` provider: checks shapes and dtypes, allocates results, calls the native kernels of csrc/cpu.

Every result row depends on that row's inputs alone, bit for bit. Threads and instruction set belong
to the process, not to an instance.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu._cpu import isa, num_threads, set_isa, set_num_threads, supported_isas
from octavo.kernels.ops import ATTENTION_PARTITION, QUANT_BLOCK, Ops, Weight
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.kernels.sampling import SAMPLE_ROW, SampleRows
from octavo.kernels.step_inputs import BatchTables, StepArrays, StepFiller

__all__ = ["CpuOps", "isa", "num_threads", "set_isa", "set_num_threads", "supported_isas"]

assert (_cpu.ATTENTION_PARTITION, _cpu.QUANT_BLOCK) == (ATTENTION_PARTITION, QUANT_BLOCK), "csrc/cpu/ops.h disagrees"
assert SAMPLE_ROW.itemsize == _cpu.SAMPLE_ROW_BYTES, "csrc/cpu/ops.h disagrees"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_DTYPE_CODES = DTYPE_CODES | {torch.int8: 3, torch.float8_e4m3fn: 4}


def dtype_code(dtype: torch.dtype) -> int:
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise TypeError(f"the cpu kernels compute in float32, bfloat16 and float16, not in {dtype}")
    return code


def cache_dtype_code(dtype: torch.dtype) -> int:
    code = CACHE_DTYPE_CODES.get(dtype)
    if code is None:
        raise TypeError(
            f"a KV cache of the cpu kernels is one of {', '.join(map(str, CACHE_DTYPE_CODES))}, not {dtype}"
        )
    return code


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise unless `tensor` is contiguous, has this shape and, where given, this dtype."""
    if tensor.shape != shape or not tensor.is_contiguous() or (dtype is not None and tensor.dtype != dtype):
        wanted = f"contiguous {tuple(shape)} {dtype or ''}".rstrip()
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(f"{name} must be {wanted}, not {tuple(tensor.shape)} {tensor.dtype}{layout}")


def form_codes(form: QuantizedForm) -> tuple[int, int, int, int, int]:
    """The form as csrc/cpu/ops.h has it."""
    wide_scales = form.scale_dtype == torch.float32
    if form.bits not in (4, 8) or form.group not in (16, 32) or (form.group == 16 and not wide_scales):
        raise ValueError(f"the cpu kernels don't have the form {form}")
    return form.bits, form.group, form.zero, int(form.has_mins), int(wide_scales)


def check_head_dim(head_dim: int) -> None:
    if not 16 <= head_dim <= _cpu.MAX_HEAD_DIM or head_dim % 16:
        raise ValueError(f"the cpu kernels handle head sizes that are multiples of 16 up to 256, not {head_dim}")


def gated(kernel: Callable[[int, int, int, int, int], None], gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2·I] -> [T, I], by a kernel such as silu_mul."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    check("gate_up", gate_up, (num_tokens, 2 * size))
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype)
    kernel(gate_up.data_ptr(), out.data_ptr(), num_tokens, size, dtype_code(gate_up.dtype))
    return out


class CpuOps(Ops):
    """Native kernels over packed weights and a cache whose keys lie in tiles of 16 positions (csrc/cpu/ops.h)."""

    name = "cpu"

    def set_num_threads(self, num_threads: int) -> None:
        set_num_threads(num_threads)
        torch.set_num_threads(1)

    def pack(self, weight: torch.Tensor) -> Weight:
        weight = weight.contiguous()
        num_rows, num_cols = weight.shape
        code = dtype_code(weight.dtype)
        packed = torch.empty(_cpu.packed_size(num_rows, num_cols, code), dtype=weight.dtype)
        _cpu.pack(weight.data_ptr(), packed.data_ptr(), num_rows, num_cols, code)
        return Weight(packed, num_rows, num_cols)

    def pack_quantized(self, matrix: QuantizedMatrix, int8_activations: bool = True) -> Weight:
        form, (num_rows, num_cols) = matrix.form, matrix.values.shape
        codes = form_codes(form)
        check("values", matrix.values, (num_rows, num_cols), torch.uint8)
        for name, scales in (("scales", matrix.scales), ("mins", matrix.mins)):
            if scales is not None:
                check(name, scales, (num_rows, -(-num_cols // form.group)), form.scale_dtype)
        packed = torch.empty(_cpu.packed_quantized_bytes(num_rows, num_cols, *codes), dtype=torch.uint8)
        mins = 0 if matrix.mins is None else matrix.mins.data_ptr()
        pointers = (matrix.values.data_ptr(), matrix.scales.data_ptr(), mins, packed.data_ptr())
        _cpu.pack_quantized(*pointers, num_rows, num_cols, *codes)
        return Weight(packed, num_rows, num_cols, form, int8_activations)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        if block_size < 16 or block_size % 16:
            raise ValueError(f"block size {block_size} is not a multiple of 16. Choose another --block-size")
        check_head_dim(head_dim)
        return super().kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def embedding(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        num_tokens = token_ids.shape[0]
        check("token_ids", token_ids, (num_tokens,), torch.int32)
        out = torch.empty((num_tokens, weight.num_cols), dtype=torch.float32)
        sizes = (num_tokens, weight.num_rows, weight.num_cols)
        pointers = (token_ids.data_ptr(), weight.data.data_ptr(), out.data_ptr())
        if weight.form is None:
            _cpu.embedding(*pointers, *sizes, dtype_code(weight.data.dtype))
        else:
            _cpu.embedding_quantized(*pointers, *sizes, *form_codes(weight.form))
        return out

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        num_tokens = x.shape[0]
        num_rows, num_cols = weight.num_rows, weight.num_cols
        check("x", x, (num_tokens, num_cols))
        if bias is not None:
            check("bias", bias, (num_rows,), torch.float32)
        out = torch.empty((num_tokens, num_rows), dtype=out_dtype)
        _multiply(x, weight, 0 if bias is None else bias.data_ptr(), out.data_ptr(), dtype_code(out_dtype), 0)
        return out

    def most_likely(self, x: torch.Tensor, weight: Weight, draws: SampleRows) -> None:
        check("x", x, (x.shape[0], weight.num_cols))
        if draws.dtype != SAMPLE_ROW or draws.shape != (x.shape[0],) or not draws.flags.c_contiguous:
            raise ValueError(f"draws must be [{x.shape[0]}] SAMPLE_ROW, contiguous, not {draws.dtype} {draws.shape}")
        _multiply(x, weight, 0, 0, dtype_code(torch.float32), draws.ctypes.data)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        num_tokens, hidden_size = x.shape
        check("x", x, (num_tokens, hidden_size), torch.float32)
        check("weight", weight, (hidden_size,), torch.float32)
        out = torch.empty((num_tokens, hidden_size), dtype=out_dtype)
        codes = (0, dtype_code(out_dtype))
        _cpu.rms_norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), num_tokens, hidden_size, eps, *codes)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        num_tokens, hidden_size = x.shape
        check("x", x, (num_tokens, hidden_size))
        check("residual", residual, (num_tokens, hidden_size), torch.float32)
        check("weight", weight, (hidden_size,), torch.float32)
        out = torch.empty((num_tokens, hidden_size), dtype=out_dtype)
        _cpu.rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_tokens,
            hidden_size,
            eps,
            dtype_code(x.dtype),
            dtype_code(out_dtype),
        )
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
        num_tokens, hidden_size = x.shape
        check("x", x, (num_tokens, hidden_size))
        check("residual", residual, (num_tokens, hidden_size), torch.float32)
        check("weight", weight, (hidden_size,), torch.float32)
        check("bias", bias, (hidden_size,), torch.float32)
        out = torch.empty((num_tokens, hidden_size), dtype=out_dtype)
        _cpu.add_layer_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            hidden_size,
            eps,
            dtype_code(x.dtype),
            dtype_code(out_dtype),
        )
        return out

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        check("x", x, tuple(x.shape))
        out = torch.empty_like(x)
        _cpu.gelu(x.data_ptr(), out.data_ptr(), x.numel(), dtype_code(x.dtype))
        return out

    def mean_rows(self, x: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
        num_tokens, hidden_size = x.shape
        num_requests = row_start.shape[0] - 1
        check("x", x, (num_tokens, hidden_size))
        check("row_start", row_start, (num_requests + 1,), torch.int32)
        out = torch.empty((num_requests, hidden_size), dtype=torch.float32)
        sizes = (num_tokens, num_requests, hidden_size)
        _cpu.mean_rows(x.data_ptr(), row_start.data_ptr(), out.data_ptr(), *sizes, dtype_code(x.dtype))
        return out

    def l2_normalize(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, hidden_size = x.shape
        check("x", x, (num_rows, hidden_size))
        out = torch.empty((num_rows, hidden_size), dtype=torch.float32)
        _cpu.l2_normalize(x.data_ptr(), out.data_ptr(), num_rows, hidden_size, dtype_code(x.dtype))
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated(_cpu.silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated(_cpu.gelu_tanh_mul, gate_up)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        num_tokens, size = x.shape
        check("x", x, (num_tokens, size), torch.float32)
        out = torch.empty((num_tokens, size), dtype=torch.float32)
        _cpu.scale(x.data_ptr(), out.data_ptr(), num_tokens * size, factor)
        return out

    def gather_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x.shape
        num_rows = indices.shape[0]
        check("x", x, (num_tokens, size))
        check("indices", indices, (num_rows,), torch.int32)
        out = torch.empty((num_rows, size), dtype=x.dtype)
        row_bytes = size * x.dtype.itemsize
        _cpu.gather_rows(x.data_ptr(), indices.data_ptr(), out.data_ptr(), num_tokens, num_rows, row_bytes)
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
        num_tokens = qkv.shape[0]
        num_blocks, _, _, block_size, _ = kv_cache.shape
        max_positions, head_dim = cos_sin.shape
        check("qkv", qkv, (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim))
        check("positions", positions, (num_tokens,), torch.int32)
        check("cos_sin", cos_sin, (max_positions, head_dim), torch.float32)
        cache_shape = self.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, kv_cache.dtype)
        check("kv_cache", kv_cache, cache_shape)
        check("slot_mapping", slot_mapping, (num_tokens,), torch.int32)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                check(name, norm, (head_dim,), torch.float32)
        q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype)
        _cpu.rope_write_kv(
            qkv.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            slot_mapping.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            norm_eps,
            q.data_ptr(),
            kv_cache.data_ptr(),
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            cache_dtype_code(kv_cache.dtype),
            num_tokens,
            num_heads,
            max_positions,
            dtype_code(qkv.dtype),
        )
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
        num_blocks, num_kv_heads, _, block_size, _ = kv_cache.shape
        num_requests, max_blocks = block_table.shape
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads can't share {num_kv_heads} key-value heads evenly")
        check("q", q, (num_tokens, num_heads, head_dim))
        cache_shape = self.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, kv_cache.dtype)
        check("kv_cache", kv_cache, cache_shape)
        check("block_table", block_table, (num_requests, max_blocks), torch.int32)
        check("query_start", query_start, (num_requests + 1,), torch.int32)
        check("seq_lens", seq_lens, (num_requests,), torch.int32)
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype)
        _cpu.paged_attention(
            q.data_ptr(),
            kv_cache.data_ptr(),
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            cache_dtype_code(kv_cache.dtype),
            block_table.data_ptr(),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_requests,
            max_blocks,
            num_heads,
            scale,
            window,
            dtype_code(q.dtype),
        )
        return out

    def encoder_attention(
        self, qkv: torch.Tensor, query_start: torch.Tensor, num_heads: int, scale: float
    ) -> torch.Tensor:
        num_tokens, size = qkv.shape
        num_requests = query_start.shape[0] - 1
        head_dim = size // (3 * num_heads)
        check_head_dim(head_dim)
        check("qkv", qkv, (num_tokens, 3 * num_heads * head_dim))
        check("query_start", query_start, (num_requests + 1,), torch.int32)
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=qkv.dtype)
        _cpu.encoder_attention(
            qkv.data_ptr(),
            query_start.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_requests,
            num_heads,
            head_dim,
            scale,
            dtype_code(qkv.dtype),
        )
        return out

    def sample_rows(self, logits: npt.NDArray[np.float32], rows: SampleRows) -> None:
        _cpu.sample_rows(logits, rows)

    def step_filler(self, tables: BatchTables, arrays: StepArrays) -> StepFiller:
        return NativeFiller(tables, arrays)


def _multiply(x: torch.Tensor, weight: Weight, bias: int, out: int, out_code: int, draws: int) -> None:
    """`bias`, `out` and `draws` are addresses, 0 for none."""
    pointers, sizes = (x.data_ptr(), weight.data.data_ptr(), bias, out), (x.shape[0], weight.num_rows, weight.num_cols)
    if weight.form is None:
        _cpu.linear(*pointers, *sizes, dtype_code(x.dtype), dtype_code(weight.data.dtype), out_code, draws)
    else:
        codes = (*form_codes(weight.form), int(weight.int8_activations), dtype_code(x.dtype), out_code)
        _cpu.linear_quantized(*pointers, *sizes, *codes, draws)


class NativeFiller(_cpu.StepFiller):
    """Holds what the native code has the addresses of."""

    def __init__(self, tables: BatchTables, arrays: StepArrays) -> None:
        self.tables, self.arrays = tables, arrays
        num_rows, row_tokens = tables.token_ids.shape
        inputs = (arrays.input_ids, arrays.positions, arrays.query_start, arrays.seq_lens, arrays.rows)
        sampled = (arrays.logits_rows, arrays.sampled_rows)
        super().__init__(
            _address(tables.token_ids),
            _address(tables.block_tables),
            num_rows,
            row_tokens,
            tables.block_tables.shape[2],
            tables.block_size,
            [_address(array) for array in inputs + sampled],
            [_address(slots) for slots in arrays.slot_mappings],
            [_address(table) for table in arrays.block_tables],
            arrays.draws.ctypes.data,
            len(arrays.positions),
            len(arrays.seq_lens),
            arrays.block_tables[0].shape[1],
        )


def _address(array: npt.NDArray[np.int32]) -> int:
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    return array.ctypes.data
