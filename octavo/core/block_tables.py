"""BlockTables: every running request's block tables. The only writer of tables.

Knows tokens and blocks; knows nothing of hashes, budgets or queues, nor why a block is null or in a tier.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

from octavo.core.block_pool import NULL_BLOCK, BlockPool
from octavo.core.kv_geometry import KVGeometry
from octavo.core.request import Request

__all__ = ["BlockTables", "References", "Tables", "present"]

Tables = tuple[list[int], ...]
"""One request's block ids in the order of positions, one list a KV-cache group."""


class References(Protocol):
    """Counts the references to blocks: the pool, or pool and tier together."""

    def share(self, block_ids: Iterable[int]) -> None: ...
    def release(self, block_ids: Iterable[int]) -> None: ...


def present(block_ids: Iterable[int]) -> Iterator[int]:
    """Those that are not null."""
    return filter(NULL_BLOCK.__ne__, block_ids)


class BlockTables:
    """Invariants: a request's tables hold exactly the blocks that `num_computed_tokens` tokens need; they grow at their
    tail, and lose it only where computed tokens are taken back; null entries come first, and no token that is still to
    be computed sees them; `replaced` has the requests whose tables changed otherwise than by growing since the runner
    was told of them.

    A block that is not full may be shared by requests that forked. The first to write on gets a copy (copy on write),
    so that all who share a block have the same tokens in it:

        before   A [7][4][9]     9 is half full, and A is about to write its next token
                 B [7][4][9]
        after    A [7][4][2]     the step copies 9 to 2 before it writes
                 B [7][4][9]     and nobody shares 9 any longer, so B may write to it
    """

    def __init__(self, geometry: KVGeometry, pool: BlockPool, references: References) -> None:
        self.replaced: set[int] = set()
        self._geometry = geometry
        self._pool = pool
        self._references = references
        self._no_blocks: Tables = tuple([] for _ in geometry.windows)
        self._tables: dict[int, Tables] = {}
        self._forked: set[int] = set()  # requests whose last block others may share though it is not full
        self._copies: list[tuple[int, int]] = []  # to be made before the next step

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._tables

    def open(self, request_id: int, prefix: Tables) -> Tables:
        """Begin the request's tables with shared blocks."""
        assert request_id not in self._tables
        tables = self._tables[request_id] = tuple(list(block_ids) for block_ids in prefix)
        for table in tables:
            self._references.share(present(table))
        self.replaced.add(request_id)
        return tables

    def allocate(self, request: Request, num_new_tokens: int) -> Tables | None:
        """Grow the tables by what the next tokens need, and copy a block that others share before they are written to
        it. Returns the new block ids; None, changing nothing, if the pool has too few."""
        request_id = request.request_id
        tables = self._tables[request_id]
        if not tables:
            return tables
        num_new = -(-(request.num_computed_tokens + num_new_tokens) // self._geometry.block_size) - len(tables[0])
        is_forked = request_id in self._forked
        if not num_new and not is_forked:
            return self._no_blocks
        shared = self._shared_tails(request, tables) if is_forked else []
        if num_new * len(tables) + len(shared) > self._pool.num_free:
            return None
        for table in shared:
            self._copy_tail(request_id, table)
        self._forked.discard(request_id)
        new_block_ids = tuple(self._pool.allocate(num_new) for _ in tables)
        for table, block_ids in zip(tables, new_block_ids, strict=True):
            table.extend(block_ids)
        return new_block_ids

    def num_missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that the next tokens need beyond those in the tables, copies on write left out."""
        tables = self._tables[request.request_id]
        num_blocks = self._geometry.blocks_of(request.num_computed_tokens + num_new_tokens)
        return (num_blocks - len(tables[0])) * len(tables) if tables else 0

    def _shared_tails(self, request: Request, tables: Tables) -> list[list[int]]:
        """The tables whose last block is shared though it is not full, so that the next token is written to it."""
        if not request.num_computed_tokens % self._geometry.block_size:
            return []
        shared = [table for table in tables if self._pool.ref_count(table[-1]) > 1]
        pending = [source for source, _ in self._copies] if shared else []
        return [table for table in shared if self._pool.ref_count(table[-1]) - pending.count(table[-1]) > 1]

    def _copy_tail(self, request_id: int, table: list[int]) -> None:
        (copy,) = self._pool.allocate(1)
        self._copies.append((table[-1], copy))  # with its reference to the source, lest that be reused before
        table[-1] = copy
        self.replaced.add(request_id)

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies on write that the next step does, in order."""
        copies, self._copies = self._copies, []
        self._pool.release(source for source, _ in copies)
        return copies

    def fork(self, forks: Sequence[tuple[Request, Request]], free: Callable[[Request], None]) -> None:
        """Give each first request, in place of what it has, the tables of the second; all at once. free: gives up what
        one has."""
        sources = [self.copy(source.request_id) for _, source in forks]
        for tables in sources:
            for table in tables:
                self._references.share(present(table))
        for (request, _), tables in zip(forks, sources, strict=True):
            free(request)
            self._tables[request.request_id] = tables
            self.replaced.add(request.request_id)
        self._forked.update(request.request_id for pair in forks for request in pair)

    def take_back(self, request: Request) -> None:
        """Give up the blocks beyond the request's computed tokens, which have become fewer."""
        tables, num_blocks = self._tables[request.request_id], self._geometry.blocks_of(request.num_computed_tokens)
        if tables and len(tables[0]) > num_blocks:
            self.cut(request.request_id, num_blocks)

    def cut(self, request_id: int, num_blocks: int) -> None:
        """Give up all but the first blocks."""
        for table in self._tables[request_id]:
            self._release(table[num_blocks:])
            del table[num_blocks:]
        self.replaced.add(request_id)

    def free_unseen(self, request: Request, position: int) -> None:
        """Give up the blocks that have fallen out of their windows: only steps that have returned had tokens before
        this position."""
        for window, table in zip(self._geometry.windows, self._tables[request.request_id], strict=True):
            for index in reversed(range(self._geometry.first_seen(window, position))):
                if table[index] == NULL_BLOCK:
                    break
                self._pool.release((table[index],), are_spent=True)
                table[index] = NULL_BLOCK

    def free(self, request_id: int) -> None:
        """Give up the request's blocks, if it has any; its last ones will be evicted before its first."""
        self.replaced.discard(request_id)
        self._forked.discard(request_id)
        for table in self._tables.pop(request_id, ()):
            self._release(table)

    def move(self, request_id: int, group: int, index: int, source: int, destination: int) -> None:
        """Put one block in another's place; the reference to it is the table's from now on."""
        table = self._tables[request_id][group]
        assert table[index] == source
        table[index] = destination
        self._references.release([source])
        self.replaced.add(request_id)

    def _release(self, block_ids: Sequence[int]) -> None:
        """In reverse: of those that become free the last given is evicted last."""
        self._references.release(present(reversed(block_ids)))

    # ---- looking in

    def of(self, request_id: int) -> Tables:
        """The request's tables, not to be changed."""
        return self._tables[request_id]

    def copy(self, request_id: int) -> Tables:
        return tuple(list(table) for table in self._tables[request_id])

    def block_ids(self, request_id: int, from_position: int = 0) -> set[int]:
        """The request's blocks that hold its tokens from this position on."""
        first = from_position // self._geometry.block_size
        return {block_id for table in self._tables[request_id] for block_id in present(islice(table, first, None))}

    def all_tables(self) -> list[list[int]]:
        return list(chain.from_iterable(self._tables.values()))

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants, `requests` being all that may hold blocks, by id."""
        assert self.replaced <= self._tables.keys() <= requests.keys()
        contents: dict[int, list[int]] = {}  # of blocks that are shared and not full
        for request_id, tables in self._tables.items():
            request = requests[request_id]
            for table in self._shared_tails(request, tables):
                assert request_id in self._forked
                content = [request.num_computed_tokens, *request.token_ids[: request.num_computed_tokens]]
                assert contents.setdefault(table[-1], content) == content
            for window, table in zip(self._geometry.windows, tables, strict=True):
                assert len(table) == self._geometry.blocks_of(request.num_computed_tokens)
                num_null = table.count(NULL_BLOCK)
                assert set(table[:num_null]) <= {NULL_BLOCK}
                last = self._geometry.first_seen(window, request.num_computed_tokens)
                assert num_null <= last if request.num_steps_in_flight else num_null == last
                assert len(set(table[num_null:])) == len(table) - num_null
