"""The reference of `Ops.sample_rows`: logits to tokens in numpy, whose sums over a row have one order.

Order of the steps is vLLM's: grammar, temperature, min_p, top_k, top_p. Knows rows and numbers, not requests.
"""

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.philox import uniform

__all__ = [
    "DRAW_BYTES",
    "GOOD",
    "NOTHING_LEFT",
    "NOT_FINITE",
    "SAMPLE_ROW",
    "SampleRows",
    "make_draws",
    "mask_bytes",
    "rows_of",
    "sample_rows",
]

GOOD, NOT_FINITE, NOTHING_LEFT = range(3)
"""What `status` may be: the token is drawn; the logits are not finite; no token is left."""
SAMPLE_ROW = np.dtype(
    [
        ("seed", np.uint64),  # with choice and position: what the row's noise is a function of
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("temperature", np.float32),  # 0 for the most likely token
        ("top_k", np.int32),  # 0 for all
        ("choice", np.uint32),
        ("position", np.uint32),
        ("token_id", np.int32),  # result
        ("status", np.int32),  # result
        ("is_masked", np.int32),  # whether its row of masks says which tokens are allowed
    ],
    align=True,
)
"""The parameters by which a row of logits is drawn, and its result: SampleRow of csrc/cpu/ops.h. Rows of draws are such
records as bytes, so that one copy takes a step's to where they are drawn."""
DRAW_BYTES = SAMPLE_ROW.itemsize
SUM_BLOCK = 256
"""Weights that are added up together when a row is searched for the drawn token."""
THRESHOLDS = (1e-3, 1e-6, -1.0)
"""Weights, the largest being 1, above which filters look for their tokens; the last takes all."""
BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BIAS_OF_BYTE = np.where(BITS_OF_BYTE, np.float32(0), np.float32(-np.inf))  # [256, 8], float32
"""What eight bits of a mask add to their tokens' logits: a table is several times as fast as a selection."""

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]
SampleRows = npt.NDArray[np.void]  # [S] of SAMPLE_ROW


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a row of masks: bit t % 8 of byte t // 8 says whether token t is allowed."""
    return -(-vocab_size // 8)


def make_draws(num_rows: int) -> torch.Tensor:
    """Draws [num_rows, DRAW_BYTES] uint8 of the host, all zeros."""
    return torch.zeros((num_rows, DRAW_BYTES), dtype=torch.uint8)


def rows_of(draws: torch.Tensor) -> SampleRows:
    """Draws of the host [S, DRAW_BYTES] as records [S], over the same memory."""
    rows: SampleRows = draws.numpy().view(SAMPLE_ROW)[:, 0]
    return rows


def sample_rows(logits: Float32Array, rows: SampleRows, masks: UInt8Array) -> None:
    """Fill in the results of `rows` from logits [S, V], which are overwritten. masks [S, mask_bytes]."""
    noise = uniform(rows["seed"], rows["choice"], rows["position"])
    for i, row in enumerate(rows):
        mask = masks[i] if row["is_masked"] else None
        row["token_id"], row["status"] = _sample(logits[i], row, mask, float(noise[i]))


def _sample(logits: Float32Array, row: np.void, mask: UInt8Array | None, noise: float) -> tuple[int, int]:
    if not np.isfinite(logits.max()):  # a NaN wins
        return 0, NOT_FINITE
    if mask is not None:
        forbid(logits, mask)
    token_id = int(logits.argmax())  # the first of equals
    if logits[token_id] == -np.inf:
        return token_id, NOTHING_LEFT
    if not row["temperature"]:
        return token_id, GOOD
    logits -= logits[token_id]
    logits /= row["temperature"]
    weights = np.exp(logits, out=logits)
    return _draw(weights, int(row["top_k"]), float(row["top_p"]), float(row["min_p"]), noise), GOOD


def forbid(logits: Float32Array, mask: UInt8Array) -> None:
    """Rule out what the mask does not allow, in one row [V]."""
    logits += BIAS_OF_BYTE.take(mask, axis=0).reshape(-1)[: len(logits)]


def _draw(weights: Float32Array, top_k: int, top_p: float, min_p: float, noise: float) -> int:
    """A token of one row of weights [V], the largest being 1, among those that min_p, top_k and top_p leave."""
    if top_k <= 0 and top_p == 1.0 and min_p == 0.0:
        return _draw_any(weights, noise)
    for threshold in THRESHOLDS:
        ids = np.flatnonzero(weights > threshold)
        order = np.argsort(-weights[ids], kind="stable")  # the lower id first among equals
        sorted_weights = weights[ids[order]].astype(np.float64)
        num_kept = int(np.count_nonzero(sorted_weights >= min_p))
        if top_k > 0:
            num_kept = min(num_kept, top_k)
        cumulative = sorted_weights[:num_kept].cumsum()
        total = cumulative[-1]
        # Whether every token that min_p and top_k leave is at hand, so that `total` is theirs.
        is_whole = threshold < 0 or min_p > threshold or 0 < top_k <= len(ids)
        if not is_whole:
            if top_k > 0 or min_p > 0:
                continue
            total = float(_block_sums(weights).sum())
            if cumulative[-1] < top_p * total:
                continue
        nucleus = min(int(np.searchsorted(cumulative, top_p * total)) + 1, num_kept)
        return int(ids[order[_invert(cumulative[:nucleus], noise)]])
    raise AssertionError("the last threshold takes every token")


def _draw_any(weights: Float32Array, noise: float) -> int:
    """A token of the whole row: first the block it lies in, then its place there."""
    sums = _block_sums(weights).cumsum()
    target = noise * sums[-1]
    block = _invert(sums, noise)
    inside = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].astype(np.float64).cumsum()
    target -= sums[block - 1] if block else 0.0
    return block * SUM_BLOCK + _invert(inside, min(max(target / inside[-1], 0.0), 1.0))


def _block_sums(weights: Float32Array) -> Float64Array:
    """Sums of SUM_BLOCK weights each, the last one shorter."""
    num_whole = len(weights) // SUM_BLOCK * SUM_BLOCK
    sums = weights[:num_whole].reshape(-1, SUM_BLOCK).sum(axis=1).astype(np.float64)
    return sums if num_whole == len(weights) else np.append(sums, weights[num_whole:].sum(dtype=np.float64))


def _invert(cumulative: Float64Array, noise: float) -> int:
    """The first index whose cumulative sum exceeds `noise` times the total; never one of weight 0."""
    total = cumulative[-1]
    index = int(np.searchsorted(cumulative, noise * total, side="right"))
    return min(index, int(np.searchsorted(cumulative, total)))  # rounding must not lead beyond the last with a weight
