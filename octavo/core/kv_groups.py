"""KVGroup: layers that share a block table; and how many blocks a request's tokens take over all groups.

Knows layers, windows and counts; knows no tensors, requests or block numbers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KVGroup", "capacity_tokens", "group_layers", "most_blocks", "resident_share"]

MAX_TOKENS = 2**31 - 1
LEAST_SHARE = 4
"""Blocks: with fewer tokens in a step weights are read too often."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same window. A block of the group holds the tokens' keys and values of the layer in place i in
    the cache numbered i, which the layers in that place of all groups share."""

    layers: tuple[int, ...]
    window: int
    """How many latest positions a token sees, itself included; 0 for all."""


def group_layers(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Group layers by their windows, one entry a layer, so that any block of the pool can serve any group.

    A group has as many layers as the kind of which there are fewest; only the last group of a kind may have fewer, and
    then leaves the caches it does not need unused in its blocks.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window or 0, []).append(layer)
    size = min(map(len, kinds.values()), default=1)
    return tuple(
        KVGroup(tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


def most_blocks(window: int, num_tokens: int, block_size: int, step_tokens: int) -> int:
    """The most blocks that a group with this window holds at once, for a request of `num_tokens` that is computed
    `step_tokens` at a time at most: those of a step, and those that its first token sees."""
    num_blocks = -(-num_tokens // block_size)
    return min(num_blocks, -(-(window - 1 + step_tokens) // block_size) + 1) if window else num_blocks


def resident_share(windows: Sequence[int], num_blocks: int, block_size: int) -> int:
    """Blocks that a request longer than a pool of so many keeps there in each group without a window, and the most that
    a step writes in any: with those that the windows show half of the pool, so that others run beside it, but no less
    than a few if there is room. 0 where there is none for one."""
    num_seen = sum(most_blocks(window, MAX_TOKENS, block_size, 0) for window in windows if window)
    of_half, of_all = ((part - num_seen) // len(windows) for part in (num_blocks // 2, num_blocks))
    return max(of_half, min(of_all, LEAST_SHARE), 0)


def capacity_tokens(
    windows: Sequence[int], num_blocks: int, block_size: int, step_tokens: int, num_tier_blocks: int = 0
) -> int:
    """Tokens of one request that the whole pool holds, in whole blocks, if its groups have these windows; or pool and
    tier together, which takes the blocks that the windows have no need of. Without groups, and so without a pool: what
    a step holds."""
    if not windows:
        return step_tokens
    share = resident_share(windows, num_blocks, block_size) if num_tier_blocks else 0
    if share:
        num_blocks += num_tier_blocks
        step_tokens = min(step_tokens, share * block_size)

    def needed(blocks_per_group: int) -> int:
        num_tokens = blocks_per_group * block_size
        return sum(most_blocks(window, num_tokens, block_size, step_tokens) for window in windows)

    return (bisect_right(range(MAX_TOKENS // block_size), num_blocks, key=needed) - 1) * block_size
