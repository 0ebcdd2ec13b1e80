"""Every op a model may use: signature, documentation and plain-torch reference in one.

A device's ops (`devices/*/ops.py`) are a subclass that overrides every op; `Ops` itself is the definition, and
computes on the host. Models reach ops only through their context, `ctx.ops`. Ops take tensors of the device and return
new ones.

Shapes: T tokens in the step, R requests (rows of the block table), H hidden size, D head size, Hq query heads, Hkv
key-value heads. T is the only dimension that varies between steps. Activations are float32, bfloat16 or float16
("dtype" below); the residual stream and every accumulation is float32, rounded once when an op's result is stored.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from octavo.kernels import sampling
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix, round_to_int8
from octavo.kernels.quantized_kv import KV_SCALE_BYTES, LARGEST_QUANTIZED, cache_rows, read_rows

__all__ = ["ATTENTION_PARTITION", "QUANT_BLOCK", "Ops", "Weight"]

ATTENTION_PARTITION = 512
"""Positions in one partition of attention: partial results of fixed partitions, counted from position 0, are merged in
order, so that the order of additions depends on a token's position alone."""


QUANT_BLOCK = 32
"""Columns of activations that share a scale when they are quantised."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [num_rows, num_cols] = [out_features, in_features] in the layout of the ops that packed it."""

    data: torch.Tensor
    num_rows: int
    num_cols: int
    form: QuantizedForm | None = None
    """How the matrix is quantised; None: it is of data's dtype."""
    int8_activations: bool = False
    """`linear` quantises its input too."""


