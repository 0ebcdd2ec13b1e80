"""LengthPredictor: how long outputs will be, learned from those that ended; and the memory that running ones will need.

Knows numbers of tokens alone. Every function is O(1) in the number of observations.
"""

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["LengthPredictor", "predicted_peak"]

EDGES = tuple(int(16 * 2 ** (step / 4)) for step in range(65))
"""Where buckets of lengths begin, the first apart, which begins at 0: four an octave, up to a million tokens."""
PRIOR_HAZARD = 0.1
"""Share of outputs that end in a bucket, while nothing is known: half are then shorter than 46 tokens."""
WINDOW = 2048
"""Observations after which old ones count half."""


class LengthPredictor:
    """The running distribution of output lengths, as survival from bucket to bucket.

    An output that was cut off (by max_tokens, or its reader) says that outputs get at least so long, not where they
    end: the product-limit estimator (Kaplan and Meier, JASA 53, 1958) uses both. Lengths come in buckets of 19 %.

    Invariant: `_num_at_risk` never increases from bucket to bucket, and `_num_ended[b] <= _num_at_risk[b]`.
    """

    def __init__(self, quantile: float = 0.5) -> None:
        """`quantile` of the outputs that are as long as a request's already are at most as long as predicted."""
        self.quantile = quantile
        self._num_at_risk = [0.0] * (len(EDGES) + 1)
        self._num_ended = [0.0] * (len(EDGES) + 1)
        self._predicted: dict[int, int] = {}  # by the bucket of the present length; emptied when observations come

    def observe(self, num_tokens: int, is_cut_off: bool) -> None:
        """An output is over at this length."""
        bucket = bisect_right(EDGES, num_tokens)
        # One that was cut off was at risk of ending in the buckets that it left behind.
        for index in range(bucket + (not is_cut_off)):
            self._num_at_risk[index] += 1.0
        if not is_cut_off:
            self._num_ended[bucket] += 1.0
        self._predicted.clear()
        if self._num_at_risk[0] >= WINDOW:
            self._num_at_risk = [number / 2 for number in self._num_at_risk]
            self._num_ended = [number / 2 for number in self._num_ended]

    def predict(self, num_tokens: int, max_tokens: int) -> int:
        """The length at which an output that has `num_tokens` now will probably have ended: more than these, unless
        they are `max_tokens`, and never more than that."""
        bucket = bisect_right(EDGES, num_tokens)
        predicted = self._predicted.get(bucket)
        if predicted is None:
            predicted = self._predicted[bucket] = self._quantile_after(bucket)
        return min(max(predicted, num_tokens + 1), max_tokens)

    def _quantile_after(self, bucket: int) -> int:
        survival = 1.0
        for index in range(bucket, len(EDGES)):
            survival *= 1.0 - (self._num_ended[index] + PRIOR_HAZARD) / (self._num_at_risk[index] + 1.0)
            if survival <= 1.0 - self.quantile:
                return EDGES[index]
        return EDGES[-1]


def predicted_peak(loads: Iterable[tuple[int, int, int]]) -> int:
    """The most slots that requests will hold together, if each, given as (slots it holds, steps that it still takes,
    slots that it adds in each), lets go of all when it is done.

    The peak is at some request's end, when those that end with it or later have grown for as many steps.
    """
    peak = num_held = num_added = 0
    for num_slots, num_steps, num_per_step in sorted(loads, key=lambda load: -load[1]):
        num_held += num_slots
        num_added += num_per_step
        peak = max(peak, num_held + num_steps * num_added)
    return peak
