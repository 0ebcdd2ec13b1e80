"""KVCacheManager: every request's block tables, and which blocks a new request can share.

The only writer of tables. Knows tokens and blocks; knows nothing of budgets or queues.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice

from octavo.core.block_pool import NULL_BLOCK, BlockKey, BlockPool, hash_block, root_hash
from octavo.core.block_tier import BlockTier, Copy
from octavo.core.eviction import EvictionPolicy
from octavo.core.kv_groups import capacity_tokens, most_blocks, resident_share
from octavo.core.request import Request

__all__ = ["NULL_BLOCK", "BlockTables", "KVCacheManager"]

BlockTables = tuple[list[int], ...]
"""Block ids in the order of positions, one list a KV-cache group."""
SPILLED_AT_LEAST = 8
"""Blocks that a sequence longer than the pool gives up at once: it idles for a step each time."""


class KVCacheManager:
    """Block tables over one pool, a table for each of `group_windows`, and a tier of `num_tier_blocks` beyond the pool.

    Invariants: a table holds exactly the blocks that `num_computed_tokens` tokens need, and only grows at its tail; its
    null entries come first, and no token that is still to be computed sees them; a block carries a hash only when it is
    full of known tokens that were scheduled, and then it is the hash of those; one that is not full is in the pool. It
    may be shared by requests that forked; whoever is first to write on gets a copy (copy on write), so that all who
    share a block have the same tokens in it.
    With no groups, as for encoders, tables are empty and every request fits.

    A request whose tokens do not fit into the pool is *long*: in a group without a window it keeps at most a share of
    the pool, and its oldest blocks lie in the tier, where attention reads them. Those that a window shows are in the
    pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        group_windows: Sequence[int] = (0,),
        enable_prefix_caching: bool = True,
        max_step_tokens: int = 1,
        eviction: EvictionPolicy | None = None,
        num_tier_blocks: int = 0,
        keeps_evicted: bool = True,
    ) -> None:
        """`group_windows`: how many latest positions each group's layers see, 0 for all. `max_step_tokens`: the most
        tokens of one request in a step. `keeps_evicted`: whether blocks that the pool evicts are worth copying to the
        tier."""
        self.block_size = block_size
        self.group_windows = tuple(group_windows)
        self.num_groups = len(self.group_windows)
        self.has_windows = any(self.group_windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.max_step_tokens = max_step_tokens
        self.tier = BlockTier(num_tier_blocks, num_blocks)
        on_evict = self.tier.evict if num_tier_blocks and keeps_evicted else None
        self.pool = BlockPool(num_blocks, eviction, on_evict)
        self.pool_tokens = capacity_tokens(self.group_windows, num_blocks, block_size, max_step_tokens)
        """Tokens of one request that the pool holds without the tier."""
        self._resident_share = resident_share(self.group_windows, num_blocks, block_size) if num_tier_blocks else 0
        self._no_blocks: BlockTables = tuple([] for _ in self.group_windows)
        self._tables: dict[int, BlockTables] = {}
        self._unwritten: set[int] = set()  # blocks that are shared before the step that is being scheduled writes them
        self._num_registered: dict[int, int] = {}  # leading blocks of each request's tables that were offered for reuse
        self._replaced: set[int] = set()  # requests whose tables changed otherwise than at their tail
        self._forked: set[int] = set()  # requests whose last block others may share though it is not full
        self._copies: list[tuple[int, int]] = []  # to be made before the next step

    def match_prefix(self, request: Request) -> BlockTables:
        """The longest prefix in whole blocks, short of the last token, that need not be computed: of one that was
        swapped out, to its last token.

        That is one of which pool or tier have every block that the token after it sees: all of them in a group without
        a window, those within the window in another. Entries before these are null, whether or not they are cached.
        """
        tables: BlockTables = tuple([] for _ in self.group_windows)
        swapped = self.tier.swapped(request.request_id)
        kept = swapped.tables if swapped is not None else self._no_blocks
        hashes = self._reusable_hashes(request)
        num_reusable = num_tokens = num_resident = 0
        most_resident = self._most_resident(request) * self.group_windows.count(0)
        last_missing = [-1] * self.num_groups
        for index in range(max(len(hashes), len(kept[0]) if kept else 0)):
            end = (index + 1) * self.block_size
            for group, table in enumerate(tables):
                key = (group, hashes[index]) if index < len(hashes) else None
                block_id, is_partial = self._find(key, kept[group], index)
                table.append(block_id)
                if block_id == NULL_BLOCK:
                    last_missing[group] = index
                elif is_partial and swapped is not None:
                    end = min(end, swapped.num_tokens)
                if not self.group_windows[group]:
                    num_resident += not self.tier.owns(block_id) or end % self.block_size > 0
            if num_resident > most_resident or any(
                i >= 0 and not window for i, window in zip(last_missing, self.group_windows, strict=True)
            ):
                break
            first_seen = [self._first_seen(window, end) for window in self.group_windows]
            if all(map(int.__lt__, last_missing, first_seen)):
                num_reusable, num_tokens = index + 1, end
            if end % self.block_size:
                break
        return tuple(
            self._reusable(*pair, num_reusable, num_tokens) for pair in zip(tables, self.group_windows, strict=True)
        )

    def _reusable_hashes(self, request: Request) -> list[bytes]:
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return []
        self._extend_hashes(request)
        return request.block_hashes[: (request.num_tokens - 1) // self.block_size]

    def _reusable(self, table: list[int], window: int, num_blocks: int, num_tokens: int) -> list[int]:
        first = self._first_seen(window, num_tokens)
        return [NULL_BLOCK] * first + table[first:num_blocks]

    def _first_seen(self, window: int, position: int) -> int:
        """Index of the first block that a token in this position sees."""
        return max(position - window + 1, 0) // self.block_size if window else 0

    def _find(self, key: BlockKey | None, kept: Sequence[int], index: int) -> tuple[int, bool]:
        """The block of this key or else that kept in this place, or null; and whether it is the latter, which may not
        be full."""
        block_id = None if key is None else self.pool.find(key)
        if block_id is not None:
            return block_id, False
        if index < len(kept) and kept[index] != NULL_BLOCK:
            return kept[index], True
        block_id = None if key is None else self.tier.find(key)
        return (NULL_BLOCK if block_id is None else block_id), False

    def can_hold(self, request: Request, prefix: BlockTables, without: Sequence[Request] = ()) -> bool:
        """Whether the pool has blocks for all the request's tokens, as many as it holds at once, sharing `prefix`, if
        `without` gave theirs up; and nothing that it would share is being copied."""
        swapped = self.tier.swapped(request.request_id)
        if swapped is not None and swapped.num_pending:
            return False
        if any(self.tier.is_being_read(block_id) for block_id in chain.from_iterable(prefix)):
            return False  # in a step it will be in the pool
        num_tokens, num_needed = request.num_tokens, -self.num_used(prefix)
        most_resident = self._most_resident(request)
        step_tokens = min(self.max_step_tokens, most_resident * self.block_size)
        for window, block_ids in zip(self.group_windows, prefix, strict=True):
            most = most_blocks(window, num_tokens, self.block_size, step_tokens) if window else most_resident
            num_needed += min(most, self._num_blocks(num_tokens) - block_ids.count(NULL_BLOCK))
        return num_needed <= self.pool.num_free + self._num_freed(without, prefix)

    def num_used(self, prefix: BlockTables) -> int:
        """How many of these blocks are in the pool, in a table."""
        return sum(not self.pool.is_free(block_id) for block_id in self._resident(chain.from_iterable(prefix)))

    def _resident(self, block_ids: Iterable[int]) -> Iterator[int]:
        return filterfalse(self.tier.owns, _present(block_ids)) if self.tier.num_blocks else _present(block_ids)

    def _num_freed(self, requests: Sequence[Request], prefix: BlockTables) -> int:
        """Blocks of the pool outside `prefix` that no others than these requests refer to."""
        references = Counter[int]()
        for request in requests:
            references.update(self._resident(chain.from_iterable(self._tables[request.request_id])))
        for block_id in chain.from_iterable(prefix):
            references.pop(block_id, None)
        return sum(count == self.pool.ref_count(block_id) for block_id, count in references.items())

    def open(self, request: Request, prefix: BlockTables) -> int:
        """Begin the request's tables with shared blocks. Returns how many tokens these hold: some of them only when the
        copies that this asks for are done (`settle`). Of a long request full blocks stay in the tier, where there is no
        window."""
        assert request.request_id not in self._tables
        num_blocks = len(prefix[0]) if prefix else 0
        num_tokens, num_loaded_from = self._num_held(request, prefix), num_blocks
        tables = self._tables[request.request_id] = tuple(list(block_ids) for block_ids in prefix)
        for table in tables:
            self._share(table)
        self.tier.drop(request.request_id)
        num_staying = num_tokens // self.block_size if self.is_long(request) else 0
        for group, table in enumerate(tables):
            for index in range(0 if self.group_windows[group] else num_staying, num_blocks):
                if self.tier.owns(table[index]):
                    num_loaded_from = min(num_loaded_from, index)
                    (destination,) = self.pool.allocate(1)
                    self.tier.load(request.request_id, group, index, table[index], destination)
                    self.tier.release([table[index]])
                    table[index] = destination
        self._num_registered[request.request_id] = num_loaded_from
        return num_tokens

    def _num_held(self, request: Request, prefix: BlockTables) -> int:
        """Tokens in the prefix, whose last block may have been swapped out before it was full."""
        num_blocks, swapped = len(prefix[0]) if prefix else 0, self.tier.swapped(request.request_id)
        if swapped is None or num_blocks != len(swapped.tables[0]):
            return num_blocks * self.block_size
        has_its_tail = any(kept[-1] == held[-1] for kept, held in zip(swapped.tables, prefix, strict=True))
        return swapped.num_tokens if has_its_tail else num_blocks * self.block_size

    def allocate(self, request: Request, num_new_tokens: int) -> BlockTables | None:
        """Grow the tables by what the next tokens need, and copy a block that others share before they are written to
        it. Returns the new block ids; None, changing nothing, if the pool has too few."""
        tables = self._tables[request.request_id]
        if not tables:
            return self._no_blocks
        num_new = self._num_blocks(request.num_computed_tokens + num_new_tokens) - len(tables[0])
        is_forked = request.request_id in self._forked
        if not num_new and not is_forked:
            return self._no_blocks
        shared = self._shared_tails(request, tables) if is_forked else []
        if num_new * self.num_groups + len(shared) > self.pool.num_free:
            return None
        for table in shared:
            self._copy_tail(request.request_id, table)
        self._forked.discard(request.request_id)
        new_block_ids = tuple(self.pool.allocate(num_new) for _ in tables)
        for table, block_ids in zip(tables, new_block_ids, strict=True):
            table.extend(block_ids)
        return new_block_ids

    def _shared_tails(self, request: Request, tables: BlockTables) -> list[list[int]]:
        """The tables whose last block is shared though it is not full, so that the next token is written to it."""
        if not request.num_computed_tokens % self.block_size:
            return []
        shared = [table for table in tables if self.pool.ref_count(table[-1]) > 1]
        pending = [source for source, _ in self._copies] if shared else []
        return [table for table in shared if self.pool.ref_count(table[-1]) - pending.count(table[-1]) > 1]

    def _copy_tail(self, request_id: int, table: list[int]) -> None:
        (copy,) = self.pool.allocate(1)
        self._copies.append((table[-1], copy))  # with its reference to the source, lest that be reused before
        table[-1] = copy
        self._replaced.add(request_id)

    def take_replaced(self, request: Request) -> bool:
        """Whether the request's tables changed, since last asked, so that the runner must be given them anew."""
        is_replaced = request.request_id in self._replaced
        self._replaced.discard(request.request_id)
        return is_replaced

    def fork(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Give each first request, in place of what it has, the tables of the second; all at once."""
        sources = [(self.tables(source), self._num_registered[source.request_id]) for _, source in forks]
        for tables, _ in sources:
            for table in tables:
                self._share(table)
        for request, _ in forks:
            self.free(request)
        for (request, _), (tables, num_registered) in zip(forks, sources, strict=True):
            self._tables[request.request_id] = tables
            self._num_registered[request.request_id] = num_registered
            self._replaced.add(request.request_id)
        self._forked.update(request.request_id for pair in forks for request in pair)

    def register_full_blocks(self, request: Request, are_written: bool = True) -> None:
        """Offer for reuse the blocks that became full of known, scheduled tokens. Not written yet: the step that is
        being scheduled will write them."""
        num_computed, num_known = request.num_computed_tokens, len(request.token_ids)
        num_full = (num_computed if num_computed < num_known else num_known) // self.block_size
        num_registered = self._num_registered[request.request_id]
        if num_full <= num_registered or not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        for group, table in enumerate(self._tables[request.request_id]):
            for index in range(num_registered, num_full):
                if table[index] != NULL_BLOCK and not self.tier.owns(table[index]):
                    self.pool.register(table[index], (group, request.block_hashes[index]))
                    if not are_written:
                        self._unwritten.add(table[index])
        self._num_registered[request.request_id] = num_full

    def free_unseen(self, request: Request, position: int) -> None:
        """Give up the blocks that have fallen out of their windows: only steps that have returned had tokens before
        this position."""
        for window, table in zip(self.group_windows, self._tables[request.request_id], strict=True):
            for index in reversed(range(self._first_seen(window, position))):
                if table[index] == NULL_BLOCK:
                    break
                self.pool.release((table[index],))
                table[index] = NULL_BLOCK

    def free(self, request: Request) -> None:
        """Give up the request's blocks, if it has any; its last ones will be evicted before its first."""
        self._num_registered.pop(request.request_id, None)
        self._replaced.discard(request.request_id)
        self._forked.discard(request.request_id)
        for table in self._tables.pop(request.request_id, ()):
            self._release(table)
        self.tier.drop(request.request_id)

    # ---- the tier

    def num_tier_tokens(self, prefix: BlockTables) -> int:
        """Tokens of a prefix that only the tier holds."""
        return max((sum(map(self.tier.owns, block_ids)) for block_ids in prefix), default=0) * self.block_size

    def is_loading(self, request: Request, prefix: BlockTables) -> bool:
        """Whether `open` asked for copies of blocks of this prefix."""
        tables = self._tables[request.request_id]
        return any(table[: len(block_ids)] != block_ids for table, block_ids in zip(tables, prefix, strict=True))

    def is_long(self, request: Request) -> bool:
        """Whether the request needs more tokens than the pool holds, and a tier can hold the rest."""
        return self._resident_share > 0 and request.num_kv_tokens > self.pool_tokens

    def _most_resident(self, request: Request) -> int:
        """Blocks of the pool that the request may hold in a group without a window."""
        return self._resident_share if self.is_long(request) else self._num_blocks(request.num_tokens)

    def num_slots(self, request: Request, num_tokens: int) -> int:
        """Slots of the pool that so many tokens of the request take in all groups, roughly: each keeps those in its
        window, or in the request's share."""
        num_tokens = max(num_tokens, 0)
        most = self._resident_share * self.block_size if self.is_long(request) else num_tokens
        return sum(min(num_tokens, window or most) for window in self.group_windows)

    def most_new_tokens(self, request: Request) -> int:
        """Tokens that one step may compute for a long request: what its share of the pool has room for."""
        return self._resident_share * self.block_size - request.num_computed_tokens % self.block_size

    def can_swap_out(self, request: Request) -> bool:
        """Whether the tier has room for the request, as far as is known before it is tried."""
        return request.num_computed_tokens > 0 and self.tier.num_free > 0

    def swap_cost(self, request: Request) -> tuple[int, int]:
        """Tokens that would be computed anew if the request's blocks were freed, as nobody else holds them, and blocks
        that would be copied out, and back, to keep them."""
        tables, is_long = self._tables[request.request_id], self.is_long(request)
        num_lost, num_copies = len(tables[0]), 0
        for window, table in zip(self.group_windows, tables, strict=True):
            present = list(_present(table))
            own = [block_id for block_id in present if not self._is_shared(block_id)]
            num_lost = min(num_lost, len(table) - len(present) + len(own))
            num_copies += sum(not self.tier.owns(block_id) and not self._is_kept(block_id) for block_id in own)
            num_copies += 0 if is_long and not window else len(own)
        return num_lost * self.block_size, num_copies

    def _is_shared(self, block_id: int) -> bool:
        return not self.tier.owns(block_id) and self.pool.ref_count(block_id) > 1

    def _is_kept(self, block_id: int) -> bool:
        key = self.pool.key(block_id)
        return key is not None and self.tier.find(key) is not None

    def swap_out(self, request: Request) -> bool:
        """Have the request's blocks copied to the tier, and free them: the copies come first. Returns False, changing
        nothing, where the tier has no room."""
        tables = self._tables[request.request_id]
        keys = [[self.pool.key(i) if i in set(self._resident(t)) else None for i in t] for t in tables]
        if not self.tier.swap_out(request.request_id, tables, keys, request.num_computed_tokens):
            return False
        del self._num_registered[request.request_id]
        self._replaced.discard(request.request_id)
        self._forked.discard(request.request_id)
        for table in self._tables.pop(request.request_id):
            self._release(table)
        return True

    def spill(self, request: Request, num_new_tokens: int) -> bool:
        """Before a long request gets blocks for its next tokens: move its oldest full blocks to the tier, if else it
        would hold more than its share of the pool. Returns whether it must wait for the step that is being scheduled; a
        full tier has no room for any.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        tables, most = self._tables[request.request_id], self._resident_share
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        waits = False
        for group, (window, table) in enumerate(zip(self.group_windows, tables, strict=True)):
            if window:
                continue
            resident = [index for index, block_id in enumerate(table) if not self.tier.owns(block_id)]
            num_excess = len(resident) + self._num_blocks(num_tokens) - len(table) - most
            if num_excess <= 0:
                continue
            num_spilled = max(num_excess, min(SPILLED_AT_LEAST, most // 2))
            for index in resident[:num_spilled]:
                if table[index] in self._unwritten:
                    waits = True
                elif index < num_full and self._has_tier_room():
                    self.tier.spill(request.request_id, group, index, table[index], self.pool.key(table[index]))
                    waits = True
        return waits

    def _has_tier_room(self) -> bool:
        """Whether a block of the tier can be had, at the expense of requests that are swapped out."""
        while not self.tier.num_free and not self.tier.is_closed and self.tier.drop_last_swapped():
            pass
        return self.tier.num_free > 0

    def begin_step(self, step_id: int) -> list[tuple[int, int]]:
        """What has been scheduled is a step. Returns the copies that it does before anything else, in order: those of
        the tier, then those on write."""
        self._unwritten.clear()
        copies = self.tier.begin(step_id)
        if self._copies:
            self.pool.release(source for source, _ in self._copies)
            copies += self._copies
            self._copies = []
        return copies

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
                self._move(copy)
        for request_id, num_blocks in num_good.items():
            if self.has_windows:
                num_blocks = num_good[request_id] = 0  # blocks that a window had left behind would be needed again
            for table in self._tables[request_id]:
                self._release(table[num_blocks:])
                del table[num_blocks:]
            self._num_registered[request_id] = min(self._num_registered[request_id], num_blocks)
        return {request_id: num_blocks * self.block_size for request_id, num_blocks in num_good.items()}

    def _move(self, copy: Copy) -> None:
        assert copy.request_id is not None
        table = self._tables[copy.request_id][copy.group]
        assert table[copy.index] == copy.source
        table[copy.index] = copy.destination
        self.pool.release([copy.source])

    def _share(self, block_ids: Iterable[int]) -> None:
        for block_id in _present(block_ids):
            (self.tier if self.tier.owns(block_id) else self.pool).share([block_id])

    def _release(self, block_ids: Sequence[int]) -> None:
        """In reverse: of those that become free the last given is evicted first."""
        for block_id in _present(reversed(block_ids)):
            (self.tier if self.tier.owns(block_id) else self.pool).release([block_id])

    # ---- looking in

    def block_ids(self, request_id: int, from_position: int = 0) -> set[int]:
        """The request's blocks that hold its tokens from this position on."""
        first = from_position // self.block_size
        return {block_id for table in self._tables[request_id] for block_id in _present(islice(table, first, None))}

    def tables(self, request: Request) -> BlockTables:
        """A copy of the request's tables."""
        return tuple(list(table) for table in self._tables[request.request_id])

    def forget_hashes(self, block_ids: Iterable[int]) -> None:
        """Never again share these blocks, nor copies of them: their content can't be trusted."""
        for block_id in block_ids:
            key = self.tier.key(block_id) if self.tier.owns(block_id) else self.pool.key(block_id)
            if key is not None:
                self.tier.forget(key)
                if not self.tier.owns(block_id):
                    self.pool.forget(block_id)

    def forget_prefixes(self, request: Request) -> None:
        """Never again share a block with the request's tokens, its own or not, in its tables or out of the window."""
        for block_hash in request.block_hashes:
            for group in range(self.num_groups):
                block_id = self.pool.find((group, block_hash))
                if block_id is not None:
                    self.pool.forget(block_id)
                self.tier.forget((group, block_hash))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request) -> None:
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(hash_block(parent, request.token_ids[start : start + size]))

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants, `requests` being all that may hold blocks, by id."""
        tables_of_all = [table for tables in self._tables.values() for table in tables]
        self.pool.check(list(self._resident(table)) for table in tables_of_all)
        self.tier.check(tables_of_all)
        assert self._replaced <= self._tables.keys() == self._num_registered.keys() <= requests.keys()
        contents: dict[int, list[int]] = {}  # of blocks that are shared and not full
        for request_id, tables in self._tables.items():
            request = requests[request_id]
            for table in self._shared_tails(request, tables):
                assert request_id in self._forked
                content = [request.num_computed_tokens, *request.token_ids[: request.num_computed_tokens]]
                assert contents.setdefault(table[-1], content) == content
            for group, table in enumerate(tables):
                assert len(table) == self._num_blocks(request.num_computed_tokens)
                num_null = table.count(NULL_BLOCK)
                assert set(table[:num_null]) <= {NULL_BLOCK}
                last = self._first_seen(self.group_windows[group], request.num_computed_tokens)
                assert num_null <= last if request.num_steps_in_flight else num_null == last
                assert len(set(table[num_null:])) == len(table) - num_null
                if request.finish_reason is None:
                    self._check_keys(request, group, table, num_null)

    def _check_keys(self, request: Request, group: int, table: list[int], num_null: int) -> None:
        """Only blocks that are full of known, scheduled tokens carry a key, and it is the key of these."""
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        present = table[num_null:]
        if self.tier.num_blocks:
            assert not any(map(self.tier.owns, table[0 if self.group_windows[group] else num_full :]))
            present = [NULL_BLOCK if self.tier.owns(block_id) else block_id for block_id in present]
        keys = [None if block_id == NULL_BLOCK else self.pool.key(block_id) for block_id in present]
        hashes = request.block_hashes[num_null:num_full]
        pairs = zip(keys, hashes, strict=False)
        assert all(key is None or ((key[1] is own or key[1] == own) and key[0] == group) for key, own in pairs)
        assert not any(keys[len(hashes) :])


def _present(block_ids: Iterable[int]) -> Iterator[int]:
    return filter(NULL_BLOCK.__ne__, block_ids)
