"""KVCacheManager: every request's block tables, and which blocks a new request can share.

The only writer of tables. Knows tokens and blocks; knows nothing of steps, budgets or queues.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from octavo.core.block_pool import BlockPool, hash_block, root_hash
from octavo.core.eviction import EvictionPolicy
from octavo.core.request import Request

__all__ = ["BlockTables", "KVCacheManager"]

BlockTables = tuple[list[int], ...]
"""Block ids in the order of positions, one list a KV-cache group."""


class KVCacheManager:
    """Block tables over one pool.

    Invariants: a table holds exactly the blocks that `num_computed_tokens` tokens need, and only grows at its tail; a
    block carries a hash only when it is full of known tokens that were scheduled, and then it is the hash of those.
    With no groups, as for encoders, tables are empty and every request fits.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, eviction)
        self._no_blocks: BlockTables = tuple([] for _ in range(num_groups))
        self._tables: dict[int, BlockTables] = {}
        self._num_registered: dict[int, int] = {}  # leading blocks of each request's tables that were offered for reuse

    def match_prefix(self, request: Request) -> BlockTables:
        """The longest run of leading blocks that are in the cache, short of the last token: it must be computed."""
        prefix: BlockTables = tuple([] for _ in range(self.num_groups))
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return prefix
        self._extend_hashes(request)
        for block_hash in islice(request.block_hashes, (request.num_tokens - 1) // self.block_size):
            for group, block_ids in enumerate(prefix):
                block_id = self.pool.find((group, block_hash))
                if block_id is None:
                    return tuple(block_ids[: len(prefix[-1])] for block_ids in prefix)
                block_ids.append(block_id)
        return prefix

    def can_hold(self, request: Request, prefix: BlockTables, without: Sequence[Request] = ()) -> bool:
        """Whether the pool has blocks for all the request's tokens, sharing `prefix`, if `without` gave theirs up."""
        num_needed = self._num_blocks(request.num_tokens) * self.num_groups - self.num_used(prefix)
        return num_needed <= self.pool.num_free + self._num_freed(without, prefix)

    def num_used(self, prefix: BlockTables) -> int:
        """How many of these blocks are in a table."""
        return sum(not self.pool.is_free(block_id) for block_ids in prefix for block_id in block_ids)

    def _num_freed(self, requests: Sequence[Request], prefix: BlockTables) -> int:
        """Blocks outside `prefix` that no others than these requests refer to."""
        references = Counter[int]()
        for request in requests:
            references.update(chain.from_iterable(self._tables[request.request_id]))
        for block_ids in prefix:
            for block_id in block_ids:
                references.pop(block_id, None)
        return sum(count == self.pool.ref_count(block_id) for block_id, count in references.items())

    def open(self, request: Request, prefix: BlockTables) -> int:
        """Begin the request's tables with shared blocks. Returns how many tokens these hold."""
        assert request.request_id not in self._tables
        for block_ids in prefix:
            self.pool.share(block_ids)
        self._tables[request.request_id] = tuple(list(block_ids) for block_ids in prefix)
        num_blocks = len(prefix[0]) if prefix else 0
        self._num_registered[request.request_id] = num_blocks
        return num_blocks * self.block_size

    def allocate(self, request: Request, num_new_tokens: int) -> BlockTables | None:
        """Grow the tables by what the next tokens need. Returns the new block ids; None, changing nothing, if the pool
        has too few."""
        tables = self._tables[request.request_id]
        if not tables:
            return self._no_blocks
        num_new = self._num_blocks(request.num_computed_tokens + num_new_tokens) - len(tables[0])
        if not num_new:
            return self._no_blocks
        if num_new * self.num_groups > self.pool.num_free:
            return None
        new_block_ids = tuple(self.pool.allocate(num_new) for _ in tables)
        for table, block_ids in zip(tables, new_block_ids, strict=True):
            table.extend(block_ids)
        return new_block_ids

    def register_full_blocks(self, request: Request) -> None:
        """Offer for reuse the blocks that became full of known, scheduled tokens."""
        num_computed, num_known = request.num_computed_tokens, len(request.token_ids)
        num_full = (num_computed if num_computed < num_known else num_known) // self.block_size
        num_registered = self._num_registered[request.request_id]
        if num_full <= num_registered or not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        for group, table in enumerate(self._tables[request.request_id]):
            for index in range(num_registered, num_full):
                self.pool.register(table[index], (group, request.block_hashes[index]))
        self._num_registered[request.request_id] = num_full

    def free(self, request: Request) -> None:
        """Give up the request's blocks, if it has any; its last ones will be evicted before its first."""
        self._num_registered.pop(request.request_id, None)
        for table in self._tables.pop(request.request_id, ()):
            self.pool.release(reversed(table))

    def block_ids(self, request_id: int, from_position: int = 0) -> set[int]:
        """The request's blocks that hold its tokens from this position on."""
        first = from_position // self.block_size
        return {block_id for table in self._tables[request_id] for block_id in islice(table, first, None)}

    def tables(self, request: Request) -> BlockTables:
        """A copy of the request's tables."""
        return tuple(list(table) for table in self._tables[request.request_id])

    def forget_hashes(self, block_ids: Iterable[int]) -> None:
        """Never again share these blocks: their content can't be trusted."""
        for block_id in block_ids:
            self.pool.forget(block_id)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request) -> None:
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(hash_block(parent, request.token_ids[start : start + size]))

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants, `requests` being all that may hold blocks, by id."""
        self.pool.check(table for tables in self._tables.values() for table in tables)
        assert self._tables.keys() == self._num_registered.keys() <= requests.keys()
        for request_id, tables in self._tables.items():
            request = requests[request_id]
            for group, table in enumerate(tables):
                assert len(table) == self._num_blocks(request.num_computed_tokens)
                assert len(set(table)) == len(table)
                if request.finish_reason is None:
                    self._check_keys(request, group, table)

    def _check_keys(self, request: Request, group: int, table: list[int]) -> None:
        """Only blocks that are full of known, scheduled tokens carry a key, and it is the key of these."""
        keys, num_known = list(map(self.pool.key, table)), min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_known // self.block_size
        assert not any(keys[num_full:])
        pairs = zip(keys, request.block_hashes[:num_full], strict=False)
        assert all(key is None or ((key[1] is own or key[1] == own) and key[0] == group) for key, own in pairs)
        assert len(request.block_hashes) >= num_full or not any(keys[len(request.block_hashes) : num_full])
