"""SchedulerStats: what the scheduler tells those that watch it. Plain data."""

from msgspec import Struct

from octavo.core.step import FinishReason

__all__ = ["STEP_SIZES", "SchedulerStats"]

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's bounds for the tokens of a step."""


class SchedulerStats(Struct, frozen=True, kw_only=True, gc=False):
    """The state now, and totals since the start. num_received = num_waiting + num_running + sum of num_finished."""

    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    num_received: int
    num_finished: dict[FinishReason, int]
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache, at first admission."""
    prefix_cache_hits: int
    """Those of them that were found."""
    num_prompt_tokens: int
    """Prompt tokens of admitted requests."""
    num_generation_tokens: int
    """Accepted output tokens; never decreases."""
    num_unready: int = 0
    """Those that wait because a grammar is being compiled, and not for room."""
    num_steps_by_size: list[int] = []
    """Steps by the first of STEP_SIZES that is no less than their tokens; last, those with more."""
    num_step_tokens: int = 0
    """Tokens of all steps."""
    num_swap_preemptions: int = 0
    """Those of the preemptions that kept the request's blocks in the tier."""
    num_swapped: int = 0
    """Requests that wait, swapped out."""
    num_used_swap_blocks: int = 0
    """Blocks of the tier that requests hold; others may hold evicted prefixes."""
    num_swap_blocks: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_swapped_out: int = 0
    block_bytes: int = 0
    tier_prefix_cache_hits: int = 0
    """Those of `prefix_cache_hits` that only the tier held."""
    num_evicted_blocks: int = 0
    """Cached blocks that were given up for others."""
    num_predicted_tokens: int = 0
    """Output tokens expected, at their admission, of the requests that have ended by `stop` or `length`."""
    num_actual_tokens: int = 0
    """Output tokens of these."""
    num_mispredicted_tokens: int = 0
    """By how many the two differed, added up over these requests."""
