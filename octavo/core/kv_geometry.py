"""KVGeometry: how many blocks tokens take, and how many tokens blocks hold.

Arithmetic alone: knows no block's number.
"""

from dataclasses import dataclass
from functools import cached_property

from octavo.core.kv_groups import capacity_tokens, most_blocks, resident_share
from octavo.core.request import Request

__all__ = ["KVGeometry"]


@dataclass(frozen=True)
class KVGeometry:
    """The shape of a KV cache: a block table for each of `windows`, over one pool and a tier beyond it.

    A request whose tokens do not fit into the pool is *long*: in a group without a window it keeps at most a share of
    the pool, and its oldest blocks lie in the tier. Blocks that a window shows are in the pool.

        group without a window   [tier][tier][tier][pool][pool][pool]     at most `resident_share` in the pool
        group with a window      [null][null][null][null][pool][pool]     as many as the window shows
    """

    windows: tuple[int, ...]
    """How many latest positions each group's layers see, 0 for all."""
    block_size: int
    """Tokens a block."""
    num_blocks: int
    """Blocks of the pool."""
    max_step_tokens: int = 1
    """Most tokens of one request in a step."""
    num_tier_blocks: int = 0

    @cached_property
    def has_windows(self) -> bool:
        return any(self.windows)

    @cached_property
    def pool_tokens(self) -> int:
        """Tokens of one request that the pool holds without the tier."""
        return capacity_tokens(self.windows, self.num_blocks, self.block_size, self.max_step_tokens)

    @cached_property
    def capacity_tokens(self) -> int:
        """Tokens of one request that pool and tier hold; without groups, that a step holds."""
        return capacity_tokens(
            self.windows, self.num_blocks, self.block_size, self.max_step_tokens, self.num_tier_blocks
        )

    @cached_property
    def resident_share(self) -> int:
        """Blocks of the pool that a long request keeps in a group without a window; 0 where none can be long."""
        return resident_share(self.windows, self.num_blocks, self.block_size) if self.num_tier_blocks else 0

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_seen(self, window: int, position: int) -> int:
        """Index of the first block that a token in this position sees."""
        return max(position - window + 1, 0) // self.block_size if window else 0

    def is_long(self, request: Request) -> bool:
        """Whether the request needs more tokens than the pool holds, and a tier can hold the rest."""
        return self.num_tier_blocks > 0 and self.resident_share > 0 and request.num_kv_tokens > self.pool_tokens

    def most_resident(self, request: Request) -> int:
        """Blocks of the pool that the request may hold in a group without a window."""
        return self.resident_share if self.is_long(request) else self.blocks_of(request.num_tokens)

    def blocks_needed(self, request: Request) -> list[int]:
        """By group, the most blocks that the request's tokens take at once, from the first to the last step."""
        most_resident, num_tokens = self.most_resident(request), request.num_tokens
        step_tokens = min(self.max_step_tokens, most_resident * self.block_size)
        return [
            most_blocks(window, num_tokens, self.block_size, step_tokens) if window else most_resident
            for window in self.windows
        ]

    def num_slots(self, request: Request, num_tokens: int) -> int:
        """Slots of the pool that so many tokens of the request take in all groups, roughly: each keeps those in its
        window, or in the request's share."""
        num_tokens = max(num_tokens, 0)
        most = self.resident_share * self.block_size if self.is_long(request) else num_tokens
        return sum(min(num_tokens, window or most) for window in self.windows)

    def most_new_tokens(self, request: Request) -> int:
        """Tokens that one step may compute for a long request: what its share of the pool has room for."""
        return self.resident_share * self.block_size - request.num_computed_tokens % self.block_size
