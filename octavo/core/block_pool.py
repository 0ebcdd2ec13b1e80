"""BlockPool: the KV cache's blocks, which of them are free, and which hold a known prefix; and what a block's hash is.

Knows block numbers, reference counts and hashes; knows nothing of requests or tables.
"""

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockKey", "BlockPool", "hash_block", "root_hash"]

BlockKey = tuple[int, bytes]
"""KV-cache group and block hash: what a full block is found by."""


def root_hash(cache_salt: str | None) -> bytes:
    """The parent of a first block: SHA-256 over whatever sets a request's cache apart, each part led by its length."""
    parts = [b"octavo"] if cache_salt is None else [b"octavo", b"salt", cache_salt.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's 32 bytes and the block's tokens as little-endian uint32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


class BlockPool:
    """A fixed number of blocks, reused least recently freed first; a free block keeps its key until it is reused.

    Invariants: a block is free exactly when its reference count is 0; a key leads to one block, and that block carries
    it. A second block with the same content stays without a key: tables only grow at the tail, so it is not merged.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_ids: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def find(self, key: BlockKey) -> int | None:
        """The block that carries this key, used or free."""
        return self._block_ids.get(key)

    def key(self, block_id: int) -> BlockKey | None:
        return self._keys[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, evicting what they held. The caller has made sure that there are enough."""
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self.forget(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, used or free."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each; of those that become free, the first given is evicted first."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free[block_id] = None
                if self._keys[block_id] is None:  # nothing to lose: reuse it before any that could be hit
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, key: BlockKey) -> None:
        """Let a full block be found by its key, unless another block with the same content is."""
        if self._block_ids.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def forget(self, block_id: int) -> None:
        """No longer find this block: its content is about to change, or can't be trusted."""
        key = self._keys[block_id]
        if key is not None:
            self._keys[block_id] = None
            del self._block_ids[key]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, `tables` being every table that refers to this pool."""
        references = Counter(block_id for table in tables for block_id in table)
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count == references[block_id], f"block {block_id}: {ref_count} != {references[block_id]}"
            assert (ref_count == 0) == (block_id in self._free)
        assert self.num_free + self.num_used == self.num_blocks == len(self._ref_counts)
        carried = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert carried == self._block_ids
