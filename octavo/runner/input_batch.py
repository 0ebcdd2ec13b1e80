"""InputBatch: which row of the device's buffers each request has, and a step's inputs from what the scheduler gave.

Knows tokens and blocks; sampling state is the sampler's, in rows of the same numbers.
"""

from octavo.core.step import NewRequest, ScheduledRequest, SchedulerOutput
from octavo.devices.device import StepBuffers, StepSize

__all__ = ["InputBatch"]


class InputBatch:
    """Rows are given out when a request is first scheduled and taken back when it is over; a preempted request keeps
    its row, and with it its tokens. So there can be more rows than requests in a step.
    """

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.row_of: dict[int, int] = {}
        self._free_rows = list(range(buffers.num_rows))[::-1]

    def add(self, request: NewRequest) -> int:
        """Give the request a row with its prompt, and return it."""
        if not self._free_rows:
            num_rows = self.buffers.num_rows
            self.buffers.grow()
            self._free_rows = list(range(num_rows, self.buffers.num_rows))[::-1]
        row = self._free_rows.pop()
        self.row_of[request.request_id] = row
        self.buffers.write_tokens(row, 0, request.prompt_token_ids)
        self.buffers.clear_blocks(row)
        return row

    def remove(self, request_id: int) -> int | None:
        """Take the request's row back and return it; None if it never had one."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def apply(self, step: SchedulerOutput) -> None:
        """Bring tokens and block tables up to date with what the scheduler gave."""
        row_of, buffers = self.row_of, self.buffers
        for given in step.given_tokens:
            buffers.write_tokens(row_of[given.request_id], given.position, given.token_ids)
        for request_id in step.reset_request_ids:
            buffers.clear_blocks(row_of[request_id])
        for entry in step.entries:
            if entry.new_block_ids and entry.new_block_ids[0]:
                buffers.append_blocks(row_of[entry.request_id], entry.new_block_ids)

    def fill(self, entries: list[ScheduledRequest]) -> tuple[StepSize, list[int]]:
        """Make the step's inputs; `apply` has been called. Returns their size and the rows of the requests."""
        row_of = self.row_of
        rows = [row_of[entry.request_id] for entry in entries]
        return self.buffers.fill(rows, entries), rows
