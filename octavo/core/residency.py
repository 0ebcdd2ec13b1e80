"""Residency: which blocks of running requests are in the tier, and what is copied there and back.

Only there where there is a tier. Knows blocks and counts; knows nothing of budgets, queues or bytes.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from octavo.core.block_pool import BlockPool
from octavo.core.block_tables import BlockTables, Tables, present
from octavo.core.block_tier import BlockTier
from octavo.core.kv_geometry import KVGeometry
from octavo.core.prefix_index import PrefixIndex
from octavo.core.request import Request
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.core.swap_cost import PreemptionChoice, SwapCost

__all__ = ["Residency", "TieredReferences"]

SPILLED_AT_LEAST = 8
"""Blocks that a sequence longer than the pool gives up at once: it idles for a step each time."""


class TieredReferences:
    """Counts references to blocks of the pool and of the tier alike."""

    def __init__(self, pool: BlockPool, tier: BlockTier) -> None:
        self._pool = pool
        self._tier = tier

    def share(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            (self._tier.blocks if self._tier.owns(block_id) else self._pool).share([block_id])

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            (self._tier.blocks if self._tier.owns(block_id) else self._pool).release([block_id])


class Residency:
    """Moves blocks between pool and tier. A request waits for the step that copies its blocks, and is in no other.

    What may become of a block of a request's table:

        in the pool ──swap_out, of a whole request──▶ in the tier, kept for the request until it goes on
                    ──spill, of a long request──────▶ in the tier, still in the table: attention reads it there
                    ──evicted, when it was free─────▶ in the tier, found by its key
        in the tier ──load, when a request opens────▶ in the pool, but for full blocks of a long request

    Invariant: a running request's entries in the tier are full blocks, in groups without a window.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        pool: BlockPool,
        tier: BlockTier,
        tables: BlockTables,
        index: PrefixIndex,
        cost: SwapCost,
    ) -> None:
        self.tier = tier
        self._cost = cost
        self._geometry = geometry
        self._pool = pool
        self._tables = tables
        self._index = index
        self._num_found: dict[int, int] = {}  # by request, tokens of its prefix that only the tier held

    def resident(self, block_ids: Iterable[int]) -> Iterator[int]:
        """Those of these blocks that are in the pool."""
        return (block_id for block_id in present(block_ids) if not self.tier.owns(block_id))

    # ---- opening

    def can_open(self, request: Request, prefix: Tables) -> bool:
        """Whether nothing that the request would share is being copied: in a step it will be in the pool."""
        swapped = self.tier.swapped(request.request_id)
        if swapped is not None and swapped.num_pending:
            return False
        return not self.tier.are_being_read(chain.from_iterable(prefix))

    def num_held(self, request: Request, prefix: Tables) -> int:
        """Tokens in the prefix, whose last block may have been swapped out before it was full."""
        num_blocks, swapped = len(prefix[0]), self.tier.swapped(request.request_id)
        if swapped is None or num_blocks != len(swapped.tables[0]):
            return num_blocks * self._geometry.block_size
        has_its_tail = any(kept[-1] == held[-1] for kept, held in zip(swapped.tables, prefix, strict=True))
        return swapped.num_tokens if has_its_tail else num_blocks * self._geometry.block_size

    def load(self, request: Request, tables: Tables, num_tokens: int) -> int:
        """Ask for copies of what an opened request has in the tier, but for full blocks of a long one where there is no
        window. Returns the first block of these."""
        request_id, num_blocks = request.request_id, len(tables[0])
        num_found = max(sum(map(self.tier.owns, table)) for table in tables)
        self._num_found[request_id] = num_found * self._geometry.block_size
        self.tier.drop(request_id)
        num_loaded_from = num_blocks
        num_staying = num_tokens // self._geometry.block_size if self._geometry.is_long(request) else 0
        for group, (window, table) in enumerate(zip(self._geometry.windows, tables, strict=True)):
            for index in range(0 if window else num_staying, num_blocks):
                if self.tier.owns(table[index]):
                    num_loaded_from = min(num_loaded_from, index)
                    (destination,) = self._pool.allocate(1)
                    self.tier.load(request_id, group, index, table[index], destination)
                    self._tables.move(request_id, group, index, table[index], destination)
        return num_loaded_from

    def take_num_found(self, request_id: int) -> int:
        """Tokens of the request's prefix that only the tier held when it was opened last."""
        return self._num_found.pop(request_id, 0)

    # ---- preemption

    def can_swap_out(self, request: Request) -> bool:
        """Whether the tier has room for the request, as far as is known before it is tried."""
        return request.num_computed_tokens > 0 and self.tier.num_free > 0

    def swap_cost(self, request: Request) -> tuple[int, int]:
        """Tokens that would be computed anew if the request's blocks were freed, as nobody else holds them, and blocks
        that would be copied out, and back, to keep them."""
        tables, is_long = self._tables.of(request.request_id), self._geometry.is_long(request)
        num_lost, num_copies = len(tables[0]), 0
        for window, table in zip(self._geometry.windows, tables, strict=True):
            entries = list(present(table))
            own = [block_id for block_id in entries if not self._is_shared(block_id)]
            num_lost = min(num_lost, len(table) - len(entries) + len(own))
            num_copies += sum(not self.tier.owns(block_id) and not self._is_kept(block_id) for block_id in own)
            num_copies += 0 if is_long and not window else len(own)
        return num_lost * self._geometry.block_size, num_copies

    def cheaper_preemption(self, request: Request) -> PreemptionChoice:
        return self._cost.choose_blocks(*self.swap_cost(request))

    def observe(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step has returned: what computing and copying cost."""
        num_tokens = step.num_tokens
        is_full = 2 * num_tokens >= self._geometry.max_step_tokens
        num_copies = sum(max(copy) >= self._geometry.num_blocks for copy in step.copies)
        self._cost.observe(num_tokens, is_full, result.compute_s, num_copies, result.copy_s)

    def _is_shared(self, block_id: int) -> bool:
        return not self.tier.owns(block_id) and self._pool.ref_count(block_id) > 1

    def _is_kept(self, block_id: int) -> bool:
        key = self._pool.key(block_id)
        return key is not None and self.tier.blocks.find(key) is not None

    def swap_out(self, request: Request) -> bool:
        """Have the request's blocks copied to the tier: the copies come before anything is written. The caller frees
        them. Returns False, changing nothing, where the tier has no room."""
        tables, num_blocks = self._tables.of(request.request_id), self._geometry.num_blocks
        keys = [[self._pool.key(i) if 0 <= i < num_blocks else None for i in table] for table in tables]
        return self.tier.swap_out(request.request_id, tables, keys, request.num_computed_tokens)

    # ---- requests longer than the pool

    def spill(self, request: Request, num_new_tokens: int) -> bool:
        """Before a long request gets blocks for its next tokens: move its oldest full blocks to the tier, if else it
        would hold more than its share of the pool. Returns whether it must wait for the step that is being scheduled; a
        full tier has no room for any.
        """
        request_id, most = request.request_id, self._geometry.resident_share
        num_needed = self._geometry.blocks_of(request.num_computed_tokens + num_new_tokens)
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self._geometry.block_size
        waits = False
        for group, (window, table) in enumerate(zip(self._geometry.windows, self._tables.of(request_id), strict=True)):
            if window:
                continue
            resident = [index for index, block_id in enumerate(table) if not self.tier.owns(block_id)]
            num_excess = len(resident) + num_needed - len(table) - most
            if num_excess <= 0:
                continue
            num_spilled = max(num_excess, min(SPILLED_AT_LEAST, most // 2))
            for index in resident[:num_spilled]:
                if self._index.is_unwritten(table[index]):
                    waits = True
                elif index < num_full and self._has_tier_room():
                    self.tier.spill(request_id, group, index, table[index], self._pool.key(table[index]))
                    waits = True
        return waits

    def _has_tier_room(self) -> bool:
        """Whether a block of the tier can be had, at the expense of requests that are swapped out."""
        while not self.tier.num_free and not self.tier.is_closed and self.tier.drop_last_swapped():
            pass
        return self.tier.num_free > 0

    # ---- steps

    def settle(self, step_id: int, failed: Collection[int], is_at_fault: bool) -> dict[int, int]:
        """A step returned, without the copies at the indices in `failed`: bring tables up to date. Returns, by request,
        the tokens that those hold of which a block could not be read; the rest is to be computed anew."""
        num_good: dict[int, int] = {}
        for copy, is_done in self.tier.settle(step_id, failed, is_at_fault):
            assert copy.request_id is not None
            if self.tier.owns(copy.source):
                if not is_done:
                    num_good[copy.request_id] = min(num_good.get(copy.request_id, copy.index), copy.index)
            elif is_done:
                self._tables.move(copy.request_id, copy.group, copy.index, copy.source, copy.destination)
        for request_id, num_blocks in num_good.items():
            if self._geometry.has_windows:
                num_blocks = num_good[request_id] = 0  # blocks that a window had left behind would be needed again
            self._tables.cut(request_id, num_blocks)
            self._index.open(request_id, min(self._index.num_registered(request_id), num_blocks))
        return {request_id: num_blocks * self._geometry.block_size for request_id, num_blocks in num_good.items()}

    def check(self) -> None:
        """Assert the invariants."""
        self.tier.check(self._tables.all_tables())
