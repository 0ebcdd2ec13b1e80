"""A step's inputs: the arrays of the host that they lie in, and what fills them in from a batch's rows.

Knows rows, tokens and blocks; nothing of requests, models or devices.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from octavo.kernels.sampling import SAMPLE_ROW, SampleRows

__all__ = ["BatchTables", "ReferenceFiller", "StepArrays", "StepFiller", "StepInputs"]

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchTables:
    """What is kept of each request between steps, in N rows."""

    token_ids: Int32Array  # [N, L]
    block_tables: Int32Array  # [N, G, B]: a table for each group of layers
    block_size: int


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Room for the inputs of the most tokens T and requests R; a step's are at the beginnings."""

    input_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mappings: tuple[Int32Array, ...]  # one a group: [T]
    block_tables: tuple[Int32Array, ...]  # one a group: [R, B]
    query_start: Int32Array  # [R + 1]
    seq_lens: Int32Array  # [R]
    rows: Int32Array  # [R]: each request's row in the batch
    logits_rows: Int32Array  # [R]: of each request that samples, the index of its last token among the step's
    sampled_rows: Int32Array  # [R]: likewise its row in the batch
    draws: SampleRows  # [R]: and what its token is drawn by, its position among it; then the token

    @classmethod
    def make(cls, num_tokens: int, num_requests: int, num_groups: int, num_blocks: int) -> "StepArrays":
        """Zeros; memory that no step touches is never committed."""

        def zeros(*shape: int) -> Int32Array:
            return np.zeros(shape, dtype=np.int32)

        return cls(
            zeros(num_tokens),
            zeros(num_tokens),
            tuple(zeros(num_tokens) for _ in range(num_groups)),
            tuple(zeros(num_requests, num_blocks) for _ in range(num_groups)),
            zeros(num_requests + 1),
            seq_lens=zeros(num_requests),
            rows=zeros(num_requests),
            logits_rows=zeros(num_requests),
            sampled_rows=zeros(num_requests),
            draws=np.zeros(num_requests, SAMPLE_ROW),
        )


class StepInputs(Struct, frozen=True, gc=False):
    """A step's inputs, valid until the next one's are filled in: T tokens of R requests, S of which sample."""

    arrays: StepArrays
    num_tokens: int
    num_requests: int
    num_sampled: int
    num_blocks: int
    """The most blocks in a table that the step reads or writes."""

    @property
    def input_ids(self) -> Int32Array:  # [T]
        return self.arrays.input_ids[: self.num_tokens]

    @property
    def positions(self) -> Int32Array:  # [T]
        return self.arrays.positions[: self.num_tokens]

    @property
    def slot_mappings(self) -> list[Int32Array]:  # one a group: [T]
        return [slots[: self.num_tokens] for slots in self.arrays.slot_mappings]

    @property
    def block_tables(self) -> list[Int32Array]:  # one a group: copies, [R, max_blocks]
        return [
            np.ascontiguousarray(table[: self.num_requests, : self.num_blocks]) for table in self.arrays.block_tables
        ]

    @property
    def query_start(self) -> Int32Array:  # [R + 1]
        return self.arrays.query_start[: self.num_requests + 1]

    @property
    def seq_lens(self) -> Int32Array:  # [R]
        return self.arrays.seq_lens[: self.num_requests]

    @property
    def rows(self) -> Int32Array:  # [R]
        return self.arrays.rows[: self.num_requests]

    @property
    def logits_rows(self) -> Int32Array:  # [S]
        return self.arrays.logits_rows[: self.num_sampled]

    @property
    def sampled_rows(self) -> Int32Array:  # [S]
        return self.arrays.sampled_rows[: self.num_sampled]

    @property
    def draws(self) -> SampleRows:  # [S]
        return self.arrays.draws[: self.num_sampled]


class StepFiller(Protocol):
    """Fills in one set of arrays from one set of tables."""

    def fill(
        self,
        rows: list[int],
        num_computed_tokens: list[int],
        num_scheduled_tokens: list[int],
        samples: list[bool],
        /,
    ) -> tuple[int, int, int]:
        """The inputs of the requests in these rows, in this order, and of draws the positions: T, S and the most
        blocks.

        Raises IndexError for what the arrays or tables have no room for.
        """
        ...

    def append(self) -> tuple[list[int], bool]:
        """Store the tokens [S] that the step has drawn in the tables, each after its request's last one. Returns them,
        and whether the draws are all good."""
        ...


class ReferenceFiller:
    def __init__(self, tables: BatchTables, arrays: StepArrays) -> None:
        self.tables = tables
        self.arrays = arrays
        self._num_sampled = 0

    def fill(
        self,
        rows: list[int],
        num_computed_tokens: list[int],
        num_scheduled_tokens: list[int],
        samples: list[bool],
        /,
    ) -> tuple[int, int, int]:
        arrays, block_size, num_requests = self.arrays, self.tables.block_size, len(rows)
        computed, scheduled = np.array(num_computed_tokens, np.int32), np.array(num_scheduled_tokens, np.int32)
        ends, num_tokens = computed + scheduled, int(scheduled.sum())
        if num_requests > len(arrays.seq_lens) or num_tokens > len(arrays.positions):
            raise IndexError(f"a step of {num_tokens} tokens of {num_requests} requests, more than there is room for")
        num_blocks = int((-(-ends // block_size)).max(initial=0))
        if num_blocks > self.tables.block_tables.shape[2]:
            raise IndexError(f"a request of {ends.max()} tokens, more than its row has room for")
        arrays.rows[:num_requests] = rows
        arrays.query_start[1 : num_requests + 1] = np.cumsum(scheduled)
        arrays.seq_lens[:num_requests] = ends
        token_rows = np.repeat(arrays.rows[:num_requests], scheduled)
        positions = np.arange(num_tokens) + np.repeat(computed - arrays.query_start[:num_requests], scheduled)
        arrays.positions[:num_tokens] = positions
        arrays.input_ids[:num_tokens] = self.tables.token_ids[token_rows, positions]
        for group, (slots, table) in enumerate(zip(arrays.slot_mappings, arrays.block_tables, strict=True)):
            blocks = self.tables.block_tables[:, group]
            slots[:num_tokens] = blocks[token_rows, positions // block_size] * block_size + positions % block_size
            table[:num_requests, :num_blocks] = blocks[arrays.rows[:num_requests], :num_blocks]
        sampled = np.flatnonzero(samples)
        arrays.logits_rows[: len(sampled)] = arrays.query_start[sampled + 1] - 1
        arrays.sampled_rows[: len(sampled)] = arrays.rows[sampled]
        arrays.draws["position"][: len(sampled)] = ends[sampled]
        self._num_sampled = len(sampled)
        return num_tokens, len(sampled), num_blocks

    def append(self) -> tuple[list[int], bool]:
        rows, draws = self.arrays.sampled_rows[: self._num_sampled], self.arrays.draws[: self._num_sampled]
        self.tables.token_ids[rows, draws["position"]] = draws["token_id"]
        return draws["token_id"].tolist(), not draws["status"].any()
