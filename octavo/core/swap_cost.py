"""SwapCost: whether a preempted request is cheaper to recompute or to swap, from rates that others measure.

Reads no clock: the runner's outputs say how long steps and copies took.
"""

from typing import Literal

__all__ = ["PreemptionChoice", "PreemptionMode", "SwapCost", "cheaper_preemption"]

PreemptionChoice = Literal["recompute", "swap"]
PreemptionMode = Literal["auto", "recompute", "swap"]

RATE_WEIGHT = 0.2
"""Of the newest measurement in the running mean."""


def cheaper_preemption(
    num_tokens: int, num_copied_bytes: int, tokens_per_s: float, bytes_per_s: float, step_s: float = 0.0
) -> PreemptionChoice:
    """Recomputing takes the tokens' time; swapping that of the bytes copied out and in, and a step in which the request
    waits for its blocks, where a recomputed one begins at once. Recompute where they tie."""
    return "swap" if num_copied_bytes / bytes_per_s + step_s < num_tokens / tokens_per_s else "recompute"


class SwapCost:
    """Running means of two rates and of a step's time, and the choice that follows from them."""

    def __init__(self, tokens_per_s: float, bytes_per_s: float, block_bytes: int = 0) -> None:
        self.tokens_per_s = tokens_per_s
        """Prefill rate."""
        self.bytes_per_s = bytes_per_s
        """Rate of copies between the pool and the tier."""
        self.block_bytes = block_bytes
        self.step_s = 0.0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that was full enough for its rate to be that of a prefill."""
        self.tokens_per_s += RATE_WEIGHT * (num_tokens / seconds - self.tokens_per_s)

    def observe_step(self, seconds: float) -> None:
        self.step_s += RATE_WEIGHT * (seconds - self.step_s)

    def observe_copies(self, num_bytes: int, seconds: float) -> None:
        self.bytes_per_s += RATE_WEIGHT * (num_bytes / seconds - self.bytes_per_s)

    def observe(self, num_tokens: int, is_full: bool, compute_s: float, num_copies: int, copy_s: float) -> None:
        """A step with so many tokens, and copies of blocks between pool and tier; 0 seconds where nobody measured."""
        if num_copies and copy_s > 0:
            self.observe_copies(num_copies * self.block_bytes, copy_s)
        if num_tokens and compute_s > 0:
            self.observe_step(compute_s)
            if is_full:
                self.observe_prefill(num_tokens, compute_s)

    def choose_blocks(self, num_tokens: int, num_copied_blocks: int) -> PreemptionChoice:
        return self.choose(num_tokens, num_copied_blocks * self.block_bytes)

    def choose(self, num_tokens: int, num_copied_bytes: int) -> PreemptionChoice:
        """Of a request that would lose so many tokens, or have so many bytes copied."""
        return cheaper_preemption(num_tokens, num_copied_bytes, self.tokens_per_s, self.bytes_per_s, self.step_s)
