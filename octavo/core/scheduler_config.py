"""SchedulerConfig: the scheduler's limits and policies, resolved. Plain data."""

from dataclasses import dataclass
from typing import Literal

from octavo.core.eviction import EvictionPolicyName
from octavo.core.kv_geometry import KVGeometry
from octavo.core.swap_cost import PreemptionMode

__all__ = ["AdmissionPolicy", "SchedulerConfig", "SchedulingPolicy"]

SchedulingPolicy = Literal["fcfs", "priority"]
AdmissionPolicy = Literal["predicted", "greedy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits, resolved."""

    max_num_seqs: int
    """Most requests running at once."""
    max_num_batched_tokens: int
    """Most tokens in a step: bounds the time between a running request's tokens. Each has one in every step, so no
    more requests than this run either."""
    num_blocks: int
    """KV-cache blocks, shared by all groups."""
    block_size: int
    """Tokens a block."""
    group_windows: tuple[int, ...] = (0,)
    """For each group of layers with a block table of its own, how many latest positions they see; 0 for all. No groups
    in encoders, which keep nothing between steps: a prompt is scheduled whole, in the first step whose budget has room
    for it."""
    enable_prefix_caching: bool = True
    kv_eviction_policy: EvictionPolicyName = "lru"
    seed: int = 0
    """Of the random eviction policy."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission_policy: AdmissionPolicy = "predicted"
    """Whether a request is admitted when the pool will probably hold it to its end, or when it holds it now."""
    num_swap_blocks: int = 0
    """Blocks of the second tier: for preempted requests, evicted prefixes and sequences longer than the pool."""
    preemption_mode: PreemptionMode = "auto"
    block_bytes: int = 0
    """Of one block in all layers."""
    prefill_tokens_per_s: float = 1.0
    """Before any step was measured."""
    copy_bytes_per_s: float = 1.0
    """Between pool and tier, before any copy was measured."""

    keeps_back_unsampled: bool = False
    """Whether a request's next step waits until its token has come, as stages of a pipeline need it."""
    sends_sampled_tokens: bool = False
    """Whether steps carry every token that is not of a prompt, for receivers that do not sample. Needs the former."""

    @property
    def kv_geometry(self) -> KVGeometry:
        return KVGeometry(
            self.group_windows, self.block_size, self.num_blocks, self.max_num_batched_tokens, self.num_swap_blocks
        )

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of one request that pool and tier hold; without a pool, that a step holds."""
        return self.kv_geometry.capacity_tokens
