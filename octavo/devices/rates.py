"""flops_per_s: how fast an op multiplies, timed. For devices whose ops return when they are done."""

import time

import torch

from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix

__all__ = ["flops_per_s"]


def flops_per_s(
    ops: Ops,
    hidden_size: int,
    dtype: torch.dtype,
    form: QuantizedForm | None = None,
    int8_activations: bool = True,
    seconds: float = 0.05,
) -> float:
    """Operations a second of `ops.linear` on 64 rows, the best of what fits in `seconds`; over a matrix of `form`."""
    rows, outputs = 64, 2048
    x = torch.ones(rows, hidden_size, dtype=dtype)
    if form is None:
        weight = ops.pack(torch.full((outputs, hidden_size), 0.01, dtype=dtype))
    else:
        weight = ops.pack_quantized(QuantizedMatrix.filled(form, outputs, hidden_size), int8_activations)
    ops.linear(x, weight, None, dtype)
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        ops.linear(x, weight, None, dtype)
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return 2 * rows * outputs * hidden_size / best
