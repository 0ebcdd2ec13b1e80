"""StepBuffers in the host's memory, for devices whose tensors lie there too: what is an array here is a tensor there.

Knows rows, tokens and blocks; nothing of requests or models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import ScheduledRequest
from octavo.devices.device import StepRoom, StepSize, StepTensors
from octavo.kernels.sampling import DRAW_BYTES, SampleRows, mask_bytes, rows_of

__all__ = ["BatchTables", "Filler", "HostBuffers", "StepArrays"]

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BatchTables:
    """What is kept of each request between steps, in N rows."""

    token_ids: Int32Array  # [N, L]
    block_tables: Int32Array  # [N, G, B]: a table for each group of layers
    block_size: int


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Room for the inputs of the most tokens T, requests R and rows of logits S; a step's are at the beginnings."""

    input_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mappings: tuple[Int32Array, ...]  # one a group: [T]
    block_tables: tuple[Int32Array, ...]  # one a group: [R, B]
    query_start: Int32Array  # [R + 1]
    seq_lens: Int32Array  # [R]
    logits_rows: Int32Array  # [S]: which of the T tokens each row of logits is of
    draws: UInt8Array  # [S, DRAW_BYTES]: what each is drawn by, and then the token
    masks: UInt8Array  # [S, mask_bytes]: of those rows that are masked

    @classmethod
    def make(cls, room: StepRoom) -> "StepArrays":
        """Zeros; memory that no step touches is never committed."""

        def zeros(*shape: int) -> Int32Array:
            return np.zeros(shape, dtype=np.int32)

        num_tokens, num_requests, groups = room.num_tokens, room.num_requests, range(room.num_groups)
        return cls(
            zeros(num_tokens),
            zeros(num_tokens),
            tuple(zeros(num_tokens) for _ in groups),
            tuple(zeros(num_requests, _row_blocks(room)) for _ in groups),
            query_start=zeros(num_requests + 1),
            seq_lens=zeros(num_requests),
            logits_rows=zeros(room.num_logits),
            draws=np.zeros((room.num_logits, DRAW_BYTES), np.uint8),
            masks=np.zeros((room.num_logits, mask_bytes(room.vocab_size)), np.uint8),
        )


def _row_blocks(room: StepRoom) -> int:
    return -(-room.max_model_len // room.block_size) + 1


class Filler(Protocol):
    """Fills in one set of arrays from one set of tables, and stores what was drawn."""

    def fill(self, rows: list[int], entries: list[ScheduledRequest], /) -> tuple[int, int, int]:
        """As `StepBuffers.fill`; returns T, R and S."""
        ...

    def append(self) -> tuple[list[list[int]], bool]:
        """Accept the tokens that the step has drawn: of each request that has rows of logits, up to the first that
        differs from the draft after it. Stores them in the tables, each at its position. Returns them, and whether all
        accepted draws are good; a draw that is not is accepted as the last."""
        ...


class HostBuffers:
    """Invariant: `_num_known[row]` bounds the tokens that were ever written to the row, `_num_blocks[row]` counts the
    blocks of its tables."""

    def __init__(self, room: StepRoom, make_filler: Callable[[BatchTables, StepArrays], Filler]) -> None:
        self.room = room
        self.arrays = StepArrays.make(room)
        self.draws: SampleRows = rows_of(torch.from_numpy(self.arrays.draws))
        self._make_filler = make_filler
        self._num_blocks: list[int] = []
        self._num_known: list[int] = []
        self.tables = self._zeros(0)
        self._add_rows(room.num_requests)
        self._most = self._tensors()
        self.size = StepSize(0, 0, 0)
        """Of the step that was filled in last."""

    @property
    def num_rows(self) -> int:
        return len(self._num_blocks)

    def grow(self) -> None:
        self._add_rows(self.num_rows)

    def _add_rows(self, num_new: int) -> None:
        """What was written is copied and no more, so that pages which no request has touched stay uncommitted."""
        old = self.tables
        self.tables = self._zeros(self.num_rows + num_new)
        for row, (num_known, num_blocks) in enumerate(zip(self._num_known, self._num_blocks, strict=True)):
            self.tables.token_ids[row, :num_known] = old.token_ids[row, :num_known]
            self.tables.block_tables[row, :, :num_blocks] = old.block_tables[row, :, :num_blocks]
        self._num_blocks += [0] * num_new
        self._num_known += [0] * num_new
        self._filler = self._make_filler(self.tables, self.arrays)

    def _zeros(self, num_rows: int) -> BatchTables:
        """Pages of these that are never touched cost nothing, so that a long context does not."""
        room = self.room
        token_ids = np.zeros((num_rows, room.max_model_len + 1), dtype=np.int32)
        block_tables = np.zeros((num_rows, room.num_groups, _row_blocks(room)), dtype=np.int32)
        return BatchTables(token_ids, block_tables, room.block_size)

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        end = position + len(token_ids)
        self.tables.token_ids[row, position:end] = token_ids
        self._num_known[row] = max(self._num_known[row], end)

    def clear_blocks(self, row: int) -> None:
        self._num_blocks[row] = 0

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Blocks that fell out of a window since stay in the row; nothing reads them."""
        start, num_new = self._num_blocks[row], len(block_ids[0])
        self.tables.block_tables[row, :, start : start + num_new] = block_ids
        self._num_blocks[row] = start + num_new
        # Tokens that fill these blocks, and the one sampled after them, will be written where nobody counts.
        self._num_known[row] = max(self._num_known[row], (start + num_new) * self.room.block_size + 1)

    def fill(self, rows: list[int], entries: list[ScheduledRequest]) -> StepSize:
        self.size = StepSize(*self._filler.fill(rows, entries))
        return self.size

    def append(self) -> tuple[list[list[int]], bool]:
        """Store what the step has drawn: `Filler.append`."""
        return self._filler.append()

    def tensors(self, size: StepSize) -> StepTensors:
        most, num_tokens, num_requests = self._most, size.num_tokens, size.num_requests
        return StepTensors(
            most.input_ids[:num_tokens],
            most.positions[:num_tokens],
            tuple(slots[:num_tokens] for slots in most.slot_mappings),
            tuple(table[:num_requests] for table in most.block_tables),
            most.query_start[: num_requests + 1],
            most.seq_lens[:num_requests],
            logits_rows=most.logits_rows[: size.num_logits],
            draws=most.draws[: size.num_logits],
            masks=most.masks[: size.num_logits],
        )

    def _tensors(self) -> StepTensors:
        arrays, of = self.arrays, torch.from_numpy
        return StepTensors(
            of(arrays.input_ids),
            of(arrays.positions),
            tuple(map(of, arrays.slot_mappings)),
            tuple(map(of, arrays.block_tables)),
            of(arrays.query_start),
            of(arrays.seq_lens),
            logits_rows=of(arrays.logits_rows),
            draws=of(arrays.draws),
            masks=of(arrays.masks),
        )

    @property
    def most(self) -> StepSize:
        """Of a step that takes all the room."""
        room = self.room
        return StepSize(room.num_tokens, room.num_requests, room.num_logits)
