"""Eviction policies: which of the free blocks with a known prefix is given up next.

Know block numbers and the order of calls; know nothing of hashes, requests or time. Every operation is O(1), amortised.
"""

import random
from collections import OrderedDict
from typing import Literal, Protocol

__all__ = ["EvictionPolicy", "EvictionPolicyName", "Fifo", "Lru", "Random", "make_eviction_policy"]

EvictionPolicyName = Literal["lru", "fifo", "random"]


class EvictionPolicy(Protocol):
    """The free blocks that hold something worth finding."""

    def __len__(self) -> int: ...

    def add(self, block_id: int) -> None:
        """The block has become free. Of blocks that are freed together the last given is worth most."""
        ...

    def remove(self, block_id: int) -> None:
        """The free block is used again, with what it holds."""
        ...

    def evict(self) -> int:
        """Choose a free block and remove it; its content is lost."""
        ...


class Lru:
    """Least recently freed first."""

    def __init__(self) -> None:
        self._free: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._free)

    def add(self, block_id: int) -> None:
        self._free[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._free[block_id]

    def evict(self) -> int:
        return self._free.popitem(last=False)[0]


class Fifo:
    """In the order in which they first became free, however often they were used again since.

    Invariants: a used block keeps its place in `_queue` until its turn has come, and is `_overdue` from then on; when
    an overdue one becomes free it is first. What turns find used is passed over once: O(1) on average.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._used: set[int] = set()  # of those in the queue
        self._overdue: set[int] = set()

    def __len__(self) -> int:
        return len(self._queue) - len(self._used)

    def add(self, block_id: int) -> None:
        if block_id in self._used:
            self._used.remove(block_id)
            return
        self._queue[block_id] = None
        if block_id in self._overdue:
            self._overdue.remove(block_id)
            self._queue.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        self._used.add(block_id)

    def evict(self) -> int:
        while (block_id := self._queue.popitem(last=False)[0]) in self._used:
            self._used.remove(block_id)
            self._overdue.add(block_id)
        return block_id


class Random:
    """Any of them, each as likely as the next; the same ones in every run with the same seed.

    Invariant: `_free[_index[b]] == b` for every free block b.
    """

    def __init__(self, seed: int = 0) -> None:
        self._free: list[int] = []
        self._index: dict[int, int] = {}
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._free)

    def add(self, block_id: int) -> None:
        self._index[block_id] = len(self._free)
        self._free.append(block_id)

    def remove(self, block_id: int) -> None:
        index, last = self._index.pop(block_id), self._free.pop()
        if last != block_id:
            self._free[index] = last
            self._index[last] = index

    def evict(self) -> int:
        block_id = self._free[int(self._random.random() * len(self._free))]
        self.remove(block_id)
        return block_id


def make_eviction_policy(name: EvictionPolicyName, seed: int = 0) -> EvictionPolicy:
    """`seed` matters to `random` alone."""
    match name:
        case "lru":
            return Lru()
        case "fifo":
            return Fifo()
        case "random":
            return Random(seed)
