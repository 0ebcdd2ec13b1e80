"""ReferenceFiller: a step's inputs in numpy, the definition of what other fillers do."""

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import ScheduledRequest
from octavo.devices.host_buffers import BatchTables, StepArrays
from octavo.kernels.sampling import GOOD, rows_of

__all__ = ["ReferenceFiller"]


class ReferenceFiller:
    def __init__(self, tables: BatchTables, arrays: StepArrays) -> None:
        self.tables = tables
        self.arrays = arrays
        self._draws = rows_of(torch.from_numpy(arrays.draws))
        self._sampled: list[tuple[int, int]] = []  # of each request that samples: row, rows of logits

    def fill(self, rows: list[int], entries: list[ScheduledRequest], /) -> tuple[int, int, int]:
        arrays, block_size, num_requests = self.arrays, self.tables.block_size, len(entries)
        first = np.array([entry.first_position for entry in entries], np.int32)
        counts = np.array([entry.num_tokens for entry in entries], np.int32)
        num_logits = np.array([entry.num_logits for entry in entries], np.int32)
        ends, num_tokens, total_logits = first + counts, int(counts.sum()), int(num_logits.sum())
        if num_requests > len(arrays.seq_lens) or num_tokens > len(arrays.positions):
            raise IndexError(f"a step of {num_tokens} tokens of {num_requests} requests, more than there is room for")
        if total_logits > len(arrays.logits_rows) or (num_logits > np.maximum(counts, 1)).any():
            raise IndexError(f"a step of {total_logits} rows of logits, more than there is room for, or than tokens")
        self._check_lengths(ends)
        batch_rows = np.array(rows, np.int32)
        arrays.query_start[1 : num_requests + 1] = np.cumsum(counts)
        arrays.seq_lens[:num_requests] = ends
        token_rows = np.repeat(batch_rows, counts)
        positions = np.arange(num_tokens) + np.repeat(first - arrays.query_start[:num_requests], counts)
        arrays.positions[:num_tokens] = positions
        arrays.input_ids[:num_tokens] = self.tables.token_ids[token_rows, positions]
        num_blocks = int((-(-ends // block_size)).max(initial=0))
        for group, (slots, table) in enumerate(zip(arrays.slot_mappings, arrays.block_tables, strict=True)):
            blocks = self.tables.block_tables[:, group]
            slots[:num_tokens] = blocks[token_rows, positions // block_size] * block_size + positions % block_size
            table[:num_requests, :num_blocks] = blocks[batch_rows, :num_blocks]
        from_end = _countdown(num_logits)
        arrays.logits_rows[:total_logits] = np.repeat(arrays.query_start[1 : num_requests + 1], num_logits) - from_end
        self._draws["position"][:total_logits] = np.repeat(ends, num_logits) - from_end + 1
        self._sampled = [(row, entry.num_logits) for row, entry in zip(rows, entries, strict=True) if entry.num_logits]
        return num_tokens, num_requests, total_logits

    def _check_lengths(self, ends: npt.NDArray[np.int32]) -> None:
        longest, tables = int(ends.max(initial=0)), self.tables
        room = tables.token_ids.shape[1] - 1
        if tables.block_tables.shape[1]:
            room = min(room, tables.block_tables.shape[2] * tables.block_size)
        if longest > room:
            raise IndexError(f"a request of {longest} tokens, where its row has room for {room}")

    def append(self) -> tuple[list[list[int]], bool]:
        accepted, are_good, start = [], True, 0
        for row, num_logits in self._sampled:
            tokens: list[int] = []
            for j in range(num_logits):
                draw = self._draws[start + j]
                is_good, position = draw["status"] == GOOD, int(draw["position"])
                is_draft = j + 1 < num_logits and is_good and self.tables.token_ids[row, position] == draw["token_id"]
                self.tables.token_ids[row, position] = draw["token_id"]
                tokens.append(int(draw["token_id"]))
                if not is_draft:
                    are_good &= bool(is_good)
                    break
            accepted.append(tokens)
            start += num_logits
        return accepted, are_good


def _countdown(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """For each count n the numbers n, ..., 1, one after the other."""
    result: npt.NDArray[np.int32] = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum(), dtype=np.int32)
    return result