class Ops:
    """Every public method is an op, but for those that say how the device lays out what it keeps: `place`, `pack`,
    `pack_quantized` and `kv_cache_shape`."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host in the device's memory: norms, biases, tables. Not an op: called at load."""
        return tensor

    def pack(self, weight: torch.Tensor) -> Weight:
        """Lay out a [N, K] matrix for `linear` and `embedding`. Not an op: called at load."""
        return Weight(weight.contiguous(), weight.shape[0], weight.shape[1])

    def pack_quantized(self, matrix: QuantizedMatrix, int8_activations: bool = True) -> Weight:
        """As `pack`, for a quantised matrix, which is multiplied with activations in eight bits or as they are."""
        num_rows, num_cols = matrix.values.shape
        return Weight(matrix.dequantized(), num_rows, num_cols, matrix.form, int8_activations)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Shape of one layer's KV cache, zero-initialised by the runner. Dimension 2 is K then V. Not an op.

        Elements of int8 and float8_e4m3fn are quantised, and the last dimension has room for a scale.
        """
        return (num_blocks, num_kv_heads, 2, block_size, head_dim + KV_SCALE_BYTES * (dtype in LARGEST_QUANTIZED))

    def embedding(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Rows of `weight` for token_ids [T] int32 -> [T, H] float32 (the residual stream's first value)."""
        return weight.data[token_ids.long()].float()

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """x [T, K] dtype times weightᵀ, plus bias [N] float32 -> [T, N] out_dtype; accumulated in float32.

        With int8_activations each QUANT_BLOCK columns of a row of x are quantised too: the largest magnitude becomes
        127, the others are rounded to the nearest.
        """
        x32 = round_to_int8(x.float(), QUANT_BLOCK) if weight.int8_activations else x.float()
        return F.linear(x32, weight.data.float(), bias).to(out_dtype)

    def most_likely(self, x: torch.Tensor, weight: Weight, draws: torch.Tensor) -> None:
        """`sample_rows` of linear(x, weight, None, float32), whose results need not be stored: all rows of `draws`
        [S, DRAW_BYTES] have temperature 0 and no mask."""
        logits = self.linear(x, weight, None, torch.float32)
        self.sample_rows(logits, draws, logits.new_empty((len(logits), 0), dtype=torch.uint8))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, H] float32 / rms(x) · weight [H] float32 -> [T, H] out_dtype (Zhang and Sennrich, 2019)."""
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return (x * scale * weight).to(out_dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """residual [T, H] float32 += x [T, H] dtype, in place; returns rms_norm(residual)."""
        residual += x.float()
        return Ops.rms_norm(self, residual, weight, eps, out_dtype)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """residual [T, H] float32 becomes, in place, the layer norm (Ba et al., 2016) of residual + x [T, H] dtype.

        weight, bias [H] float32. Returns the new residual rounded to out_dtype. This is how post-norm models add.
        """
        residual += x.float()
        residual.copy_(F.layer_norm(residual, weight.shape, weight, bias, eps))
        return residual.to(out_dtype, copy=True)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] dtype · Φ(x), with the normal distribution's own Φ (Hendrycks and Gimpel, 2016)."""
        x32 = x.float()
        return (x32 * 0.5 * torch.erfc(x32 * -(0.5**0.5))).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2·I] dtype: silu(first half) · second half -> [T, I] dtype (Shazeer, 2020: SwiGLU)."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2·I] dtype: gelu(first half) · second half -> [T, I] dtype (GeGLU), gelu in its approximation
        x · (1 + tanh(u)) / 2 = x · sigmoid(2·u), u = √(2/π) · (x + 0.044715 · x³).
        """
        gate, up = gate_up.float().chunk(2, dim=-1)
        doubled = 2 * math.sqrt(2 / math.pi) * gate * (1 + 0.044715 * gate.square())
        return (gate * torch.sigmoid(doubled) * up).to(gate_up.dtype)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x [T, H] float32 times a number that float32 holds -> [T, H] float32."""
        return x * factor

    def gather_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of x [T, H] at indices [S] int32 -> [S, H]."""
        return x[indices.long()]

    def mean_rows(self, x: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
        """Mean over each request's rows, of which there is at least one.

        x [T, H] dtype; row_start [R + 1] int32: from 0 to T, each request's first row. Returns [R, H] float32.
        """
        return torch.stack([x[first:last].float().mean(dim=0) for first, last in pairwise(row_start.tolist())])

    def l2_normalize(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, H] dtype / max(‖x‖₂, 1e-12) -> [S, H] float32."""
        return F.normalize(x.float(), dim=-1, eps=1e-12)

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
        """Rotate queries and keys (Su et al., 2021, halves as in GPT-NeoX) and store keys and values in the cache.

        qkv [T, (Hq + 2·Hkv)·D] dtype: query heads, then key heads, then value heads.
        positions [T] int32; cos_sin [max_model_len, D] float32: D/2 cosines, then D/2 sines.
        kv_cache as `kv_cache_shape`, in the cache's dtype, where a quantised one stores what `quantize_kv` gives;
        slot_mapping [T] int32: block · block_size + offset.
        q_norm, k_norm [D] float32: weights of an RMS norm of each query and key head before it is rotated; None: none.
        Returns the rotated queries [T, Hq, D] dtype.
        """
        num_tokens = qkv.shape[0]
        block_size = kv_cache.shape[3]
        heads = qkv.float().view(num_tokens, num_heads + 2 * num_kv_heads, -1)
        query, key, value = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        query = query if q_norm is None else Ops.rms_norm(self, query, q_norm, norm_eps, torch.float32)
        key = key if k_norm is None else Ops.rms_norm(self, key, k_norm, norm_eps, torch.float32)
        rotated = torch.cat((query, key), dim=1)
        cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        block, offset = slot_mapping.long() // block_size, slot_mapping.long() % block_size
        rows = kv_cache.view(torch.uint8)  # as bytes, for which torch has every operation
        rows[block, :, 0, offset] = cache_rows(rotated[:, num_heads:], kv_cache.dtype)
        rows[block, :, 1, offset] = cache_rows(value, kv_cache.dtype)
        return rotated[:, :num_heads].to(qkv.dtype)

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
        """Causal softmax attention of every query over its request's tokens, all read from the cache.

        q [T, Hq, D] dtype; request r's queries are rows query_start[r] to query_start[r + 1], perhaps none, and are the
        last of its seq_lens[r] tokens. block_table [R, max_blocks], query_start [R + 1], seq_lens [R]: int32. The
        entries of blocks that no query sees are not read.
        window: how many latest positions a query sees, itself included; 0 for all. Query head h reads key-value head
        h // (Hq / Hkv). Returns [T, Hq·D] dtype.
        Over an int8 cache a device may round queries, and a partition's weights times the values' scales, to 16 bits:
        a row's largest magnitude becomes 32767.
        """
        _, num_kv_heads, _, block_size, _ = kv_cache.shape
        num_heads, head_dim = q.shape[1:]
        out = torch.empty_like(q)
        starts, lengths = query_start.tolist(), seq_lens.tolist()
        for r, seq_len in enumerate(lengths):
            rows = slice(starts[r], starts[r + 1])
            num_queries = starts[r + 1] - starts[r]
            if not num_queries:
                continue
            first_seen = max(seq_len - num_queries - window + 1, 0) if window > 0 else 0
            first_block, last_block = first_seen // block_size, -(-seq_len // block_size)
            first, length = first_block * block_size, seq_len - first_block * block_size
            rows_of = kv_cache.view(torch.uint8)[block_table[r, first_block:last_block].long()]
            kv = read_rows(rows_of, kv_cache.dtype)  # [blocks, Hkv, 2, block_size, D]
            kv = kv.permute(2, 1, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :length]
            key, value = kv.repeat_interleave(num_heads // num_kv_heads, dim=1)  # [Hq, length, D]
            query = q[rows].float().transpose(0, 1)  # [Hq, queries, D]
            scores = query @ key.transpose(1, 2) * scale
            query_position = torch.arange(seq_len - num_queries, seq_len, device=q.device).unsqueeze(1)
            distance = query_position - torch.arange(first, seq_len, device=q.device)
            hidden = distance < 0
            if window > 0:
                hidden |= distance >= window
            scores.masked_fill_(hidden, float("-inf"))
            out[rows] = (torch.softmax(scores, dim=-1) @ value).transpose(0, 1).to(q.dtype)
        return out.view(q.shape[0], num_heads * head_dim)

    def encoder_attention(
        self, qkv: torch.Tensor, query_start: torch.Tensor, num_heads: int, scale: float
    ) -> torch.Tensor:
        """Softmax attention of every token over all tokens of its request, in both directions and without a cache.

        qkv [T, 3·Hq·D] dtype: query heads, then key heads, then value heads. query_start [R + 1] int32: from 0 to T,
        each request's first row. Returns [T, Hq·D] dtype.
        """
        num_tokens = qkv.shape[0]
        out = torch.empty((num_tokens, qkv.shape[1] // 3), dtype=qkv.dtype, device=qkv.device)
        starts = query_start.tolist()
        for first, last in pairwise(starts):
            heads = qkv[first:last].float().view(last - first, 3, num_heads, -1)
            query, key, value = heads.permute(1, 2, 0, 3)  # [Hq, tokens, D]
            weights = torch.softmax(query @ key.transpose(1, 2) * scale, dim=-1)
            out[first:last] = (weights @ value).transpose(0, 1).reshape(last - first, -1).to(qkv.dtype)
        return out

    def sample_rows(self, logits: torch.Tensor, draws: torch.Tensor, masks: torch.Tensor) -> None:
        """Draw a token for each row of logits [S, V] float32, which are overwritten.

        draws [S, DRAW_BYTES] uint8: a record for each row (`sampling.SAMPLE_ROW`), of its parameters and of the
        results, which are filled in. masks [S, ceil(V / 8)] uint8: of the rows that are masked, bit t % 8 of byte t //
        8 says whether token t is allowed. A row's token depends on its own logits and numbers alone. Noise is
        Philox-4x32-10 of (seed, choice, position); devices may differ in the rounding of e^x, so where the noise falls
        within rounding of the edge between two tokens."""
        sampling.sample_rows(logits.numpy(), sampling.rows_of(draws), masks.numpy())
