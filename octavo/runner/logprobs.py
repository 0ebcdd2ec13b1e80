"""Log-probabilities of prompts, a block of rows at a time.

Each row is computed from that row alone, so that chunks and company change no bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.step import NewRequest, ScheduledRequest, TokenLogprobs
from octavo.devices.device import Forward, Sampler

__all__ = ["PromptLogprobs", "has_nan"]

BLOCK = 64
"""Rows of prompt logits that are in memory together."""


@dataclass(slots=True)
class _Prompt:
    token_ids: Sequence[int]
    num_top: int
    num_done: int = 0
    """Positions whose successor's log-probability was given out."""


class PromptLogprobs:
    """Knows the prompts, by request, whose log-probabilities were asked for.

    Invariant: each position is given out once, in order, even when a preempted request is computed anew.
    """

    def __init__(self, forward: Forward, sampler: Sampler) -> None:
        self._forward = forward
        self._sampler = sampler
        self._prompts: dict[int, _Prompt] = {}

    def add(self, request: NewRequest) -> None:
        num_top = request.sampling_params.prompt_logprobs
        if num_top is not None:
            self._prompts[request.request_id] = _Prompt(request.prompt_token_ids, num_top)

    def remove(self, request_id: int) -> None:
        self._prompts.pop(request_id, None)

    def compute(self, entries: list[ScheduledRequest]) -> dict[int, list[TokenLogprobs]]:
        """What the step that was just run adds, by request. A prompt whose logits are not finite has NaN in its last
        entry."""
        result: dict[int, list[TokenLogprobs]] = {}
        if not self._prompts:
            return result
        first_token = 0
        for entry in entries:
            prompt = self._prompts.get(entry.request_id)
            if prompt is not None:
                end = min(entry.first_position + entry.num_tokens, len(prompt.token_ids) - 1)
                if prompt.num_done < end:
                    result[entry.request_id] = self._advance(prompt, first_token - entry.first_position, end)
            first_token += entry.num_tokens
        return result

    def _advance(self, prompt: _Prompt, offset: int, end: int) -> list[TokenLogprobs]:
        """Of the tokens after positions `num_done` to `end`; position p is token `offset` + p of the step."""
        entries: list[TokenLogprobs] = []
        for begin in range(prompt.num_done, end, BLOCK):
            positions = range(begin, min(begin + BLOCK, end))
            logits = self._forward.logits([offset + position for position in positions])
            next_token_ids = [prompt.token_ids[position + 1] for position in positions]
            entries += self._sampler.logprobs(logits, next_token_ids, prompt.num_top)
        prompt.num_done = end
        return entries


def has_nan(entries: list[TokenLogprobs]) -> bool:
    return any(math.isnan(entry.logprob) for entry in entries)
