"""KVCacheManager: the KV cache as the scheduler sees it: tables, what can be shared, and the tier where there is one.

Knows tokens and blocks; knows nothing of budgets or queues.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from octavo.core.block_pool import NULL_BLOCK, BlockPool, hash_block
from octavo.core.block_tables import BlockTables, Tables, present
from octavo.core.block_tier import BlockTier
from octavo.core.eviction import EvictionPolicy
from octavo.core.kv_geometry import KVGeometry
from octavo.core.prefix_index import HashBlock, PrefixIndex
from octavo.core.request import Request
from octavo.core.residency import Residency, TieredReferences
from octavo.core.swap_cost import SwapCost

__all__ = ["NULL_BLOCK", "KVCacheManager"]


class KVCacheManager:
    """One pool, a table for each group of layers and request, an index of prefixes, and a tier beyond the pool.

    With no groups, as for encoders, tables are empty and every request fits. Each part states its own invariants.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        enable_prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
        swap_cost: SwapCost | None = None,
        hash_block: HashBlock = hash_block,
    ) -> None:
        """`swap_cost`: of a tier; without it every block that the pool evicts is worth copying."""
        self.geometry = geometry
        cost = swap_cost if swap_cost is not None else SwapCost(1.0, 1.0)
        tier = BlockTier(geometry.num_tier_blocks, geometry.num_blocks) if geometry.num_tier_blocks else None
        keeps_evicted = cost.choose_blocks(geometry.block_size, 2) == "swap"
        on_evict = tier.evict if tier is not None and keeps_evicted else None
        self.pool = BlockPool(geometry.num_blocks, eviction, on_evict)
        references = TieredReferences(self.pool, tier) if tier is not None else self.pool
        self.tables = BlockTables(geometry, self.pool, references)
        self.index = PrefixIndex(geometry, self.pool, tier, enable_prefix_caching, hash_block)
        self.residency = None
        if tier is not None:
            self.residency = Residency(geometry, self.pool, tier, self.tables, self.index, cost)

    # ---- admission

    def match_prefix(self, request: Request) -> Tables:
        """The longest prefix whose blocks the request can share. Tables that are not to be changed."""
        return self.index.match(request)

    def can_hold(
        self, request: Request, prefix: Tables, without: Sequence[Request] = (), num_reserved: int = 0
    ) -> bool:
        """Whether the pool has blocks for all the request's tokens, as many as it holds at once, sharing `prefix`, if
        `without` gave theirs up and `num_reserved` were others'; and nothing that it would share is being copied.

            what it needs     [null, left behind][ found in the pool or elsewhere ][ to be computed         ]
            takes a block      no                 only if nobody else refers to it  yes
        """
        num_new = num_reserved
        for most, block_ids in zip(self.geometry.blocks_needed(request), prefix, strict=True):
            num_new += min(most, self.geometry.blocks_of(request.num_tokens) - block_ids.count(NULL_BLOCK))
        if not without and num_new - sum(map(len, prefix)) > self.pool.num_free:
            return False  # not even if all of the prefix were in others' use
        if self.residency is not None and not self.residency.can_open(request, prefix):
            return False
        return num_new - self.num_used(prefix) <= self.pool.num_free + self._num_freed(without, prefix)

    def num_used(self, prefix: Tables) -> int:
        """How many of these blocks are in the pool, in a table."""
        return sum(self.pool.num_used_of(self._resident(block_ids)) for block_ids in prefix)

    def _resident(self, block_ids: Iterable[int]) -> Iterator[int]:
        return present(block_ids) if self.residency is None else self.residency.resident(block_ids)

    def _num_freed(self, requests: Sequence[Request], prefix: Tables) -> int:
        """Blocks of the pool outside `prefix` that no others than these requests refer to."""
        if not requests:
            return 0
        references = Counter[int]()
        for request in requests:
            references.update(self._resident(chain.from_iterable(self.tables.of(request.request_id))))
        for block_id in chain.from_iterable(prefix):
            references.pop(block_id, None)
        return sum(count == self.pool.ref_count(block_id) for block_id, count in references.items())

    def open(self, request: Request, prefix: Tables) -> int:
        """Begin the request's tables with shared blocks. Returns how many tokens these hold: some of them only when the
        copies that this asks for are done (`settle`)."""
        num_blocks = len(prefix[0]) if prefix else 0
        num_tokens = num_blocks * self.geometry.block_size
        if self.residency is None or not prefix:
            self.tables.open(request.request_id, prefix)
        else:
            num_tokens = self.residency.num_held(request, prefix)
            tables = self.tables.open(request.request_id, prefix)
            num_blocks = self.residency.load(request, tables, num_tokens)
        self.index.open(request.request_id, num_blocks)
        return num_tokens

    def is_loading(self, request: Request, prefix: Tables) -> bool:
        """Whether `open` asked for copies of blocks of this prefix."""
        return self.residency is not None and self.tables.of(request.request_id) != prefix

    # ---- running requests

    def allocate(self, request: Request, num_new_tokens: int) -> Tables | None:
        """Grow the request's tables; None, changing nothing, if the pool has too few blocks."""
        return self.tables.allocate(request, num_new_tokens)

    def register_full_blocks(self, request: Request, are_written: bool = True) -> None:
        """Offer for reuse the blocks that became full of known, scheduled tokens."""
        self.index.register(request, self.tables.of(request.request_id), are_written)

    def settle_drafts(self, request: Request, num_tokens: int) -> None:
        """The step that verifies the request's drafts has returned, with so many tokens accepted: one more than there
        were good drafts. The others are taken back.

            scheduled    [ ... last known ][ d1 ][ d2 ][ d3 ]
            accepted                         d1    x            two tokens: the first draft, and x for the second
            computed     [ ... last known ][ d1 ]               blocks beyond are given up; x is the gap
        """
        num_rejected = len(request.draft_token_ids) + 1 - num_tokens
        request.draft_token_ids = []
        if num_rejected:
            request.num_computed_tokens -= num_rejected
            self.tables.take_back(request)

    def fork(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Give each first request, in place of what it has, the tables of the second; all at once."""
        ids = [(request.request_id, source.request_id) for request, source in forks]
        registered = [self.index.num_registered(source_id) for _, source_id in ids]
        hashes = [list(self.index.known_hashes(source_id)) for _, source_id in ids]
        self.tables.fork(forks, self.free)
        for (request_id, _), num_registered, known in zip(ids, registered, hashes, strict=True):
            self.index.open(request_id, num_registered)
            self.index.set_hashes(request_id, known)

    def free_unseen(self, request: Request, position: int) -> None:
        """Give up the blocks that have fallen out of their windows: no token before this position is to be computed."""
        self.tables.free_unseen(request, position)

    def free(self, request: Request) -> None:
        """Give up the request's blocks, if it has any, and what the tier keeps of it."""
        self.index.close(request.request_id)
        self.tables.free(request.request_id)
        if self.residency is not None:
            self.residency.tier.drop(request.request_id)

    def release(self, request: Request) -> None:
        """The request is over."""
        self.free(request)
        self.index.drop(request.request_id)

    def swap_out(self, request: Request) -> bool:
        """Have the request's blocks copied to the tier, and free them. Returns False, changing nothing, where that is
        not possible."""
        if self.residency is None or not self.residency.swap_out(request):
            return False
        self.index.close(request.request_id)
        self.tables.free(request.request_id)
        return True

    # ---- steps

    @property
    def has_new_copies(self) -> bool:
        """Whether the tier asks for copies in the next step."""
        return self.residency is not None and self.residency.tier.has_new_copies

    def begin_step(self, step_id: int) -> list[tuple[int, int]]:
        """What has been scheduled is a step. Returns the copies that it does before anything else, in order: those of
        the tier, then those on write."""
        self.index.begin_step()
        copies = self.tables.take_copies()
        return copies if self.residency is None else self.residency.tier.begin(step_id) + copies

    def settle(self, step_id: int, failed: Collection[int], is_at_fault: bool) -> dict[int, int]:
        """A step returned, without the copies at the indices in `failed`. Returns, by request, how many tokens are left
        of those whose blocks could not be read."""
        return {} if self.residency is None else self.residency.settle(step_id, failed, is_at_fault)

    @property
    def is_tier_closed(self) -> bool:
        """Whether the tier failed, so that nothing is copied to it any more."""
        return self.residency is not None and self.residency.tier.is_closed

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants, `requests` being all that may hold blocks, by id."""
        self.pool.check(list(self._resident(table)) for table in self.tables.all_tables())
        self.tables.check(requests)
        opened = {request_id: request for request_id, request in requests.items() if request_id in self.tables}
        self.index.check(opened, self.tables.of)
        if self.residency is not None:
            self.residency.check()
