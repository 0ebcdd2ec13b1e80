"""BlockPool: the KV cache's blocks, which of them are free, and which hold a known prefix; and what a block's hash is.

Knows block numbers, reference counts and hashes; knows nothing of requests or tables.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain

from octavo.core.eviction import EvictionPolicy, Lru

__all__ = ["NULL_BLOCK", "BlockKey", "BlockPool", "hash_block", "root_hash"]

BlockKey = tuple[int, bytes]
"""KV-cache group and block hash: what a full block is found by."""
NULL_BLOCK = -1
"""Stands in a table for a block that has fallen out of its group's window. Nothing reads there."""


def root_hash(cache_salt: str | None) -> bytes:
    """The parent of a first block: SHA-256 over whatever sets a request's cache apart, each part led by its length."""
    parts = [b"octavo"] if cache_salt is None else [b"octavo", b"salt", cache_salt.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's 32 bytes and the block's tokens as little-endian uint32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


class BlockPool:
    """A fixed number of blocks. A free block keeps its key until it is reused. Those without one are reused first, then
    those that a window has left behind, in that order; of the others the eviction policy chooses.

    A block behind a window is needed again only by a prompt that ends just after it, where a later turn needs the last
    ones. One that was found by its key before, as those of a common system prompt are, is an ordinary block.

    Invariants: a block is free exactly when its reference count is 0, and then either blank, without a key, or spent,
    or with the eviction policy; a key leads to one block, and that block carries it. A second block with the same
    content stays without a key: tables only grow at the tail, so it is not merged. `num_changes` grows when a watched
    key is found or lost.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicy | None = None,
        on_evict: Callable[[int, BlockKey], None] | None = None,
    ) -> None:
        """`on_evict` is told of each block that loses its key because it is reused."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.num_changes = 0
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_ids: dict[BlockKey, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._spent: dict[int, None] = {}  # free blocks that a window has left behind, in order
        self._found: set[int] = set()  # blocks that were shared since they got their key
        self._eviction: EvictionPolicy = Lru() if eviction is None else eviction
        self._watched: Set[BlockKey] = frozenset()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._spent) + len(self._eviction)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def num_used_of(self, block_ids: Iterable[int]) -> int:
        """How many of these are not free."""
        return sum(map(bool, map(self._ref_counts.__getitem__, block_ids)))

    def find(self, key: BlockKey) -> int | None:
        """The block that carries this key, used or free."""
        return self._block_ids.get(key)

    def watch(self, keys: Set[BlockKey]) -> None:
        """Count changes of these keys, and of no others, from now on."""
        self._watched = keys

    def key(self, block_id: int) -> BlockKey | None:
        return self._keys[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, evicting what they held. The caller has made sure that there are enough."""
        block_ids = [self._take() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        if self._spent:
            block_id = next(iter(self._spent))
            del self._spent[block_id]
        else:
            block_id = self._eviction.evict()
        self.num_evicted += 1
        key = self._drop_key(block_id)
        if self._on_evict is not None:
            self._on_evict(block_id, key)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which are used, or free and found by their keys."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                self._take_free(block_id)
            self._ref_counts[block_id] += 1
            self._found.add(block_id)

    def _take_free(self, block_id: int) -> None:
        """A free block with a key is free no more, or has lost its key."""
        if block_id in self._spent:
            del self._spent[block_id]
        else:
            self._eviction.remove(block_id)

    def release(self, block_ids: Iterable[int], are_spent: bool = False) -> None:
        """Drop a reference to each; of those that become free, the last given is worth most. `are_spent`: a window has
        left them behind."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                elif are_spent and block_id not in self._found:
                    self._spent[block_id] = None
                else:
                    self._eviction.add(block_id)

    def register(self, block_id: int, key: BlockKey) -> None:
        """Let a full block be found by its key, unless another block with the same content is."""
        if self._block_ids.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key
            self.num_changes += key in self._watched

    def forget(self, block_id: int) -> None:
        """No longer find this block: its content can't be trusted."""
        if self._keys[block_id] is None:
            return
        self._drop_key(block_id)
        if not self._ref_counts[block_id]:
            self._take_free(block_id)
            self._blank.append(block_id)

    def _drop_key(self, block_id: int) -> BlockKey:
        key = self._keys[block_id]
        assert key is not None
        self._keys[block_id] = None
        self._found.discard(block_id)
        del self._block_ids[key]
        self.num_changes += key in self._watched
        return key

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, `tables` being every table that refers to this pool."""
        references = Counter(chain.from_iterable(tables))
        counted = {block_id: count for block_id, count in enumerate(self._ref_counts) if count}
        assert counted == references, f"reference counts: {dict(counted.items() ^ references.items())} differ"
        assert self.num_used == len(references)
        assert not any(map(self._ref_counts.__getitem__, self._blank))
        assert not any(map(self._keys.__getitem__, self._blank))
        assert list(map(self._keys.__getitem__, self._block_ids.values())) == list(self._block_ids)
        assert len(self._block_ids) == self.num_blocks - self._keys.count(None)
        assert not any(map(self._ref_counts.__getitem__, self._spent))
        assert all(map(self._keys.__getitem__, self._spent))
