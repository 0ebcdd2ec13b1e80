"""BlockTier: blocks beyond the pool (a file on the CPU), what they hold, and the copies under way between the two.

A tier block's id follows the pool's: kernels read either through a table. Knows ids, keys and request ids; knows
nothing of tokens, bytes or where the blocks really are.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from octavo.core.block_pool import NULL_BLOCK, BlockKey, BlockPool

__all__ = ["BlockTier", "Copy", "SwappedTables", "TierBlocks"]


@dataclass(slots=True, eq=False)
class SwappedTables:
    """A preempted request's blocks, in the order of positions, and the tokens that they hold."""

    tables: tuple[list[int], ...]
    """Null where the request had no block, or its copy failed."""
    num_tokens: int
    num_pending: int = 0
    """Copies under way."""
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """One block on its way from `source` to `destination`, one of which is the tier's."""

    source: int
    destination: int
    key: BlockKey | None
    """What the tier's block is found by, once it is written."""
    request_id: int | None = None
    """The running request whose table the block is in or will be; None for one evicted or swapped out."""
    group: int = 0
    index: int = 0
    """Where it is in the tables of that request, or in `swapped`."""
    swapped: SwappedTables | None = None


class TierBlocks:
    """The tier's blocks: a BlockPool whose ids begin at `first`, behind those of the pool."""

    def __init__(self, num_blocks: int, first: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._first = first

    def allocate(self) -> int:
        return self.pool.allocate(1)[0] + self._first

    def share(self, block_ids: Iterable[int]) -> None:
        self.pool.share(block_id - self._first for block_id in block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        self.pool.release(block_id - self._first for block_id in block_ids)

    def find(self, key: BlockKey) -> int | None:
        """The block that carries this key and can be read."""
        local_id = self.pool.find(key)
        return None if local_id is None else local_id + self._first

    def key(self, block_id: int) -> BlockKey | None:
        return self.pool.key(block_id - self._first)

    def register(self, block_id: int, key: BlockKey) -> None:
        self.pool.register(block_id - self._first, key)

    def forget(self, key: BlockKey) -> None:
        local_id = self.pool.find(key)
        if local_id is not None:
            self.pool.forget(local_id)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, `tables` being every one that refers to these blocks, with these alone."""
        self.pool.check([block_id - self._first for block_id in table] for table in tables)


class BlockTier:
    """Copies are asked for while a step is scheduled, done by that step before it writes anything, and count once it
    has returned.

    Invariants: a block is found by its key only when the step that wrote it has returned; each copy under way holds a
    reference to the tier's block, so that block is neither reused nor evicted; the reference counts add up to the
    entries of requests' tables and swapped tables and the copies under way.
    """

    def __init__(self, num_blocks: int, first_block_id: int) -> None:
        self.num_blocks = num_blocks
        self.is_closed = False
        """Whether a copy to the tier failed: nothing more is written to it."""
        self.num_blocks_in = 0
        self.num_blocks_out = 0
        self.blocks = TierBlocks(num_blocks, first_block_id)
        self._first = first_block_id
        self._swapped: dict[int, SwappedTables] = {}
        self._new: list[Copy] = []  # of the step that is being scheduled
        self._in_flight: dict[int, list[Copy]] = {}  # by step id
        self._being_written: set[BlockKey] = set()
        self._being_read: set[int] = set()

    def owns(self, block_id: int) -> bool:
        return block_id >= self._first

    @property
    def num_free(self) -> int:
        """Blocks that can be written now."""
        return 0 if self.is_closed else self.blocks.pool.num_free

    @property
    def num_used(self) -> int:
        return self.blocks.pool.num_used

    @property
    def num_swapped(self) -> int:
        """Requests that are swapped out."""
        return len(self._swapped)

    def are_being_read(self, block_ids: Iterable[int]) -> bool:
        """Whether a copy of one of these blocks into the pool is under way."""
        return bool(self._being_read) and not self._being_read.isdisjoint(block_ids)

    def forget(self, key: BlockKey) -> None:
        """Never find a block by this key again: what it was copied from can't be trusted."""
        self._being_written.discard(key)
        self.blocks.forget(key)

    # ---- copies

    def evict(self, block_id: int, key: BlockKey) -> None:
        """The pool is about to reuse a block that could be hit again: keep its content, if there is room."""
        if self.num_free and self.blocks.find(key) is None and key not in self._being_written:
            self._write(Copy(block_id, self.blocks.allocate(), key))

    def spill(self, request_id: int, group: int, index: int, block_id: int, key: BlockKey | None) -> None:
        """Write a block of a running request's table; there is room. Its entry can change when `settle` says so."""
        self._write(Copy(block_id, self.blocks.allocate(), key, request_id, group, index))

    def load(self, request_id: int, group: int, index: int, block_id: int, destination: int) -> None:
        """Read a block into a running request's table."""
        self.blocks.share([block_id])
        self._being_read.add(block_id)
        self._new.append(Copy(block_id, destination, self.blocks.key(block_id), request_id, group, index))

    def swap_out(
        self,
        request_id: int,
        tables: Sequence[Sequence[int]],
        keys: Sequence[Sequence[BlockKey | None]],
        num_tokens: int,
    ) -> bool:
        """Keep all of a request's blocks; `keys` are those its blocks carry. Returns False, changing nothing, where
        there is no room. Blocks whose content is here already are shared."""
        kept = tuple(
            [self._present(block_id, key) for block_id, key in zip(table, table_keys, strict=True)]
            for table, table_keys in zip(tables, keys, strict=True)
        )
        missing = [
            (group, index)
            for group, (table, kept_table) in enumerate(zip(tables, kept, strict=True))
            for index, block_id in enumerate(table)
            if block_id != NULL_BLOCK and kept_table[index] == NULL_BLOCK
        ]
        present = [block_id for table in kept for block_id in table if block_id != NULL_BLOCK]
        self.blocks.share(present)  # before anything is evicted for the others
        if len(missing) > self.num_free:
            self.blocks.release(present)
            return False
        swapped = self._swapped[request_id] = SwappedTables(kept, num_tokens, len(missing))
        for group, index in missing:
            kept[group][index] = self.blocks.allocate()
            self.blocks.share([kept[group][index]])
            self._write(Copy(tables[group][index], kept[group][index], keys[group][index], None, group, index, swapped))
        return True

    def _present(self, block_id: int, key: BlockKey | None) -> int:
        """The tier's block with this content, or null."""
        if block_id == NULL_BLOCK or self.owns(block_id):
            return block_id
        found = None if key is None else self.blocks.find(key)
        return NULL_BLOCK if found is None else found

    def _write(self, copy: Copy) -> None:
        self._new.append(copy)
        if copy.key is not None:
            self._being_written.add(copy.key)

    # ---- requests that are swapped out

    def swapped(self, request_id: int) -> SwappedTables | None:
        return self._swapped.get(request_id)

    def drop(self, request_id: int) -> None:
        """Give up what is kept of a request, if anything."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            swapped.is_dropped = True
            for table in swapped.tables:
                self.blocks.release(block_id for block_id in reversed(table) if block_id != NULL_BLOCK)

    def drop_last_swapped(self) -> bool:
        """Give up the request that was swapped out last: it will be recomputed. False if there is none."""
        if self._swapped:
            self.drop(next(reversed(self._swapped)))
            return True
        return False

    # ---- steps

    @property
    def has_new_copies(self) -> bool:
        return bool(self._new)

    def begin(self, step_id: int) -> list[tuple[int, int]]:
        """The copies that this step does before anything else, in order."""
        if not self._new:
            return []
        copies, self._new = self._new, []
        self._in_flight[step_id] = copies
        return [(copy.source, copy.destination) for copy in copies]

    def settle(self, step_id: int, failed: Collection[int], is_at_fault: bool) -> Iterator[tuple[Copy, bool]]:
        """A step has returned, without the copies at the indices in `failed`. Yields those that concern a running
        request's table and whether each was done; after a spill that was, its reference belongs to the table.

        `is_at_fault`: whether a failure is the tier's, which is then closed.
        """
        for number, copy in enumerate(self._in_flight.pop(step_id, ())):
            is_done = number not in failed
            if self.owns(copy.source):
                self._settle_load(copy, is_done)
                yield copy, is_done
            elif self._settle_write(copy, is_done, is_at_fault):
                yield copy, is_done

    def _settle_load(self, copy: Copy, is_done: bool) -> None:
        self._being_read.discard(copy.source)
        self.num_blocks_in += is_done
        if not is_done and copy.key is not None:
            self.forget(copy.key)
        self.blocks.release([copy.source])

    def _settle_write(self, copy: Copy, is_done: bool, is_at_fault: bool) -> bool:
        """Returns whether it is a running request's."""
        self.num_blocks_out += is_done
        self.is_closed |= is_at_fault and not is_done
        if copy.key is not None and copy.key in self._being_written:
            self._being_written.discard(copy.key)
            if is_done:
                self.blocks.register(copy.destination, copy.key)
        swapped = copy.swapped
        if swapped is not None:
            swapped.num_pending -= 1
            if not is_done and not swapped.is_dropped:
                swapped.tables[copy.group][copy.index] = NULL_BLOCK
                self.blocks.release([copy.destination])
        if copy.request_id is None or not is_done:
            self.blocks.release([copy.destination])
        return copy.request_id is not None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, `tables` being every running request's."""
        copies = [*self._new, *(copy for copies in self._in_flight.values() for copy in copies)]
        pinned = [copy.source if self.owns(copy.source) else copy.destination for copy in copies]
        kept = [table for swapped in self._swapped.values() for table in swapped.tables]
        entries = [[i for i in table if self.owns(i)] for table in [*tables, *kept, pinned]]
        self.blocks.check(entries)
        assert self._being_read == {copy.source for copy in copies if self.owns(copy.source)}
        assert self._being_written <= {copy.key for copy in copies if not self.owns(copy.source)}
