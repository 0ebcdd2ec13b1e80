"""token_logprobs: log-probabilities of one row of raw logits, computed from that row alone."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.step import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: npt.NDArray[np.float32], token_id: int, num_top: int, token_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """Log-probabilities of one row [V] of raw logits; NaN where these are not finite. Beside the chosen token's, those
    of `token_ids`, or without any of the `num_top` most likely tokens."""
    largest = logits.max()
    if not np.isfinite(largest):
        return TokenLogprobs(math.nan, 0, [])
    log_total = largest + np.log(np.exp(logits - largest).sum())
    chosen = logits[token_id]
    rank = int(np.count_nonzero(logits > chosen)) + 1
    top: list[tuple[int, float]] = []
    if token_ids:
        top = [(i, float(logits[i] - log_total)) for i in token_ids]
    elif num_top:
        num_top = min(num_top, len(logits))
        ids = np.argpartition(logits, -num_top)[-num_top:]
        top = [(int(i), float(logits[i] - log_total)) for i in sorted(ids, key=lambda i: (-logits[i], i))]
    return TokenLogprobs(float(chosen - log_total), rank, top)
