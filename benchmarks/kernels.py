"""Each CPU kernel against the machine's ceilings, in the same run: GB/s of weights at one row, GFLOP/s at many.

    python benchmarks/kernels.py [--isa avx512] [--threads 2] [--rows 1,8,64,256] [--weights bf16,q8_0,q4_0]

Ceilings: the read of a buffer of 512 MB and a loop of multiply-adds, the best of all tries, since a busy neighbour only
lowers them; and the fork and join of the pool. Kernels: the median of several tries. Every product works on enough
copies of its weights to leave the caches, as the layers of a model do. Weights are bf16, int8, int4 or a GGUF type; the
quantised ones are multiplied with 8-bit activations, whose ceiling is four multiply-adds for each of float32, as VNNI
has it; that of bf16 is two with avx512bf16, else one. With -w at the end, q4_0-w, activations stay bf16.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from octavo.devices.cpu import _cpu
from octavo.devices.cpu import ops as cpu
from octavo.devices.cpu.kv_pool import zeros_on_demand
from octavo.devices.machine import available_cpus
from octavo.kernels.ops import Weight
from octavo.kernels.quantized import QuantizedMatrix
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.weights import OWN_BLOCKS

SMOLLM2_SHAPES = [(576, 960, "qkv"), (576, 576, "o"), (576, 3072, "gate_up"), (1536, 576, "down"), (576, 49152, "head")]
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
READ_BYTES = 512 << 20
WEIGHT_BYTES = 192 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU kernels against the machine's ceilings.")
    parser.add_argument("--isa", choices=cpu.supported_isas(), default=cpu.isa())
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rows", default="1,8,64,256", help="numbers of rows, comma-separated")
    parser.add_argument("--weights", default="bf16", help="forms of weights, comma-separated")
    parser.add_argument("--seconds", type=float, default=0.4, help="time spent on each figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    rows = [int(text) for text in args.rows.split(",")]

    ceilings = Ceilings()
    print(f"{args.isa}, {args.threads} threads, bf16 activations and cache\n")
    print("| weights | product | K × N | " + " | ".join(f"M={m}: GB/s, GFLOP/s" for m in rows) + " |")
    print("|---|---|---|" + "---|" * len(rows))
    for kind in args.weights.split(","):
        for num_cols, num_rows, name in SMOLLM2_SHAPES:
            cells = [linear_rates(kind, num_rows, num_cols, m, args.seconds, ceilings) for m in rows]
            print(f"| {kind} | {name} | {num_cols} × {num_rows} | " + " | ".join(cells) + " |")
    print("\n| op | work | µs |\n|---|---|---|")
    for name, work, call in small_ops():
        print(f"| {name} | {work} | {median_s(call, args.seconds) * 1e6:.1f} |")
        ceilings.measure()
    print(
        "\n| decode attention, µs and GB/s | "
        + " | ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_DTYPES)
        + " |"
    )
    print("|---" * (1 + len(CACHE_DTYPES)) + "|")
    for num_requests, length in ((64, 256), (1, 2048), (16, 2048), (1, 8192), (16, 8192)):
        cells = attention_cells(num_requests, length, args.seconds, ceilings)
        print(f"| {num_requests} × {length} tokens | " + " | ".join(cells) + " |")
    print(f"\nceilings: {ceilings}")


class Ceilings:
    """The best rates seen so far."""

    def __init__(self) -> None:
        self.buffer = torch.ones(READ_BYTES // 4)
        self.read_bytes_per_s = 0.0
        self.flops_per_s = 0.0
        self.fork_join_s: list[float] = []
        for _ in range(5):
            self.measure()

    def measure(self) -> None:
        self.read_bytes_per_s = max(
            self.read_bytes_per_s, READ_BYTES / _cpu.time_read([(self.buffer.data_ptr(), READ_BYTES)])
        )
        units = 2 * cpu.num_threads()
        self.flops_per_s = max(self.flops_per_s, units * _cpu.FMA_FLOPS / _cpu.time_fma(units))
        self.fork_join_s.append(_cpu.time_fork_join(1000))

    def __str__(self) -> str:
        fork_join_ns = statistics.median(self.fork_join_s) * 1e9
        return (
            f"read {self.read_bytes_per_s / 1e9:.1f} GB/s, multiply-add {self.flops_per_s / 1e9:.0f} GFLOP/s, "
            f"fork and join {fork_join_ns:.0f} ns"
        )


def median_s(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call, over as many as fit into `seconds`."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_weight(kind: str, num_rows: int, num_cols: int) -> Weight:
    ops = cpu.CpuOps()
    if kind == "bf16":
        return ops.pack(torch.randn(num_rows, num_cols).bfloat16())
    name, _, suffix = kind.partition("-")
    form = QUANTIZED_TYPES[OWN_BLOCKS.get(name, name.upper())].form
    return ops.pack_quantized(QuantizedMatrix.filled(form, num_rows, num_cols), int8_activations=suffix != "w")


def linear_rates(kind: str, num_rows: int, num_cols: int, num_tokens: int, seconds: float, ceilings: Ceilings) -> str:
    ops = cpu.CpuOps()
    weights = [make_weight(kind, num_rows, num_cols)]
    weight_bytes = weights[0].data.nbytes
    weights += [make_weight(kind, num_rows, num_cols) for _ in range(WEIGHT_BYTES // weight_bytes)]
    copies, products = len(weights), 4 if weights[0].int8_activations else 1
    if cpu.isa() == "avx512bf16" and kind == "bf16":
        products = 2
    x = torch.randn(num_tokens, num_cols).bfloat16()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        start = time.perf_counter()
        for weight in weights:
            ops.linear(x, weight, None, torch.bfloat16)
        rates.append(copies / (time.perf_counter() - start))
    ceilings.measure()
    per_s = statistics.median(rates)
    bytes_per_s, flops_per_s = per_s * weight_bytes, per_s * 2 * num_rows * num_cols * num_tokens
    share = max(bytes_per_s / ceilings.read_bytes_per_s, flops_per_s / (products * ceilings.flops_per_s))
    return f"{bytes_per_s / 1e9:.1f}, {flops_per_s / 1e9:.0f} ({share:.0%})"


def small_ops() -> list[tuple[str, str, Callable[[], object]]]:
    """Everything else, on the sizes of SmolLM2-135M."""
    ops = cpu.CpuOps()
    cases: list[tuple[str, str, Callable[[], object]]] = []
    for num_tokens in (1, 64):
        work = f"{num_tokens} tokens"
        residual, norm = torch.randn(num_tokens, 576), torch.ones(576)
        x = torch.randn(num_tokens, 576).bfloat16()
        gate_up = torch.randn(num_tokens, 3072).bfloat16()
        norm_call = partial(ops.add_rms_norm, x, residual, norm, 1e-5, torch.bfloat16)
        cases += [("add_rms_norm", work, norm_call), ("silu_mul", work, partial(ops.silu_mul, gate_up))]
    for num_requests, num_queries, length in ((1, 1, 256), (1, 1, 4096), (64, 1, 256), (1, 512, 512), (1, 512, 2048)):
        work = f"{num_requests} × {num_queries} queries, {length} tokens"
        rope, attend = attention_calls(ops, num_requests, num_queries, length, torch.bfloat16)
        cases += [("rope_write_kv", work, rope), ("paged_attention", work, attend)]
    return cases


def attention_cells(num_requests: int, length: int, seconds: float, ceilings: Ceilings) -> list[str]:
    """One query a request, over caches of each type by turns: the least µs, and GB/s of keys and values."""
    ops = cpu.CpuOps()
    calls = [attention_calls(ops, num_requests, 1, length, dtype)[1] for dtype in CACHE_DTYPES]
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds * len(calls)
    while best[-1] == float("inf") or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
        ceilings.measure()
    sizes = [
        math.prod(ops.kv_cache_shape(num_requests, length, 3, 64, dtype)) * dtype.itemsize for dtype in CACHE_DTYPES
    ]
    return [f"{s * 1e6:.0f}, {size / s / 1e9:.1f}" for s, size in zip(best, sizes, strict=True)]


def attention_calls(
    ops: cpu.CpuOps, num_requests: int, num_queries: int, length: int, cache_dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    num_heads, num_kv_heads, head_dim, block_size = 9, 3, 64, 16
    blocks = -(-length // block_size)
    shape = ops.kv_cache_shape(num_requests * blocks, block_size, num_kv_heads, head_dim, cache_dtype)
    cache = zeros_on_demand(shape, cache_dtype)
    table = torch.randperm(num_requests * blocks).to(torch.int32).view(num_requests, blocks)
    cos_sin = torch.randn(length, head_dim)
    everything = torch.arange(length, dtype=torch.int32)
    for r in range(num_requests):
        kv = torch.randn(length, 2 * num_kv_heads * head_dim).bfloat16()
        slots = table[r, everything // block_size] * block_size + everything % block_size
        ops.rope_write_kv(kv, everything, cos_sin, cache, slots, 0, num_kv_heads)
    query_start = torch.arange(num_requests + 1, dtype=torch.int32) * num_queries
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32)
    num_tokens = num_requests * num_queries
    q = torch.randn(num_tokens, num_heads, head_dim).bfloat16()
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).bfloat16()
    position = torch.arange(length - num_queries, length, dtype=torch.int32).repeat(num_requests)
    request = torch.arange(num_requests).repeat_interleave(num_queries)
    slots = table[request, position // block_size] * block_size + position % block_size
    return (
        partial(ops.rope_write_kv, qkv, position, cos_sin, cache, slots, num_heads, num_kv_heads),
        partial(ops.paged_attention, q, cache, table, query_start, seq_lens, head_dim**-0.5, 0),
    )


if __name__ == "__main__":
    main()
