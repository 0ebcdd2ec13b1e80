"""InputBatch: what the runner keeps of each request between steps, as rows of arrays, and a step's inputs from it.

Knows tokens and blocks; sampling state is `sampler`'s, in rows of the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.step import SchedulerOutput

__all__ = ["InputBatch", "StepInputs"]

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs: T tokens of R requests, S of them sampled."""

    rows: npt.NDArray[np.intp]  # [R]: each request's row in the InputBatch
    input_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mappings: list[Int32Array]  # one a KV-cache group: [T]
    block_tables: list[Int32Array]  # one a group: [R, max_blocks]
    query_start: Int32Array  # [R + 1]
    seq_lens: Int32Array  # [R]
    sampled: npt.NDArray[np.intp]  # [S]: indices into the R requests
    logits_rows: Int32Array  # [S]: indices into the T tokens


class InputBatch:
    """Rows are given out when a request is first scheduled and taken back when it finishes; a preempted request keeps
    its row, and with it its tokens.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        # Untouched pages of these cost nothing, so that a long context does not.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        # Blocks that fell out of a window since stay in the row; nothing reads them.
        self.block_tables = np.zeros((num_rows, num_groups, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.row_of: dict[int, int] = {}
        self._free_rows = list(range(num_rows))[::-1]

    def add(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Give the request a row and return it."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.row_of[request_id] = row
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_blocks[row] = 0
        return row

    def remove(self, request_id: int) -> int | None:
        """Take the request's row back and return it; None if it never had one."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    @property
    def num_rows(self) -> int:
        return len(self.num_blocks)

    def _grow(self) -> None:
        """Double the rows: preempted requests keep theirs, so there can be more than `max_num_seqs`."""
        num_rows = self.num_rows
        for name in ("token_ids", "block_tables", "num_blocks"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._free_rows = list(range(num_rows, 2 * num_rows))[::-1]

    def apply(self, step: SchedulerOutput) -> None:
        """Bring tokens and block tables up to date with what the scheduler gave."""
        for request_id, position, token_ids in step.given_tokens:
            self.token_ids[self.row_of[request_id], position : position + len(token_ids)] = token_ids
        for request_id in step.reset_request_ids:
            self.num_blocks[self.row_of[request_id]] = 0
        for request_id, groups in zip(step.request_ids, step.new_block_ids, strict=True):
            num_new = len(groups[0])
            if num_new:
                row = self.row_of[request_id]
                start = self.num_blocks[row]
                self.block_tables[row, :, start : start + num_new] = groups
                self.num_blocks[row] += num_new

    def prepare(self, step: SchedulerOutput) -> StepInputs:
        """The step's inputs; `apply` has been called."""
        rows = np.array([self.row_of[request_id] for request_id in step.request_ids], dtype=np.intp)
        computed = np.array(step.num_computed_tokens, dtype=np.int32)
        if step.num_scheduled_tokens.count(1) == len(rows):  # one token each, as in decoding
            token_rows, positions, query_start, seq_lens = (
                rows,
                computed,
                np.arange(len(rows) + 1, dtype=np.int32),
                computed + 1,
            )
        else:
            scheduled = np.array(step.num_scheduled_tokens, dtype=np.int32)
            query_start = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(scheduled, out=query_start[1:])
            token_rows = np.repeat(rows, scheduled)
            positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(computed - query_start[:-1], scheduled)
            seq_lens = computed + scheduled
        places = positions // self.block_size  # of blocks in the table
        # Flat lookups: several times as fast as those by pairs.
        _, num_groups, max_blocks = self.block_tables.shape
        first = token_rows * (num_groups * max_blocks) + places
        flat_tables, offsets = self.block_tables.reshape(-1), positions - places * self.block_size
        groups = range(num_groups)
        blocks = [flat_tables.take(first + group * max_blocks) for group in groups]
        num_blocks = int(places.max()) + 1
        sampled = np.array(step.samples).nonzero()[0]
        return StepInputs(
            rows=rows,
            input_ids=self.token_ids.reshape(-1).take(token_rows * self.token_ids.shape[1] + positions),
            positions=positions,
            slot_mappings=[group_blocks * self.block_size + offsets for group_blocks in blocks],
            block_tables=[self.block_tables[rows, group, :num_blocks] for group in groups],
            query_start=query_start,
            seq_lens=seq_lens,
            sampled=sampled,
            logits_rows=query_start[1:].take(sampled) - 1,
        )

    def append(self, inputs: StepInputs, token_ids: npt.NDArray[np.int64]) -> None:
        """Store the step's sampled tokens [S], each after its request's last."""
        self.token_ids[inputs.rows[inputs.sampled], inputs.seq_lens[inputs.sampled]] = token_ids
