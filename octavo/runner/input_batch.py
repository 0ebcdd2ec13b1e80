"""InputBatch: what the runner keeps of each request between steps, as rows of arrays, and a step's inputs from it.

Knows tokens and blocks; sampling state is `sampler`'s, in rows of the same numbers.
"""

from collections.abc import Sequence

import numpy as np

from octavo.core.step import SchedulerOutput
from octavo.kernels.ops import Ops
from octavo.kernels.step_inputs import BatchTables, StepArrays, StepInputs

__all__ = ["InputBatch"]


class InputBatch:
    """Rows are given out when a request is first scheduled and taken back when it finishes; a preempted request keeps
    its row, and with it its tokens.
    """

    def __init__(self, ops: Ops, arrays: StepArrays, max_model_len: int, block_size: int) -> None:
        """`arrays`: where the inputs of each step go, one step at a time."""
        self.ops = ops
        self.arrays = arrays
        self.block_size = block_size
        num_rows, num_groups = len(arrays.seq_lens), len(arrays.block_tables)
        # Untouched pages of these cost nothing, so that a long context does not.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        # Blocks that fell out of a window since stay in the row; nothing reads them.
        self.block_tables = np.zeros((num_rows, num_groups, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self._make_filler()
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
        self._make_filler()
        self._free_rows = list(range(num_rows, 2 * num_rows))[::-1]

    def _make_filler(self) -> None:
        tables = BatchTables(self.token_ids, self.block_tables, self.block_size)
        self._filler = self.ops.step_filler(tables, self.arrays)

    def apply(self, step: SchedulerOutput) -> None:
        """Bring tokens and block tables up to date with what the scheduler gave."""
        for given in step.given_tokens:
            row, end = self.row_of[given.request_id], given.position + len(given.token_ids)
            self.token_ids[row, given.position : end] = given.token_ids
        for request_id in step.reset_request_ids:
            self.num_blocks[self.row_of[request_id]] = 0
        for entry in step.entries:
            num_new = len(entry.new_block_ids[0])
            if num_new:
                row = self.row_of[entry.request_id]
                start = self.num_blocks[row]
                self.block_tables[row, :, start : start + num_new] = entry.new_block_ids
                self.num_blocks[row] += num_new

    def prepare(self, step: SchedulerOutput) -> tuple[StepInputs, list[int]]:
        """The step's inputs, valid until the next call, and its requests' rows; `apply` has been called."""
        row_of, entries = self.row_of, step.entries
        rows = [row_of[entry.request_id] for entry in entries]
        starts, lengths = [entry.first_position for entry in entries], [entry.num_tokens for entry in entries]
        filled = self._filler.fill(rows, starts, lengths, [entry.num_logits > 0 for entry in entries])
        num_tokens, num_sampled, num_blocks = filled
        return StepInputs(self.arrays, num_tokens, len(rows), num_sampled, num_blocks), rows

    def append(self) -> tuple[list[int], bool]:
        """Store the tokens [S] that the step has drawn, each after its request's last one. Returns them, and whether
        the draws are all good."""
        return self._filler.append()
