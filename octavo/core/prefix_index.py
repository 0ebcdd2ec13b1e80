"""PrefixIndex: which blocks a request's tokens can be found by, and which it can share.

Knows tokens, hashes and keys; writes no table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.block_pool import NULL_BLOCK, BlockKey, BlockPool, root_hash
from octavo.core.block_tables import Tables
from octavo.core.block_tier import BlockTier, SwappedTables
from octavo.core.kv_geometry import KVGeometry
from octavo.core.request import Request

__all__ = ["HashBlock", "PrefixIndex"]

HashBlock = Callable[[bytes, Sequence[int]], bytes]
"""(parent's hash, the block's tokens) -> the block's hash."""


@dataclass(frozen=True, slots=True)
class _Match:
    """The last match. It holds until a block is found, or lost, by a key that was looked for."""

    request_id: int
    num_tokens: int
    swapped: SwappedTables | None
    num_pending: int
    num_changes: int
    tables: Tables


class PrefixIndex:
    """Invariants: a block carries a hash only when it is full of known tokens that were scheduled, and then it is the
    hash of those and all before them; `_unwritten` has the blocks that carry one before the step that is being
    scheduled writes them; of each open request the first `_num_registered` blocks were offered for reuse.

    A prefix can be shared where pool or tier have every block that the token after it sees. With groups of two kinds
    and blocks of four tokens (x: cached, -: lost):

        block                 0    1    2    3    4    5
        no window             x    x    x    x    x    -      so at most 5 blocks: all of them are needed
        window of 6           -    -    x    x    -    x      5 blocks: token 20 sees 15 to 20, block 4 is lost
                                                              4 blocks: token 16 sees 11 to 16, blocks 2 and 3 do

    The match is four blocks here: [0 1 2 3] in the first group, [null null 2 3] in the second. An entry that the window
    no longer shows is null whether or not its block is cached.
    """

    def __init__(
        self, geometry: KVGeometry, pool: BlockPool, tier: BlockTier | None, is_enabled: bool, hash_block: HashBlock
    ) -> None:
        self.is_enabled = is_enabled
        self._geometry = geometry
        self._pool = pool
        self._tier = tier
        self._hash_block = hash_block
        self._hashes: dict[int, list[bytes]] = {}
        self._num_registered: dict[int, int] = {}
        self._unwritten: set[int] = set()
        self._last: _Match | None = None

    # ---- hashes

    def hashes(self, request: Request) -> list[bytes]:
        """Chained hashes of the full blocks of the request's known tokens."""
        hashes = self._hashes.setdefault(request.request_id, [])
        size, token_ids = self._geometry.block_size, request.token_ids
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(self._hash_block(parent, token_ids[start : start + size]))
        return hashes

    def known_hashes(self, request_id: int) -> Sequence[bytes]:
        """Those that were computed so far."""
        return self._hashes.get(request_id, ())

    def set_hashes(self, request_id: int, hashes: Sequence[bytes]) -> None:
        """The request begins with the tokens of another, whose hashes these are."""
        self._hashes[request_id] = list(hashes)

    def drop(self, request_id: int) -> None:
        """The request is over."""
        self._hashes.pop(request_id, None)

    # ---- blocks that can be found

    def open(self, request_id: int, num_shared_blocks: int) -> None:
        """The request begins with so many blocks that are found already."""
        self._num_registered[request_id] = num_shared_blocks

    def close(self, request_id: int) -> None:
        self._num_registered.pop(request_id, None)

    def num_registered(self, request_id: int) -> int:
        return self._num_registered[request_id]

    def register(self, request: Request, tables: Tables, are_written: bool) -> None:
        """Offer for reuse the blocks that became full of known, scheduled tokens. Not written yet: the step that is
        being scheduled will write them."""
        num_computed, num_known = request.num_computed_tokens, len(request.token_ids)
        num_full = (num_computed if num_computed < num_known else num_known) // self._geometry.block_size
        num_registered = self._num_registered[request.request_id]
        if num_full <= num_registered or not self.is_enabled:
            return
        hashes, num_pool_blocks = self.hashes(request), self._geometry.num_blocks
        for group, table in enumerate(tables):
            for index in range(num_registered, num_full):
                if NULL_BLOCK < table[index] < num_pool_blocks:
                    self._pool.register(table[index], (group, hashes[index]))
                    if not are_written:
                        self._unwritten.add(table[index])
        self._num_registered[request.request_id] = num_full

    def is_unwritten(self, block_id: int) -> bool:
        return block_id in self._unwritten

    def begin_step(self) -> None:
        """What has been scheduled is a step, and will be written before any later one."""
        self._unwritten.clear()

    # ---- matching

    def match(self, request: Request) -> Tables:
        """The longest prefix in whole blocks, short of the last token, that need not be computed: of one that was
        swapped out, to its last token."""
        swapped = self._tier.swapped(request.request_id) if self._tier is not None else None
        num_pending = swapped.num_pending if swapped is not None else 0
        state = (request.request_id, request.num_tokens, swapped, num_pending, self._num_changes())
        last = self._last
        if last is not None and state == (
            last.request_id,
            last.num_tokens,
            last.swapped,
            last.num_pending,
            last.num_changes,
        ):
            return last.tables
        hashes: list[bytes] = []
        if self.is_enabled and not request.skips_prefix_cache:
            hashes = self.hashes(request)[: (request.num_tokens - 1) // self._geometry.block_size]
        watched: set[BlockKey] = set()
        tables = self._match(request, hashes, swapped, watched)
        self._pool.watch(watched)
        if self._tier is not None:
            self._tier.blocks.pool.watch(watched)
        self._last = _Match(*state[:-1], self._num_changes(), tables)
        return tables

    def _num_changes(self) -> int:
        return self._pool.num_changes + (self._tier.blocks.pool.num_changes if self._tier is not None else 0)

    def _match(
        self, request: Request, hashes: Sequence[bytes], swapped: SwappedTables | None, watched: set[BlockKey]
    ) -> Tables:
        """`watched` takes the keys that were looked for."""
        geometry = self._geometry
        windows, size = geometry.windows, geometry.block_size
        tables: Tables = tuple([] for _ in windows)
        num_kept = len(swapped.tables[0]) if swapped is not None else 0
        num_reusable = num_tokens = num_resident = 0
        most_resident = geometry.most_resident(request) * windows.count(0)
        last_missing = [-1] * len(windows)
        for index in range(max(len(hashes), num_kept)):
            end = (index + 1) * size
            for group, table in enumerate(tables):
                key = (group, hashes[index]) if index < len(hashes) else None
                if key is not None:
                    watched.add(key)
                kept = swapped.tables[group][index] if swapped is not None and index < num_kept else NULL_BLOCK
                block_id = self._find(key, kept)
                table.append(block_id)
                if block_id == NULL_BLOCK:
                    last_missing[group] = index
                elif block_id == kept and swapped is not None:  # it may not be full
                    end = min(end, swapped.num_tokens)
                if not windows[group]:
                    num_resident += block_id < geometry.num_blocks or end % size > 0
            if num_resident > most_resident or any(
                missing >= 0 and not window for missing, window in zip(last_missing, windows, strict=True)
            ):
                break
            first_seen = [geometry.first_seen(window, end) for window in windows]
            if all(map(int.__lt__, last_missing, first_seen)):
                num_reusable, num_tokens = index + 1, end
            if end % size:
                break
        return tuple(
            self._reusable(table, window, num_reusable, num_tokens)
            for table, window in zip(tables, windows, strict=True)
        )

    def _find(self, key: BlockKey | None, kept: int) -> int:
        """The block of this key in the pool, or that kept in this place, or that of the key in the tier, or null."""
        block_id = None if key is None else self._pool.find(key)
        if block_id is None and kept != NULL_BLOCK:
            return kept
        if block_id is None and key is not None and self._tier is not None:
            block_id = self._tier.blocks.find(key)
        return NULL_BLOCK if block_id is None else block_id

    def _reusable(self, table: list[int], window: int, num_blocks: int, num_tokens: int) -> list[int]:
        first = self._geometry.first_seen(window, num_tokens)
        return [NULL_BLOCK] * first + table[first:num_blocks]

    # ---- contents that can't be trusted

    def forget(self, block_ids: Iterable[int]) -> None:
        """Never again share these blocks, nor copies of them."""
        for block_id in block_ids:
            if block_id < self._geometry.num_blocks:
                key = self._pool.key(block_id)
                self._pool.forget(block_id)
            else:
                assert self._tier is not None
                key = self._tier.blocks.key(block_id)
            if key is not None and self._tier is not None:
                self._tier.forget(key)

    def forget_prefixes(self, request: Request) -> None:
        """Never again share a block with the request's tokens, its own or not, in its tables or out of the window."""
        for block_hash in self.known_hashes(request.request_id):
            for group in range(len(self._geometry.windows)):
                block_id = self._pool.find((group, block_hash))
                if block_id is not None:
                    self._pool.forget(block_id)
                if self._tier is not None:
                    self._tier.forget((group, block_hash))

    def check(self, requests: dict[int, Request], tables_of: Callable[[int], Tables]) -> None:
        """Assert the invariants, `requests` being those with tables."""
        assert self._num_registered.keys() == requests.keys()
        num_pool_blocks = self._geometry.num_blocks
        for request_id, request in requests.items():
            if request.finish_reason is not None:
                continue
            num_full = min(request.num_computed_tokens, len(request.token_ids)) // self._geometry.block_size
            hashes = self.known_hashes(request_id)[:num_full]
            for group, table in enumerate(tables_of(request_id)):
                num_null = table.count(NULL_BLOCK)
                assert max(table[num_full:], default=-1) < num_pool_blocks  # what is not full is in the pool
                keys = [self._pool.key(i) if i < num_pool_blocks else None for i in table[num_null:]]
                pairs = zip(keys, hashes[num_null:], strict=False)
                assert all(key is None or ((key[1] is own or key[1] == own) and key[0] == group) for key, own in pairs)
                assert not any(keys[max(len(hashes) - num_null, 0) :])
