"""HostSampler: a Sampler for devices whose tensors lie in the host's memory.

What every row of logits needs is one op, `Ops.sample_rows`, mostly part of the forward; what few rows ask for beside it
is numpy. Knows rows and positions, not requests.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import NewRequest, TokenLogprobs, TokenMask
from octavo.devices.device import FAILURES, Draw, SampledTokens
from octavo.devices.host_buffers import HostBuffers
from octavo.devices.host_extras import Constraints, Extra, make_extra
from octavo.kernels.logprobs import token_logprobs
from octavo.kernels.ops import Ops
from octavo.kernels.sampling import NOT_FINITE, NOTHING_LEFT, SAMPLE_ROW, SampleRows

__all__ = ["HostSampler"]

Float32Array = npt.NDArray[np.float32]


class _Prepared:
    """The requests of one step, of which the next step's are mostly the same, and views of what varies."""

    def __init__(self, rows: list[int], num_logits: list[int], draws: SampleRows, parameters: SampleRows) -> None:
        """`parameters`: those of all rows, which go into the step's draws; but the positions are there already."""
        self.rows = rows
        self.num_logits = num_logits
        self.starts = np.cumsum([0, *num_logits]).tolist()
        self.draws = draws[: self.starts[-1]]
        self.positions = self.draws["position"]
        filled = parameters[np.repeat(np.array(rows, np.int64), num_logits)]
        filled["position"] = self.positions
        self.draws[:] = filled
        self.statuses = self.draws["status"]
        self.are_greedy = not self.draws["temperature"].any()


class HostSampler:
    def __init__(self, vocab_size: int, ops: Ops, buffers: HostBuffers) -> None:
        self.vocab_size = vocab_size
        self._ops = ops
        self._buffers = buffers
        self._parameters: SampleRows = np.zeros(64, SAMPLE_ROW)  # by row
        self._extras: dict[int, Extra] = {}
        self._constraints: Constraints | None = None  # of the latest request
        self._prepared = _Prepared([], [], buffers.draws, self._parameters)

    def add(self, row: int, request: NewRequest) -> None:
        params = request.sampling_params
        if row >= len(self._parameters):
            self._parameters = np.concatenate((self._parameters, np.zeros(row, SAMPLE_ROW)))
        self._prepared.rows = []
        one = self._parameters[row]
        one["seed"], one["choice"] = request.seed % 2**64, request.choice
        one["temperature"] = 0.0 if params.is_greedy else params.temperature
        one["top_k"], one["top_p"], one["min_p"] = params.top_k, params.top_p, params.min_p
        if self._constraints is None or not self._constraints.are_of(request):
            self._constraints = Constraints(request)
        extra = make_extra(request, self.vocab_size, self._constraints)
        if extra is not None:
            self._extras[row] = extra

    def remove(self, row: int) -> None:
        self._extras.pop(row, None)

    def prepare(self, rows: list[int], num_logits: list[int]) -> Draw:
        if self._prepared.rows != rows or self._prepared.num_logits != num_logits:
            self._prepared = _Prepared(rows, num_logits, self._buffers.draws, self._parameters)
        if self._extras and not self._extras.keys().isdisjoint(rows):
            return "no"
        return "most_likely" if self._prepared.are_greedy else "any"

    def drawn(self) -> SampledTokens:
        token_ids, are_good = self._buffers.append()
        return SampledTokens(token_ids, [None] * len(token_ids), {} if are_good else self._failures(token_ids))

    def sample(self, logits: torch.Tensor, masks: Mapping[int, Sequence[TokenMask]]) -> SampledTokens:
        prepared, values = self._prepared, logits.numpy()
        raw: dict[int, Float32Array] = {}
        failed: dict[int, int] = {}
        extras = {i: self._extras[row] for i, row in enumerate(prepared.rows) if row in self._extras}
        try:
            self._write_masks(masks)
            for i, extra in extras.items():
                if extra.num_logprobs is not None:
                    raw[i] = values[prepared.starts[i] : prepared.starts[i + 1]].copy()
                failed |= self._process(i, extra, values)
            inputs = self._buffers.tensors(self._buffers.size)
            self._ops.sample_rows(logits, inputs.draws, inputs.masks)
        finally:
            prepared.draws["is_masked"] = 0
        for j, status in failed.items():
            prepared.statuses[j] = status
        sampled = self.drawn()
        for i, extra in extras.items():
            token_ids = sampled.token_ids[i]
            extra.accept(token_ids)
            if i in raw:
                num_top, chosen = extra.num_logprobs or 0, extra.logprob_token_ids
                sampled.logprobs[i] = [
                    token_logprobs(row, token_id, num_top, chosen)
                    for row, token_id in zip(raw[i], token_ids, strict=False)
                ]
        return sampled

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        rows = zip(logits.numpy(), token_ids, strict=True)
        return [token_logprobs(row, token_id, num_top) for row, token_id in rows]

    def _write_masks(self, masks: Mapping[int, Sequence[TokenMask]]) -> None:
        prepared, rows = self._prepared, self._buffers.arrays.masks
        for i, of_rows in masks.items():
            for j, mask in zip(range(prepared.starts[i], prepared.starts[i + 1]), of_rows, strict=True):
                if len(mask) < rows.shape[1]:
                    raise IndexError(f"a mask of {8 * len(mask)} bits for a vocabulary of {self.vocab_size}")
                rows[j] = np.frombuffer(mask, np.uint8, rows.shape[1])
                prepared.draws["is_masked"][j] = 1

    def _process(self, i: int, extra: Extra, logits: Float32Array) -> dict[int, int]:
        """Change the rows of logits of the i-th request; returns the status of those that no token can be drawn
        from."""
        prepared, failed = self._prepared, {}
        first, last = prepared.starts[i], prepared.starts[i + 1]
        drafts: list[int] = []
        for j in range(first, last):
            position = int(prepared.positions[j])
            mask = self._buffers.arrays.masks[j] if prepared.draws["is_masked"][j] else None
            if not np.isfinite(logits[j].max()):  # a NaN wins
                failed[j] = NOT_FINITE
            elif extra.process(logits[j], position, drafts, mask) and logits[j].max() == -np.inf:
                failed[j] = NOTHING_LEFT
            drafts.append(int(self._buffers.tables.token_ids[prepared.rows[i], position]))
        return failed

    def _failures(self, token_ids: list[list[int]]) -> dict[int, str]:
        """Why a request's last accepted draw is none; drafts before it are good, and rows after it don't count."""
        statuses = {
            i: int(self._prepared.statuses[start + len(accepted) - 1])
            for i, (start, accepted) in enumerate(zip(self._prepared.starts, token_ids, strict=False))
        }
        return {i: FAILURES[status] for i, status in statuses.items() if status}
