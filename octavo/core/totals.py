"""Totals: what a scheduler has counted since the start, and the stats that are made of it."""

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.core.forecast import Forecast
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.scheduler_stats import STEP_SIZES, SchedulerStats
from octavo.core.step import FinishReason
from octavo.core.swap_cost import PreemptionChoice

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    received: int = 0
    """Requests."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    preemptions: dict[PreemptionChoice, int] = field(default_factory=lambda: {"recompute": 0, "swap": 0})
    prompt_tokens: int = 0
    """Of requests that were admitted."""
    queried_tokens: int = 0
    """Those of them that were looked up in the prefix cache."""
    cached_tokens: int = 0
    tier_cached_tokens: int = 0
    generation_tokens: int = 0
    """Accepted. Falls where a reader of the output takes some back."""
    generation_tokens_shown: int = 0
    steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    step_tokens: int = 0

    def count_step(self, num_tokens: int) -> None:
        self.steps_by_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        self.step_tokens += num_tokens

    def count_cached(self, request: Request, num_tier_tokens: int, is_looked_up: bool) -> None:
        """What a request found in the cache when it was scheduled first, and how much of it in the tier alone."""
        self.queried_tokens += request.num_prompt_tokens if is_looked_up else 0
        self.cached_tokens += request.num_computed_tokens
        self.tier_cached_tokens += min(num_tier_tokens, request.num_computed_tokens)

    def stats(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        forecast: Forecast,
        num_waiting: int,
        num_running: int,
        num_unready: int,
    ) -> SchedulerStats:
        self.generation_tokens_shown = max(self.generation_tokens_shown, self.generation_tokens)  # may pause, not fall
        tier = None if kv.residency is None else kv.residency.tier
        return SchedulerStats(
            num_waiting=num_waiting,
            num_running=num_running,
            num_unready=num_unready,
            num_steps_by_size=list(self.steps_by_size),
            num_step_tokens=self.step_tokens,
            num_used_blocks=kv.pool.num_used,
            num_blocks=config.num_blocks,
            num_received=self.received,
            num_finished=dict(self.finished),
            num_preemptions=sum(self.preemptions.values()),
            num_swap_preemptions=self.preemptions["swap"],
            num_swapped=tier.num_swapped if tier is not None else 0,
            num_used_swap_blocks=tier.num_used if tier is not None else 0,
            num_swap_blocks=config.num_swap_blocks,
            num_blocks_swapped_in=tier.num_blocks_in if tier is not None else 0,
            num_blocks_swapped_out=tier.num_blocks_out if tier is not None else 0,
            block_bytes=config.block_bytes,
            prefix_cache_queries=self.queried_tokens,
            prefix_cache_hits=self.cached_tokens,
            tier_prefix_cache_hits=self.tier_cached_tokens,
            num_prompt_tokens=self.prompt_tokens,
            num_generation_tokens=self.generation_tokens_shown,
            num_evicted_blocks=kv.pool.num_evicted,
            num_predicted_tokens=forecast.num_predicted_tokens,
            num_actual_tokens=forecast.num_actual_tokens,
            num_mispredicted_tokens=forecast.num_mispredicted_tokens,
        )
