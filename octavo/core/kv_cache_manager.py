"""KVCacheManager: every request's block tables, and which blocks a new request can share.

The only writer of tables. Knows tokens and blocks; knows nothing of steps, budgets or queues.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from octavo.core.block_pool import BlockPool, hash_block, root_hash
from octavo.core.eviction import EvictionPolicy
from octavo.core.kv_groups import most_blocks
from octavo.core.request import Request

__all__ = ["NULL_BLOCK", "BlockTables", "KVCacheManager"]

BlockTables = tuple[list[int], ...]
"""Block ids in the order of positions, one list a KV-cache group."""
NULL_BLOCK = -1
"""Stands in a table for a block that has fallen out of its group's window. Nothing reads there."""


class KVCacheManager:
    """Block tables over one pool, a table for each of `group_windows`.

    Invariants: a table holds exactly the blocks that `num_computed_tokens` tokens need, and only grows at its tail; its
    null entries come first, and no token that is still to be computed sees them; a block carries a hash only when it is
    full of known tokens that were scheduled, and then it is the hash of those.
    With no groups, as for encoders, tables are empty and every request fits.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        group_windows: Sequence[int] = (0,),
        enable_prefix_caching: bool = True,
        max_step_tokens: int = 1,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """`group_windows`: how many latest positions each group's layers see, 0 for all. `max_step_tokens`: the most
        tokens of one request in a step."""
        self.block_size = block_size
        self.group_windows = tuple(group_windows)
        self.num_groups = len(self.group_windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.max_step_tokens = max_step_tokens
        self.pool = BlockPool(num_blocks, eviction)
        self._no_blocks: BlockTables = tuple([] for _ in self.group_windows)
        self._tables: dict[int, BlockTables] = {}
        self._num_registered: dict[int, int] = {}  # leading blocks of each request's tables that were offered for reuse

    def match_prefix(self, request: Request) -> BlockTables:
        """The longest prefix in whole blocks, short of the last token, that need not be computed.

        That is one of which the cache has every block that the token after it sees: all of them in a group without a
        window, those within the window in another. Entries before these are null, whether or not they are cached.
        """
        tables: BlockTables = tuple([] for _ in self.group_windows)
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return tables
        self._extend_hashes(request)
        num_reusable = 0
        last_missing = [-1] * self.num_groups
        for index, block_hash in enumerate(islice(request.block_hashes, (request.num_tokens - 1) // self.block_size)):
            for group, table in enumerate(tables):
                block_id = self.pool.find((group, block_hash))
                table.append(NULL_BLOCK if block_id is None else block_id)
                if block_id is None:
                    last_missing[group] = index
            if any(i >= 0 and not window for i, window in zip(last_missing, self.group_windows, strict=True)):
                break
            first_seen = [self._first_seen(window, (index + 1) * self.block_size) for window in self.group_windows]
            if all(map(int.__lt__, last_missing, first_seen)):
                num_reusable = index + 1
        return tuple(self._reusable(*pair, num_reusable) for pair in zip(tables, self.group_windows, strict=True))

    def _reusable(self, table: list[int], window: int, num_blocks: int) -> list[int]:
        first = self._first_seen(window, num_blocks * self.block_size)
        return [NULL_BLOCK] * first + table[first:num_blocks]

    def _first_seen(self, window: int, position: int) -> int:
        """Index of the first block that a token in this position sees."""
        return max(position - window + 1, 0) // self.block_size if window else 0

    def can_hold(self, request: Request, prefix: BlockTables, without: Sequence[Request] = ()) -> bool:
        """Whether the pool has blocks for all the request's tokens, as many as it holds at once, sharing `prefix`, if
        `without` gave theirs up."""
        num_needed = -self.num_used(prefix)
        for window, block_ids in zip(self.group_windows, prefix, strict=True):
            most = most_blocks(window, request.num_tokens, self.block_size, self.max_step_tokens)
            num_needed += min(most, self._num_blocks(request.num_tokens) - block_ids.count(NULL_BLOCK))
        return num_needed <= self.pool.num_free + self._num_freed(without, prefix)

    def num_used(self, prefix: BlockTables) -> int:
        """How many of these blocks are in a table."""
        return sum(not self.pool.is_free(block_id) for block_id in _present(chain.from_iterable(prefix)))

    def _num_freed(self, requests: Sequence[Request], prefix: BlockTables) -> int:
        """Blocks outside `prefix` that no others than these requests refer to."""
        references = Counter[int]()
        for request in requests:
            references.update(_present(chain.from_iterable(self._tables[request.request_id])))
        for block_id in chain.from_iterable(prefix):
            references.pop(block_id, None)
        return sum(count == self.pool.ref_count(block_id) for block_id, count in references.items())

    def open(self, request: Request, prefix: BlockTables) -> int:
        """Begin the request's tables with shared blocks. Returns how many tokens these hold."""
        assert request.request_id not in self._tables
        for block_ids in prefix:
            self.pool.share(_present(block_ids))
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
                if table[index] != NULL_BLOCK:
                    self.pool.register(table[index], (group, request.block_hashes[index]))
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
        for table in self._tables.pop(request.request_id, ()):
            self.pool.release(_present(reversed(table)))

    def block_ids(self, request_id: int, from_position: int = 0) -> set[int]:
        """The request's blocks that hold its tokens from this position on."""
        first = from_position // self.block_size
        return {block_id for table in self._tables[request_id] for block_id in _present(islice(table, first, None))}

    def tables(self, request: Request) -> BlockTables:
        """A copy of the request's tables."""
        return tuple(list(table) for table in self._tables[request.request_id])

    def forget_hashes(self, block_ids: Iterable[int]) -> None:
        """Never again share these blocks: their content can't be trusted."""
        for block_id in block_ids:
            self.pool.forget(block_id)

    def forget_prefixes(self, request: Request) -> None:
        """Never again share a block with the request's tokens, its own or not, in its tables or out of the window."""
        for block_hash in request.block_hashes:
            for group in range(self.num_groups):
                block_id = self.pool.find((group, block_hash))
                if block_id is not None:
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
        self.pool.check(list(_present(table)) for tables in self._tables.values() for table in tables)
        assert self._tables.keys() == self._num_registered.keys() <= requests.keys()
        for request_id, tables in self._tables.items():
            request = requests[request_id]
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
        keys, hashes = list(map(self.pool.key, table[num_null:])), request.block_hashes[num_null:num_full]
        pairs = zip(keys, hashes, strict=False)
        assert all(key is None or ((key[1] is own or key[1] == own) and key[0] == group) for key, own in pairs)
        assert not any(keys[len(hashes) :])


def _present(block_ids: Iterable[int]) -> Iterator[int]:
    return (block_id for block_id in block_ids if block_id != NULL_BLOCK)
