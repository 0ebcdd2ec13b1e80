"""The extension module built from csrc/cpu. Addresses and sizes in; dtypes are 0 float32, 1 bfloat16, 2 float16,
and for a KV cache 3 int8, 4 float8_e4m3fn."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ATTENTION_PARTITION: int
QUANT_BLOCK: int
MAX_HEAD_DIM: int
FMA_FLOPS: int
SAMPLE_ROW_BYTES: int

def supported_isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def progress() -> int: ...
def set_num_threads(n: int) -> None: ...
def packed_size(num_rows: int, num_cols: int, dtype: int, /) -> int: ...
def pack(weight: int, packed: int, num_rows: int, num_cols: int, dtype: int, /) -> None: ...
def embedding(
    token_ids: int, packed: int, out: int, num_tokens: int, num_rows: int, num_cols: int, dtype: int, /
) -> None: ...
def linear(
    x: int,
    packed: int,
    bias: int,
    out: int,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
    x_dtype: int,
    weight_dtype: int,
    out_dtype: int,
    draws: int,
    /,
) -> None: ...
def packed_quantized_bytes(
    num_rows: int, num_cols: int, bits: int, group: int, zero: int, has_mins: int, wide_scales: int, /
) -> int: ...
def pack_quantized(
    values: int,
    scales: int,
    mins: int,
    packed: int,
    num_rows: int,
    num_cols: int,
    bits: int,
    group: int,
    zero: int,
    has_mins: int,
    wide_scales: int,
    /,
) -> None: ...
def embedding_quantized(
    token_ids: int,
    packed: int,
    out: int,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
    bits: int,
    group: int,
    zero: int,
    has_mins: int,
    wide_scales: int,
    /,
) -> None: ...
def linear_quantized(
    x: int,
    packed: int,
    bias: int,
    out: int,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
    bits: int,
    group: int,
    zero: int,
    has_mins: int,
    wide_scales: int,
    int8_activations: int,
    x_dtype: int,
    out_dtype: int,
    draws: int,
    /,
) -> None: ...
def rms_norm(
    x: int,
    residual: int,
    weight: int,
    out: int,
    num_tokens: int,
    hidden_size: int,
    eps: float,
    x_dtype: int,
    out_dtype: int,
    /,
) -> None: ...
def add_layer_norm(
    x: int,
    residual: int,
    weight: int,
    bias: int,
    out: int,
    num_tokens: int,
    hidden_size: int,
    eps: float,
    x_dtype: int,
    out_dtype: int,
    /,
) -> None: ...
def gelu(x: int, out: int, count: int, dtype: int, /) -> None: ...
def mean_rows(
    x: int, row_start: int, out: int, num_tokens: int, num_requests: int, hidden_size: int, dtype: int, /
) -> None: ...
def l2_normalize(x: int, out: int, num_rows: int, hidden_size: int, dtype: int, /) -> None: ...
def silu_mul(gate_up: int, out: int, num_tokens: int, size: int, dtype: int, /) -> None: ...
def gelu_tanh_mul(gate_up: int, out: int, num_tokens: int, size: int, dtype: int, /) -> None: ...
def scale(x: int, out: int, count: int, factor: float, /) -> None: ...
def gather_rows(x: int, indices: int, out: int, num_x_rows: int, num_rows: int, row_bytes: int, /) -> None: ...
def rope_write_kv(
    qkv: int,
    positions: int,
    cos_sin: int,
    slot_mapping: int,
    q_norm: int,
    k_norm: int,
    norm_eps: float,
    q_out: int,
    kv_cache: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    cache_dtype: int,
    num_tokens: int,
    num_heads: int,
    max_positions: int,
    dtype: int,
    /,
) -> None: ...
def paged_attention(
    q: int,
    kv_cache: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    cache_dtype: int,
    block_table: int,
    query_start: int,
    seq_lens: int,
    out: int,
    num_tokens: int,
    num_requests: int,
    max_blocks: int,
    num_heads: int,
    scale: float,
    window: int,
    dtype: int,
    /,
) -> None: ...
def encoder_attention(
    qkv: int,
    query_start: int,
    out: int,
    num_tokens: int,
    num_requests: int,
    num_heads: int,
    head_dim: int,
    scale: float,
    dtype: int,
    /,
) -> None: ...
def time_fma(num_units: int, /) -> float: ...
def time_read(buffers: Sequence[tuple[int, int]], /) -> float: ...
def time_fork_join(repeats: int, /) -> float: ...
def sample_rows(logits: npt.NDArray[np.float32], rows: npt.NDArray[np.void], /) -> None: ...

class Recording:
    def __init__(self, num_rows: int, num_requests: int) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def __len__(self) -> int: ...

def replay(recordings: list[tuple[Recording, int, int]], /) -> None: ...

class StepFiller:
    def __init__(
        self,
        token_ids: int,
        block_tables: int,
        num_rows: int,
        row_tokens: int,
        row_blocks: int,
        block_size: int,
        arrays: list[int],
        slot_mappings: list[int],
        step_tables: list[int],
        draws: int,
        num_tokens: int,
        num_requests: int,
        step_blocks: int,
        /,
    ) -> None: ...
    def fill(
        self,
        rows: list[int],
        num_computed_tokens: list[int],
        num_scheduled_tokens: list[int],
        samples: list[bool],
        /,
    ) -> tuple[int, int, int]: ...
    def append(self) -> tuple[list[int], bool]: ...
