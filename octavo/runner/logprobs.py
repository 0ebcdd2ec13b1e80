"""Log-probabilities from raw logits: of one row, and of prompts, a block of rows at a time.

Each row is computed from that row alone, so that chunks and company change no bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.step import NewRequest, SchedulerOutput, TokenLogprobs
from octavo.kernels.step_inputs import StepInputs

__all__ = ["PromptLogprobs", "token_logprobs"]

Float32Array = npt.NDArray[np.float32]
LogitsOf = Callable[[npt.NDArray[np.int32]], Float32Array]
"""Indices of a step's tokens [S] -> logits [S, V]."""
BLOCK = 64
"""Rows of prompt logits that are in memory together."""


def token_logprobs(logits: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row [V] of raw logits; NaN where these are not finite."""
    largest = logits.max()
    if not np.isfinite(largest):
        return TokenLogprobs(math.nan, 0, [])
    log_total = largest + np.log(np.exp(logits - largest).sum())
    chosen = logits[token_id]
    rank = int(np.count_nonzero(logits > chosen)) + 1
    top: list[tuple[int, float]] = []
    if num_top:
        num_top = min(num_top, len(logits))
        ids = np.argpartition(logits, -num_top)[-num_top:]
        top = [(int(i), float(logits[i] - log_total)) for i in sorted(ids, key=lambda i: (-logits[i], i))]
    return TokenLogprobs(float(chosen - log_total), rank, top)


@dataclass(slots=True)
class _Prompt:
    token_ids: Sequence[int]
    num_top: int
    num_done: int = 0
    """Positions whose successor's log-probability was given out."""


class PromptLogprobs:
    """Knows the prompts, under the InputBatch's row numbers, whose log-probabilities were asked for.

    Invariant: each position is given out once, in order, even when a preempted request is computed anew.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}

    def add(self, row: int, request: NewRequest) -> None:
        num_top = request.sampling_params.prompt_logprobs
        if num_top is not None:
            self._prompts[row] = _Prompt(request.prompt_token_ids, num_top)

    def remove(self, row: int) -> None:
        self._prompts.pop(row, None)

    @property
    def are_wanted(self) -> bool:
        """Of any prompt at all."""
        return bool(self._prompts)

    def compute(self, step: SchedulerOutput, inputs: StepInputs, logits_of: LogitsOf) -> dict[int, list[TokenLogprobs]]:
        """What the step adds, by request. A prompt whose logits are not finite has NaN in its last entry."""
        result = {}
        for index, entry in enumerate(step.entries):
            prompt = self._prompts.get(int(inputs.rows[index]))
            if prompt is None:
                continue
            start = entry.first_position
            end = min(start + entry.num_tokens, len(prompt.token_ids) - 1)
            if prompt.num_done < end:
                first_token = int(inputs.query_start[index]) - start
                result[entry.request_id] = _compute(prompt, first_token, end, logits_of)
        return result


def _compute(prompt: _Prompt, first_token: int, end: int, logits_of: LogitsOf) -> list[TokenLogprobs]:
    """Of the tokens after positions `num_done` to `end`; position p is token `first_token` + p of the step."""
    entries: list[TokenLogprobs] = []
    for begin in range(prompt.num_done, end, BLOCK):
        positions = np.arange(begin, min(begin + BLOCK, end), dtype=np.int32)
        for position, logits in zip(positions.tolist(), logits_of(positions + first_token), strict=True):
            entries.append(token_logprobs(logits, prompt.token_ids[position + 1], prompt.num_top))
    prompt.num_done = end
    return entries
